"""The loss of a language model without its logits: exact, and never ``[B, T, V]`` at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.kernels.loss import head as head_kernels
from opacus.core.kernels.loss.head import LossOptions
from opacus.core.record import head_loss
from opacus.core.rules.head_loss import HeadLossRule, HiddenGradient, as_activations
from opacus.core.rules.spec import LayerSpec
from opacus.core.sums.planner import Planner
from opacus.core.sums.rates import Rates
from opacus.losses import causal_lm_loss
from tests.helpers import oracle
from tests.helpers.without_logits import PART, B, D, Net, V, batch, outside, with_logits


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_kernels, "PART_ELEMENTS", PART)


def private(
    model: nn.Module, mode: str, clip: float, criterion: Any, **how: Any
) -> tuple[Any, Any, Any]:
    out = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(*batch()), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **how,
    )
    return out[0], out[1], out[2]


def run(model: Any, mode: str, clip: float, inside: bool, data: Any, **how: Any) -> Any:
    """One step; returns the private model, with the mean of the clipped sum in ``grad``."""
    tokens, labels = data
    wrapped, optimizer, criterion = private(
        model, mode, clip, nn.Identity() if inside else outside, **how
    )
    if mode == "hooks":
        wrapped(tokens, labels).mean().backward()
    elif inside:
        criterion(wrapped(tokens, labels)).backward()
    else:
        criterion(wrapped(tokens), model.head, labels).backward()
    optimizer.step()
    return wrapped


@pytest.mark.parametrize("tied", [False, True])
def test_values_and_gradients(tied: bool) -> None:
    model, data = Net(tied).double(), batch()
    got, want = model(*data), with_logits(model, data)
    torch.testing.assert_close(got, want)
    assert got.detach()[1] == 0.0 and got.detach()[0] > 1.0
    weights = torch.rand(B).double()
    mine, right = (
        torch.autograd.grad((losses * weights).sum(), list(model.parameters()))
        for losses in (got, want)
    )
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other)


CASES = [
    ("hooks", True, False, False),
    ("ghost", True, False, False),
    ("ghost", False, True, True),
    ("flash", True, True, False),
    ("ghost_bk", True, False, False),
    ("ghost_bk", True, True, False),
    ("ghost_bk", True, True, True),
    ("ghost_bk", False, False, True),
    ("flash_bk", False, True, False),
]


@pytest.mark.parametrize("what", ["store", "keep"])
@pytest.mark.parametrize(("mode", "inside", "tied", "deferred"), CASES)
def test_clipped_sum(
    mode: str,
    inside: bool,
    tied: bool,
    deferred: bool,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if what == "keep" and not mode.endswith("_bk"):
        return
    monkeypatch.setattr(Planner, "stores", lambda self, record: what == "store")
    monkeypatch.setenv("OPACUS_USE_DEFERRED_NORM", "1" if deferred else "0")
    torch.manual_seed(0)
    model, data = Net(tied).double(), batch()
    grads = oracle.per_sample_gradients(model, with_logits, data)
    norms = oracle.norms(grads)
    clip = float(norms.max()) / 2
    assert float(norms[1]) == 0.0 < float(norms[0]) and int((norms > clip).sum()) >= 1
    want = oracle.clipped_sum(grads, clip)
    run(model, mode, clip, inside, data)
    for name, parameter in model.named_parameters():
        assert oracle.relative_error(parameter.grad * B, want[name]) < 1e-10, name


class Largest(TorchDispatchMode):
    """Sizes of all results of operations, inside of the operators of this package too."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[int, ...], str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "opacus":
            with self:
                return head_loss._head_loss(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.sizes[tuple(leaf.shape)] = str(func)
        return result

    def has(self, elements: int) -> list[Any]:
        return [s for s in self.sizes if torch.Size(s).numel() >= elements and V in s]


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_logits_are_never_all_there(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 300 tokens of 4 features the logits would be by far the largest tensor."""
    torch.manual_seed(0)
    model = Net(bias=False)
    model.table, model.mlp, model.head = nn.Embedding(V, 4), nn.Tanh(), nn.Linear(4, V, bias=False)
    monkeypatch.setattr(head_kernels, "PART_ELEMENTS", 2 * 300 * 5)
    tokens = torch.randint(V, (2, 300))
    wrapped, optimizer, criterion = private(model, mode, 1.0, nn.Identity())
    with Largest() as mode_of_sizes:
        criterion(wrapped(tokens, tokens)).backward()
        optimizer.step()
    assert any(5 in s for s in mode_of_sizes.sizes), "the parts are seen"
    assert not mode_of_sizes.has(2 * 300 * V)
    with Largest() as mode_of_sizes:
        model.head(torch.zeros(2, 300, 4))
    assert mode_of_sizes.has(2 * 300 * V), "logits would have been seen"


def test_samples_that_are_not_finite_and_none_at_all() -> None:
    torch.manual_seed(0)
    model, (tokens, labels) = Net().double(), batch()
    grads = oracle.per_sample_gradients(model, with_logits, (tokens, labels))
    clip = float(oracle.norms(grads).max()) / 2
    wrapped, optimizer, criterion = private(model, "ghost_bk", clip, nn.Identity())
    part = slice(2, 4)

    def step(*data: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        criterion(wrapped(*data)).backward()
        optimizer.step()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    broken = model.table.register_forward_hook(
        lambda _, args, out: torch.where(args[0][..., :1, None] == tokens[0, 0], torch.nan, out)
    )
    assert (tokens[2:, 0] != tokens[0, 0]).all()
    optimizer.param_groups[0]["lr"] = 0.0
    got = step(torch.cat([tokens[:1], tokens[part]]), torch.cat([labels[:1], labels[part]]))
    broken.remove()
    want = oracle.clipped_sum({n: g[part] for n, g in grads.items()}, clip)
    for name, grad in got.items():
        assert oracle.relative_error(grad * B, want[name]) < 1e-10, name
    assert all(bool((g == 0).all()) for g in step(tokens[:0], labels[:0]).values())


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_no_sample_where_the_head_trains_its_bias_alone(mode: str) -> None:
    model, (tokens, labels) = Net(tied=True).double(), batch()
    model.head.weight.requires_grad_(False)
    grads = oracle.per_sample_gradients(model, with_logits, (tokens, labels))
    wrapped = run(model, mode, float(oracle.norms(grads).max()) / 2, True, (tokens[:0], labels[:0]))
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    assert len(trained) == 3 and all(bool((p.grad == 0).all()) for p in trained)


@pytest.mark.parametrize("tied", [False, True])
def test_the_planner_knows_how_fast_the_head_is_multiplied(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses' gradients are in fp32, whatever the head computes in: it was stored for that."""
    asked: list[torch.dtype] = []

    def rates(device: torch.device, dtype: torch.dtype) -> Rates:
        asked.append(dtype)
        return Rates(multiply_adds=1e13 if dtype == torch.bfloat16 else 1e5, bytes=1e10)

    monkeypatch.setattr("opacus.core.sums.choice.rates_of", rates)
    model = run(Net(tied).bfloat16(), "ghost_bk", 1.0, True, batch())
    assert set(asked) == {torch.bfloat16}
    (head,) = [line for line in model.explain().splitlines() if line.startswith("head ")]
    assert " keep " in head


def test_batches_of_one_sample() -> None:
    """The second one runs without taps, on autograd's own gradient."""
    torch.manual_seed(0)
    model, (tokens, labels) = Net(tied=True).double(), batch()
    grads = oracle.per_sample_gradients(model, with_logits, (tokens, labels))
    clip = float(oracle.norms(grads)[3]) / 2
    wrapped, optimizer, criterion = private(model, "ghost_bk", clip, nn.Identity())
    optimizer.param_groups[0]["lr"] = 0.0
    for rows in (slice(0, 4), slice(3, 4)):
        optimizer.zero_grad()
        criterion(wrapped(tokens[rows], labels[rows])).backward()
        optimizer.step()
    assert wrapped._recorder.lone.ready
    want = oracle.clipped_sum({n: g[3:] for n, g in grads.items()}, clip)
    for name, parameter in model.named_parameters():
        assert oracle.relative_error(parameter.grad * B, want[name]) < 1e-10, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_heads_of_any_number_of_tokens(
    tokens: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than features, and fewer: neither forms the head's gradients a sample at a time."""
    torch.manual_seed(0)
    model = Net(tied).double()
    data = torch.randint(V, (B, tokens)), torch.randint(V, (B, tokens))
    data[1][0] = -100
    grads = oracle.per_sample_gradients(model, with_logits, data)
    clip = max(float(oracle.norms(grads).max()) / 2, 1e-3)
    monkeypatch.setattr(HeadLossRule, "per_sample_grad", None)
    run(model, "ghost_bk", clip, True, data)
    want = oracle.clipped_sum(grads, clip)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad * B, want[name], rtol=1e-9, atol=1e-12)


def test_tokens_that_cancel() -> None:
    """Two tokens alike whose losses count with opposite signs: their products cannot be trusted."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 2, 8), torch.randn(20, 8)
    targets = torch.randint(20, (3, 2))
    hidden[0, 1], targets[0, 1] = hidden[0, 0], targets[0, 0]
    grads = torch.tensor([[1.0, -1.0 + 1e-4], [1.0, 1.0], [0.0, 0.0]])
    _, lse = head_kernels.token_losses(hidden, weight, None, targets, LossOptions())
    rule = HeadLossRule(LossOptions(), HiddenGradient())
    spec = LayerSpec("head", nn.Linear, ("weight",), {"weight": tuple(weight.shape)}, {})
    used = head_kernels.Head(hidden, weight, None, targets, lse)
    got = rule.norm_sq(spec, as_activations(used), grads)["weight"]
    wide = weight.double().requires_grad_()
    logits = hidden.double() @ wide.t()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(3, 2)
    want = [
        torch.autograd.grad(one, wide, retain_graph=True)[0].square().sum()
        for one in (losses * grads.double()).sum(1)
    ]
    assert 0 < want[0] < 1e-6 < want[1] and want[2] == 0
    torch.testing.assert_close(got.double(), torch.stack(want), rtol=1e-3, atol=0)


def test_users_with_several_rows() -> None:
    torch.manual_seed(0)
    model, (tokens, labels) = Net(tied=True).double(), batch()
    owner = torch.tensor([7, 2, 7, 2])
    grads = oracle.per_sample_gradients(model, with_logits, (tokens, labels))
    by_user = {n: torch.stack([g[1] + g[3], g[0] + g[2]]) for n, g in grads.items()}
    clip = float(oracle.norms(by_user).max()) / 2
    want = oracle.clipped_sum(by_user, clip)
    wrapped, optimizer, criterion = private(
        model, "ghost_bk", clip, nn.Identity(), privacy_unit="owner"
    )
    criterion(wrapped(tokens, labels, owner=owner)).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert oracle.relative_error(parameter.grad * B, want[name]) < 1e-10, name


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_what_cannot_be_is_refused() -> None:
    model, (tokens, labels) = Net(), batch()
    hidden = model.hidden(tokens)
    with pytest.raises(ValueError, match="adapter or a cap"):
        causal_lm_loss(hidden, Adapted(D, V), labels)
    with pytest.raises(ValueError, match="targets \\[B, T\\]"):
        causal_lm_loss(hidden.flatten(0, 1), model.head, labels)
    with pytest.raises(ValueError, match="reduction"):
        causal_lm_loss(hidden, model.head, labels, reduction="tokens")
    with pytest.raises(IndexError, match="target 37 "):
        causal_lm_loss(hidden, model.head, labels.masked_fill(labels == labels[0, 5], V))
