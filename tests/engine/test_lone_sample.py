"""Batches of one sample run without taps: the same numbers, the same refusals, nothing past them."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModuleFastGradientClipping, register_grad_sampler
from opacus.utils.batch_memory_manager import BatchMemoryManager
from tests.helpers import oracle
from tests.helpers.lone_sample import C, no_gradient, private, prove, vectors
from tests.helpers.problems import PROBLEMS, build, clipped_sum, criterion, per_sample

MODES = ("ghost", "ghost_bk", "flash", "flash_bk")


def proven(mode: str = "ghost_bk") -> tuple[nn.Module, Any, Any, Any]:
    """Model, module, optimizer and criterion, after a step of several samples."""
    model = build("mlp")
    made = private(model, mode)
    prove(*made, *vectors())
    return model, *made


def norm_of(parameters: Iterable[Tensor]) -> Tensor:
    """Of all gradients together."""
    return torch.cat([p.grad.flatten() for p in parameters]).norm()  # type: ignore[union-attr]


def records(module: Any) -> list[Any]:
    """The records that taps deliver from now on."""
    seen: list[Any] = []
    sink = module._recorder.sink

    def noting(record: Any) -> None:
        seen.append(record)
        sink(record)

    module._recorder.sink = noting
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", [n for n in PROBLEMS if n not in ("transposed",)])
def test_the_clipped_gradient_is_that_of_one_sample_alone(
    name: str, mode: str, reduction: str
) -> None:
    device = torch.get_default_device()
    model, problem = build(name).to(device), PROBLEMS[name]
    module, optimizer, loss = private(
        model, mode, criterion(name, reduction), problem.batch(8), loss_reduction=reduction
    )
    prove(module, optimizer, loss, *problem.batch(3))
    inputs, targets = problem.batch(1, seed=5)
    double = build(name, dtype=torch.float64).to(device)
    grads = per_sample(name, double, inputs, targets)
    wanted, norms = clipped_sum(grads, C)
    assert norms.min() > 2 * C  # else nothing would be clipped
    seen = records(module)
    loss(module(inputs), targets).backward()
    tapped = name == "checkpoint_reentrant"  # there the forward pass cannot be followed
    assert bool(seen) == tapped
    assert torch.allclose(module.per_sample_gradient_norms.double(), norms, rtol=1e-5)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter, want in zip(parameters, wanted, strict=True):
        assert parameter.grad is not None
        assert oracle.relative_error(parameter.grad, want) < 2e-5
    total = torch.sqrt(sum(p.grad.double().square().sum() for p in parameters))  # type: ignore
    assert total <= C * (1 + 1e-4)
    optimizer.step()


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_per_layer_clipping_bounds_every_parameter(mode: str) -> None:
    limits = [0.02, 0.03, 0.05]
    model = build("mlp")
    module, optimizer, loss = private(model, mode, max_grad_norm=limits, clipping="per_layer")
    prove(module, optimizer, loss, *vectors())
    inputs, targets = vectors(1, seed=5)
    (grads,) = per_sample("mlp", build("mlp", dtype=torch.float64), inputs, targets)
    seen = records(module)
    loss(module(inputs), targets).backward()
    assert not seen
    for parameter, grad, limit in zip(model.parameters(), grads, limits, strict=True):
        assert grad.norm() > limit
        assert oracle.relative_error(parameter.grad, grad * limit / (grad.norm() + 1e-6)) < 1e-5


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_many_lone_samples_are_one_large_batch(mode: str) -> None:
    """Physical batches of one, some of the logical batches larger than others."""
    results = []
    for most in (1, 16):
        torch.manual_seed(0)
        model, data = build("mlp"), TensorDataset(*vectors(24))
        module, optimizer, loss, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(data, batch_size=6),
            noise_multiplier=0.0,
            max_grad_norm=C,
            grad_sample_mode=mode,
        )
        seen = records(module)
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=most, optimizer=optimizer
        ) as batches:
            torch.manual_seed(1)
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss(module(inputs), targets).backward()
                optimizer.step()
        results.append(([p.detach().clone() for p in model.parameters()], len(seen)))
    (alone, few), (together, many) = results
    assert few == many / 4 or few < many  # only the first batch was tapped
    for got, want in zip(alone, together, strict=True):
        assert torch.allclose(got, want, atol=1e-6)
    assert any(
        (a - b).abs().max() > 1e-3 for a, b in zip(alone, build("mlp").parameters(), strict=True)
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_that_is_not_finite_adds_nothing(mode: str) -> None:
    model, module, _optimizer, loss = proven(mode)
    inputs, targets = vectors(1)
    seen = records(module)
    loss(module(inputs * float("nan")), targets).backward()
    assert not seen
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_ordinary_backward_leaves_no_gradient_but_norms(mode: str) -> None:
    model, module, _optimizer, _loss = proven(mode)
    inputs, targets = vectors(1)
    (grads,) = per_sample("mlp", build("mlp"), inputs, targets)
    nn.functional.cross_entropy(module(inputs), targets).backward()
    assert no_gradient(model)
    norm = torch.sqrt(sum(g.square().sum() for g in grads))  # type: ignore[arg-type]
    assert torch.allclose(module.get_norm_sample(), norm.reshape(1), rtol=1e-5)
    x = inputs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(module(x).sum(), x)  # an attack on the inputs, say
    assert grad.abs().sum() > 0
    assert no_gradient(model)


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_losses_of_one_forward_cannot_be_clipped_twice(mode: str) -> None:
    model, module, optimizer, loss = proven(mode)
    inputs, targets = vectors(1)
    output = module(inputs)
    first, second = loss(output, targets), loss(output, (targets + 1) % 3)
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="clipped and summed already"):
        second.backward()
    optimizer.zero_grad()
    output = module(inputs)
    (loss(output, targets) + loss(output, (targets + 1) % 3)).backward()
    norm = norm_of(model.parameters())
    assert norm <= C * (1 + 1e-4)


def test_several_forward_passes_make_one_gradient() -> None:
    """The clipped gradient is of the sum, not a sum of clipped ones."""
    model, module, _optimizer, loss = proven()
    (x, y), (z, w) = vectors(1, 5), vectors(1, 6)
    seen = records(module)
    (loss(module(x), y) + loss(module(z), w)).backward()
    assert not seen
    plain = build("mlp", dtype=torch.float64)
    nn.functional.cross_entropy(plain(x.double()), y).add(
        nn.functional.cross_entropy(plain(z.double()), w)
    ).backward()
    norm = norm_of(plain.parameters())
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert oracle.relative_error(got.grad, want.grad * C / (norm + 1e-6)) < 1e-5  # type: ignore


class Rows(nn.Module):
    """Given ``{"x": [N, 6]}`` once, or ``[1, N, 6]``: rows are samples, whatever came in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 6))


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_one_input_with_several_losses_is_refused_and_then_tapped(mode: str) -> None:
    model = Rows()
    plain = copy.deepcopy(model)
    module, optimizer, loss = private(model, mode)
    prove(module, optimizer, loss, *vectors())
    inputs, targets = vectors(4)
    with pytest.raises(RuntimeError, match="one sample, but there are 4 losses"):
        loss(module(inputs[None]), targets, shape=(4,)).backward()
    assert no_gradient(model)
    optimizer.zero_grad()
    loss(module(inputs[None]), targets, shape=(4,)).backward()
    grads = oracle.per_sample_gradients(
        plain, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), (inputs, targets)
    )
    wanted = oracle.clipped_sum(grads, C)
    for name, parameter in model.named_parameters():
        assert oracle.relative_error(parameter.grad, wanted[name]) < 1e-5


class Tokens(nn.Module):
    """Positions that no input has, and a layer on all tokens as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.positions = nn.Linear(6, 6), nn.Embedding(5, 6)
        self.flat, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(torch.tanh(self.flat(x.flatten(0, 1)).view(x.shape)).mean(1))


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
@pytest.mark.parametrize("seen", ["positions", "flat"])
def test_layers_whose_rows_are_no_samples_may_be_watched_by_others(seen: str, mode: str) -> None:
    torch.manual_seed(0)
    model = Tokens()
    inputs, targets = 3 * torch.randn(4, 5, 6), torch.randint(0, 3, (4,))
    model.get_submodule(seen).register_forward_hook(lambda *_: None)  # as FSDP2 has on its units
    plain = copy.deepcopy(model)
    module, optimizer, loss = private(model, mode, rows=(inputs, targets))
    prove(module, optimizer, loss, inputs, targets)
    tapped = records(module)
    loss(module(inputs[:1]), targets[:1]).backward()
    assert not tapped
    nn.functional.cross_entropy(plain(inputs[:1]), targets[:1]).backward()
    norm = norm_of(plain.parameters())
    assert norm > 2 * C
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None and want.grad is not None
        assert oracle.relative_error(got.grad, want.grad * C / (norm + 1e-6)) < 2e-5


class Aside(nn.Module):
    """A head that callers run themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_layers_called_outside_the_forward(mode: str) -> None:
    """From the start: never without taps. Only later: refused, then tapped."""
    model = Aside()
    module, optimizer, loss = private(model, mode)
    inputs, targets = vectors()
    for _ in range(2):
        loss(model.head(module(inputs[:1])), targets[:1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert module._recorder.lone.ruled_out
    model = Aside()
    module, optimizer, loss = private(model, mode)
    prove(module, optimizer, loss, inputs, targets)
    with pytest.raises(RuntimeError, match="outside the model's forward"):
        loss(model.head(module(inputs[:1])), targets[:1]).backward()
    assert no_gradient(model)
    optimizer.zero_grad()
    loss(model.head(module(inputs[:1])), targets[:1]).backward()
    norm = norm_of(model.parameters())
    assert abs(norm - C) < 1e-4


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_a_term_on_the_parameters_themselves_is_refused(mode: str) -> None:
    model, module, _optimizer, loss = proven(mode)
    inputs, targets = vectors(1)
    penalty = model[0].weight.square().sum()  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"parameters \['0.weight'\] received gradients"):
        (loss(module(inputs), targets) + penalty).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_made_trainable_later_joins_and_a_frozen_one_is_left_out() -> None:
    model = build("frozen")
    module, optimizer, loss = private(model)
    prove(module, optimizer, loss, *vectors())
    model[2].bias.requires_grad_(False)  # type: ignore[index]
    inputs, targets = vectors(1)
    loss(module(inputs), targets).backward()
    assert model[2].bias.grad is None or not model[2].bias.grad.any()  # type: ignore[index]
    optimizer.zero_grad()
    model[0].weight.requires_grad_(True)  # type: ignore[index]
    loss(module(inputs), targets).backward()
    assert model[0].weight.grad.any()  # type: ignore[index]
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    assert torch.cat(grads).norm() <= C


class Fails(nn.Module):
    """Fails when told to, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        assert not isinstance(self.first.weight, nn.Parameter)
        if self.error is not None:
            raise self.error
        return self.second(x)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_parameters_are_back_after_a_forward_that_failed(error: type[BaseException]) -> None:
    model = Fails()
    held = list(model.parameters())
    module, _, loss = private(model)
    inputs, targets = vectors()

    def check(x: Tensor) -> None:
        module(x)

    module._recorder.lone._proven = True
    model.error = error
    with pytest.raises(error):
        check(inputs[:1])
    model.error = None
    assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
    loss(module(inputs[:1]), targets[:1]).backward()
    assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
    assert model.first._forward_hooks and model.first._forward_pre_hooks
    norm = norm_of(held)
    assert abs(norm - C) < 1e-4


class Side(nn.Module):
    """A second loss left on the module, and a weight used as a matrix by another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.extra: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.table(ids).mean(1)))
        self.extra = x.square().mean(1)
        return x


def test_side_outputs_count_and_cannot_be_clipped_again() -> None:
    model = Side()
    ids, targets = torch.randint(0, 11, (4, 5)), torch.randint(0, 6, (4,))
    module, optimizer, loss = private(model, "ghost", rows=(ids, targets))
    prove(module, optimizer, loss, ids, targets)
    output = loss(module(ids[:1]), targets[:1])
    extra = output._with(model.extra)
    (output + extra).backward(retain_graph=True)
    norm = norm_of(model.parameters())
    assert abs(norm - C) < 1e-4
    with pytest.raises(RuntimeError, match="clipped and summed already"):
        extra.backward()


class Blocks(nn.Module):
    """Checkpointed blocks whose batch of one follows one of several in the same generation."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def test_recomputed_layers_are_as_the_first_time() -> None:
    model = Blocks()
    module, optimizer, loss = private(model)
    inputs, targets = vectors()
    prove(module, optimizer, loss, inputs, targets)
    skipped = loss(module(inputs[:1]), targets[:1])  # never run backward
    loss(module(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    del skipped
    gc.collect()
    loss(module(inputs[:1]), targets[:1]).backward()
    norm = norm_of(model.parameters())
    assert abs(norm - C) < 1e-4


class Twice(nn.Module):
    """Two parameters to which autograd gives one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + (self.one + self.other)))


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_parameters_with_one_gradient(mode: str) -> None:
    model = Twice().to(torch.get_default_device())
    plain = copy.deepcopy(model).double()
    module, optimizer, loss = private(model, mode)
    prove(module, optimizer, loss, *vectors())
    inputs, targets = vectors(1)
    loss(module(inputs), targets).backward()
    nn.functional.cross_entropy(plain(inputs.double()), targets).backward()
    norm = norm_of(plain.parameters())
    assert norm > 2 * C
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert oracle.relative_error(got.grad, want.grad * C / (norm + 1e-6)) < 1e-5  # type: ignore
    assert model.one.grad is not model.other.grad


class Told(nn.Linear):
    """A layer with a sampler of its user's."""


@register_grad_sampler(Told)
def _told(layer: Told, activations: Any, backprops: Tensor) -> dict[Any, Tensor]:
    grads = {layer.weight: torch.einsum("bp,bd->bpd", backprops, activations[0])}
    return grads | {layer.bias: backprops}


class Watching(GradSampleModuleFastGradientClipping):
    """Wants to see every layer."""

    def capture_backprops_hook(self, *args: Any, **kwargs: Any) -> None:
        super().capture_backprops_hook(*args, **kwargs)


def test_who_wants_to_see_every_layer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private(nn.Sequential(Told(6, 3)))[0]._recorder.lone is None
    assert Watching(nn.Linear(6, 3))._recorder.lone is None
    assert GradSampleModuleFastGradientClipping(nn.Linear(6, 3))._recorder.lone is not None
    monkeypatch.setenv("OPACUS_LONE_SAMPLE", "0")
    assert GradSampleModuleFastGradientClipping(nn.Linear(6, 3))._recorder.lone is None
    monkeypatch.setenv("OPACUS_LONE_SAMPLE", "maybe")
    with pytest.raises(ValueError, match="OPACUS_LONE_SAMPLE must be 0 or 1, got 'maybe'"):
        private(build("mlp"))


def test_copies_and_pickles() -> None:
    module, optimizer, loss = private(build("mlp"))
    prove(module, optimizer, loss, *vectors())
    inputs, targets = vectors(1)
    pending = loss(module(inputs), targets)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(isinstance(p, nn.Parameter) for p in twin.parameters())
        assert not twin._recorder.lone_runs
    pending.backward()


def test_explain_says_so() -> None:
    module, optimizer, loss = private(build("mlp"))
    prove(module, optimizer, loss, *vectors())
    assert "Batches of one sample" not in module.explain()
    prove(module, optimizer, loss, *vectors(1))
    assert "Batches of one sample" in module.explain()


def test_noise_and_accounting_are_as_ever() -> None:
    """The noise does not know how a gradient was formed."""
    grads = []
    for variable in ("0", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPACUS_LONE_SAMPLE", variable)
            generator = torch.Generator().manual_seed(7)
            model = build("mlp")
            module, optimizer, loss = private(
                model, noise_multiplier=1.3, noise_generator=generator
            )
            prove(module, optimizer, loss, *vectors())
            loss(module(vectors(1, 5)[0]), vectors(1, 5)[1]).backward()
            optimizer.step()
            grads.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    for tapped, whole in zip(*grads, strict=True):
        assert torch.allclose(tapped, whole, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["language_tied", "channels", "checkpoint"])
def test_on_a_gpu(name: str, mode: str) -> None:
    with torch.device("cuda"):
        test_parameters_with_one_gradient(mode)
        test_the_clipped_gradient_is_that_of_one_sample_alone(name, mode, "mean")
