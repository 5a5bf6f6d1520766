"""grad_sample_mode="auto": what comes out is what one sample at a time gives, and it says why."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    get_gsm_class,
    prepare_module,
    wrap_model,
)
from opacus.optimizers import get_optimizer_class
from opacus.optimizers.adaclipoptimizer import AdaClipDPOptimizer
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import (
    DPLossFastGradientAdaptiveClipping,
    PrivacyEngineAdaptiveClipping,
)
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from tests.helpers.modes import B, assert_close, oracle, trainable
from tests.helpers.oracle import clipped_sum, per_sample_gradients
from tests.helpers.problems import PROBLEMS, build, criterion, per_sample
from tests.helpers.refusals import arguments, assert_untouched

TARGETS = torch.tensor([0, 1, 0, 1])


def private(module: nn.Module, **changes: Any) -> Any:
    """What make_private returns for a model of `arguments`, without noise."""
    given: dict[str, Any] = {
        "noise_multiplier": 0.0,
        "poisson_sampling": False,
        "criterion": nn.CrossEntropyLoss(),
        "grad_sample_mode": "auto",
    }
    return PrivacyEngine().make_private(**arguments(module=module, **given | changes))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


class Gated(nn.Module):
    """Parameters that only the generic rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(6))
        self.inner = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * torch.sigmoid(self.gate)


class Adapted(nn.Module):
    """A frozen layer and a low-rank adapter, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 6).requires_grad_(False)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.b(self.a(x))))


@pytest.mark.parametrize(
    "name", ["mlp", "frozen", "own_parameters", "language_tied", "channels", "checkpoint"]
)
def test_clipped_gradient_equals_oracle(name: str) -> None:
    inputs, targets = PROBLEMS[name].batch(B)
    _, norms = oracle(name, inputs, targets, 1.0)
    clip = norms.median().item()
    want, _ = oracle(name, inputs, targets, clip)
    assert (norms > clip * 1.001).any() and (norms < clip * 0.999).any()
    model = build(name)
    private_model, optimizer, loss_fn, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(trainable(model), lr=0.1),
        criterion=criterion(name),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        poisson_sampling=False,
        grad_sample_mode="auto",
    )
    assert private_model.auto_choice.mode == "ghost_bk"
    loss_fn(private_model(inputs), targets).backward()
    got = private_model.per_sample_gradient_norms.double()
    torch.testing.assert_close(got, norms, rtol=1e-5, atol=1e-7)
    optimizer.step()
    assert_close([p.grad for p in trainable(private_model)], [w / B for w in want])


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", [Gated, Adapted])
def test_low_rank_adapters_and_layers_of_ones_own(kind: type[nn.Module], wrapped: bool) -> None:
    torch.manual_seed(0)
    model = kind() if kind is Adapted else nn.Sequential(kind(), nn.Linear(6, 2))
    inputs = torch.randn(4, 4) * 3
    loss = nn.CrossEntropyLoss()
    grads = per_sample_gradients(model, lambda m, b: loss(m(b[0]), b[1]), (inputs, TARGETS))
    want = clipped_sum(grads, 0.5)
    out = private(model, max_grad_norm=0.5, wrap_model=wrapped)
    assert isinstance(out[0], nn.Module) is wrapped
    out[2](model(inputs), TARGETS).backward()
    got = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert sum(w.square().sum() for w in want.values()) > 0.01
    assert_close([got[n] for n in want], list(want.values()))


def test_per_layer_clipping() -> None:
    name, limits = "mlp", [0.05, 0.1, 0.2]
    inputs, targets = PROBLEMS[name].batch(B)
    grads = per_sample(name, build(name).double(), inputs, targets)
    want = [
        sum(min(1.0, c / (float(g[k].norm()) + 1e-6)) * g[k] for g in grads)
        for k, c in enumerate(limits)
    ]
    model = build(name)
    out = private(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        clipping="per_layer",
        max_grad_norm=limits,
    )
    assert out[0].auto_choice.mode == "ghost_bk"
    out[2](out[0](inputs), targets).backward()
    assert_close([p.grad for p in model.parameters()], want)


def test_adaptive_clipping_takes_per_sample_gradients_and_still_returns_a_criterion() -> None:
    further = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 0.1,
        "unclipped_num_std": 2.0,
    }
    loss = nn.CrossEntropyLoss()
    model, optimizer, returned, loader = private(
        net(), criterion=loss, clipping="adaptive", noise_multiplier=0.5, **further
    )
    assert type(model) is GradSampleModule and type(optimizer) is AdaClipDPOptimizer
    assert returned is loss and isinstance(loader, DataLoader)
    returned(model(torch.randn(4, 4)), TARGETS).backward()
    optimizer.step()
    assert model.explain().startswith("grad_sample_mode='auto' chose 'hooks'")
    assert "adaptive" in model.explain()


def test_the_engine_of_adaptive_clipping() -> None:
    out = PrivacyEngineAdaptiveClipping().make_private(
        **arguments(module=net(), grad_sample_mode="auto", poisson_sampling=False),
        target_unclipped_quantile=0.5,
    )
    assert type(out[2]) is DPLossFastGradientAdaptiveClipping
    assert out[0].auto_choice.mode == "ghost_bk"


def test_a_privacy_budget() -> None:
    given = arguments(module=net(), grad_sample_mode="auto")
    del given["noise_multiplier"]
    out = PrivacyEngine().make_private_with_epsilon(
        **given, target_epsilon=5.0, target_delta=1e-5, epochs=1
    )
    assert type(out[0]) is GradSampleModuleFastGradientClipping
    assert type(out[2]) is DPLossFastGradientClipping and len(out) == 4


def test_explain_says_which_mode_and_why_and_then_the_plan() -> None:
    model, optimizer, loss_fn, _ = private(net())
    for step in range(2):
        loss_fn(model(torch.randn(4, 4)), TARGETS).backward()
        optimizer.step()
        optimizer.zero_grad()
        head, table, *more = model.explain().split("\n\n")
        assert more
        assert head.splitlines()[0] == "grad_sample_mode='auto' chose 'ghost_bk':"
        assert len(head.splitlines()) == 4 and "not sharded" in head, step
        assert [line.split()[0] for line in table.splitlines()] == ["layer", "2", "0"]
    assert "auto" not in private(net(), grad_sample_mode="ghost_bk")[0].explain()


def test_where_two_backward_passes_were_chosen_there_is_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opacus.core.step.auto._memory_of", lambda device: 100)
    module = net()
    module[0].gradient_checkpointing = True
    model = private(module)[0]
    assert model.auto_choice.mode == "ghost" and not model.book_keeping
    assert model.explain().startswith("grad_sample_mode='auto' chose 'ghost'")
    assert "two backward passes" in model.explain() and "layer  kind" not in model.explain()
    for mode in ("ghost", "hooks"):
        with pytest.raises(RuntimeError, match="grad_sample_mode='auto'"):
            private(net(), grad_sample_mode=mode)[0].explain()


# --- functions that take the name of a mode ---


@pytest.mark.parametrize("function", [wrap_model, prepare_module])
def test_models_are_wrapped(function: Any) -> None:
    wrapped = function(net(), "auto", max_grad_norm=0.5)
    assert type(wrapped) is GradSampleModuleFastGradientClipping
    assert wrapped.book_keeping and wrapped.max_grad_norm == 0.5
    assert wrapped.explain().startswith("grad_sample_mode='auto' chose 'ghost_bk'")
    hooks = function(net(), "auto", False)
    assert type(hooks) is GradSampleHooksFastGradientClipping and hooks.book_keeping


def test_the_engines_step_that_prepares_a_model_takes_it_too() -> None:
    model = PrivacyEngine()._prepare_model(net(), max_grad_norm=0.25, grad_sample_mode="auto")
    assert model.max_grad_norm == 0.25 and model.auto_choice.mode == "ghost_bk"


@pytest.mark.parametrize(
    "function",
    [get_gsm_class, lambda mode: get_optimizer_class("flat", False, mode)],
    ids=["get_gsm_class", "get_optimizer_class"],
)
def test_without_a_model_nothing_can_be_chosen(function: Any) -> None:
    with pytest.raises(ValueError, match="depends on the model"):
        function("auto")


def test_a_wrapped_model_can_be_copied_and_unwrapped() -> None:
    model = wrap_model(net(), "auto")
    again = copy.deepcopy(model)
    assert again.auto_choice == model.auto_choice
    plain = model.to_standard_module()
    assert_untouched(plain)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"criterion": None}, "needs the criterion"),
        ({"clipping": "flatt"}, "per_layer"),
        ({"max_grad_norm": [1.0, 2.0]}, "max_grad_norm"),
        ({"data_layout": "sharded"}, "FSDP2"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "loss_reduction"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    module = net()
    with pytest.raises(ValueError, match=message):
        private(module, **changes)
    if changes.get("criterion", "") is None or "criterion" not in changes:
        assert_untouched(module)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model = net().cuda()
    inputs = torch.randn(4, 4)
    loss = nn.CrossEntropyLoss()
    grads = per_sample_gradients(net(), lambda m, b: loss(m(b[0]), b[1]), (inputs, TARGETS))
    out = private(model, max_grad_norm=0.5)
    triton = importlib.util.find_spec("triton") is not None
    assert out[0].auto_choice.mode == ("flash_bk" if triton else "ghost_bk")
    out[2](out[0](inputs.cuda()), TARGETS.cuda()).backward()
    assert_close([p.grad.cpu() for p in model.parameters()], list(clipped_sum(grads, 0.5).values()))
