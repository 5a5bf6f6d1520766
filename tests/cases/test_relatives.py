"""Models like those of the reported cases: ordinary ones work, those whose samples meet do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm

from opacus.core.record import whose
from tests.helpers.moves import is_refusal
from tests.helpers.units import CLIP, assert_right, clipped_sum, private, step

B, T, D = 6, 4, 5
MODES = ["hooks", "ew", "functorch", "ghost", "ghost_bk"]


class Net(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.head, self.use = nn.Linear(D, D), nn.Linear(D, 3), use
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self, x))


def batch(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-0.5, 1.0, B).view(B, *[1] * len(shape))
    return torch.randn(B, *shape, generator=generator) * scale, torch.arange(B) % 3


# --- what must work ---


class Scan(nn.Module):
    """A recurrence with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(D, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = self.decay * state + x[:, t]
        return state


class Queries(nn.Module):
    """Learned queries, the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(1, 3, D, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q.expand(len(x), -1, -1), x, x).mean(1)


class Windows(nn.Module):
    """One bias for all windows of all samples, computed by a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.head = nn.Embedding(2, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 2, D) + self.bias(torch.arange(2)[None])
        return self.head(rows.tanh().view(len(x), T, D).mean(1))


def codes(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    chosen = net.code(torch.cdist(h.detach(), net.code.weight.detach()).argmin(-1))
    return h + (chosen - h).detach() + 0.5 * (chosen - h.detach())


def cached(net: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return net.b(net.b(x).tanh()).tanh()


def reads_shapes(net: Any, x: Tensor) -> Tensor:
    assert isinstance(net.a.weight, nn.Parameter)
    return net.a(x) + x.new_zeros(x.shape[0], net.a.weight.shape[0])


def own_matrix(net: Any, x: Tensor) -> Tensor:
    return torch.bmm(net.matrix(x).view(-1, D, D).tanh(), x.unsqueeze(-1)).squeeze(-1)


def last_tokens(net: Any, x: Tensor) -> Tensor:
    length = (x.detach()[:, :, 0] > 0).sum(1).clamp(max=T - 1)
    return net.a(x).tanh()[torch.arange(len(x)), length]


def one_hot(net: Any, x: Tensor) -> Tensor:
    """Codes of the samples, though they are made of constants."""
    return net.a(F.one_hot(x.detach().abs().argmax(-1), D).to(x).tanh())


ORDINARY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "scan": (lambda: Net(lambda net, x: net.scan(net.a(x)), scan=Scan()), (T, D)),
    "learned queries": (lambda: Net(lambda net, x: net.q(net.a(x)), q=Queries()), (T, D)),
    "one-hot codes": (lambda: Net(one_hot), (D,)),
    "codes": (lambda: Net(codes, code=nn.Embedding(7, D)), (D,)),
    "a layer used twice": (lambda: Net(lambda net, x: net.a(net.a(x).tanh()).tanh()), (D,)),
    "last tokens": (lambda: Net(last_tokens), (T, D)),
    "shapes and types": (lambda: Net(reads_shapes), (D,)),
    "matrices of the samples' own": (lambda: Net(own_matrix, matrix=nn.Linear(D, D * D)), (D,)),
    "cached weight norm": (
        lambda: Net(cached, b=parametrizations.weight_norm(nn.Linear(D, D))),
        (D,),
    ),
    "one bias for all windows": (Windows, (T, D)),
    "cached orthogonal": (
        lambda: Net(cached, b=parametrizations.orthogonal(nn.Linear(D, D))),
        (D,),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_models(kind: str, mode: str) -> None:
    make, shape = ORDINARY[kind]
    torch.manual_seed(0)
    model, (x, y) = make(), batch(*shape)
    want = clipped_sum(model, x, y, list(torch.arange(B)[:, None]))
    made = private(copy.deepcopy(model), mode, B)
    for _ in range(2):
        assert_right(step(made, x, y), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm])
def test_spectral_norm(norm: Any, mode: str) -> None:
    """Its vectors move in each forward pass: the sum is right for those of the pass."""
    torch.manual_seed(0)
    model, (x, y) = Net(lambda net, x: net.b(x).tanh(), b=norm(nn.Linear(D, D))), batch(D)
    made = private(copy.deepcopy(model), mode, B)
    before = copy.deepcopy(model)
    with torch.no_grad():
        before.train()(x)  # one power iteration
    want = clipped_sum(before.eval(), x, y, list(torch.arange(B)[:, None]))
    assert_right(step(made, x, y), want)
    moved = [(one, other) for one, other in zip(model.buffers(), before.buffers(), strict=True)]
    assert any(not torch.equal(one, other) for one, other in moved)


# --- samples that meet ---


def of_the_median(net: Any, x: Tensor) -> Tensor:
    sizes = x.norm(dim=1)
    return net.a(x) * (sizes > sizes.median())[:, None]


def whitened(net: Any, x: Tensor) -> Tensor:
    return net.a(x) @ torch.linalg.inv(x.T @ x + torch.eye(D, dtype=x.dtype))


def running_mean(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    with torch.no_grad():
        net.mean.mul_(0.9).add_(0.1 * h.mean(0))
    return h - net.mean


MEETING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "less the mean": lambda net, x: net.a(x - x.mean(0)),
    "less the mean, detached": lambda net, x: net.a(x) - net.a(x).detach().mean(0),
    "one norm for all": lambda net, x: net.a(x) / net.a(x).norm(),
    "one maximum for all": lambda net, x: net.a(x) / net.a(x).detach().abs().max(),
    "added up": lambda net, x: net.a(x).cumsum(0),
    "softmax over samples": lambda net, x: net.a(x).softmax(0),
    "mixed up": lambda net, x: net.a(0.7 * x + 0.3 * x.flip(0)),
    "neighbours": lambda net, x: net.a(x) + 0.5 * net.a(x).roll(1, 0),
    "attention": lambda net, x: (net.a(x) @ x.T).softmax(-1) @ x,
    "shares": lambda net, x: net.a(x).exp() / net.a(x).exp().sum(0),
    "above the median": of_the_median,
    "whitened": whitened,
    "a running mean": running_mean,
    "the largest alone": lambda net, x: net.a(x).index_fill(0, x.norm(dim=1).argmax(), 0.0),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MEETING)
def test_samples_that_meet(kind: str, mode: str) -> None:
    """The step is refused, by the package's own words, and nothing is released."""
    model, (x, y) = Net(MEETING[kind]), batch(D)
    model.register_buffer("mean", torch.zeros(D))
    made = private(model, mode, B)
    with pytest.raises((RuntimeError, ValueError)) as refusal:
        step(made, x, y)
    assert is_refusal(refusal.value), refusal.value
    assert all(p.grad is None or float(p.grad.norm()) <= CLIP * B for p in made[1].params)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_where_nothing_is_followed_a_row_for_all_windows_is_refused_by_name(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whose, "can_follow", lambda *args: False)
    made = private(Windows(), mode, B)
    with pytest.raises(ValueError, match=r"layers \['bias'\] ran once for all samples.*expand"):
        step(made, *batch(T, D))
