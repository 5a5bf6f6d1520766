"""Norms by Gram matrices where tokens cancel: in the reference, and in all that is built on it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.kernels.norms import choice, reference
from opacus.core.privacy.clipping import EPSILON
from tests.core.kernels.cancelling import KINDS, LEFT, exact, pair, share

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
GHOST = [(mode, d) for mode in ("ghost", "ghost_bk", "flash", "flash_bk") for d in (False, True)]


@pytest.fixture(autouse=True)
def _gram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram matrices whatever the shape."""
    monkeypatch.setattr(reference, "gram_is_cheaper", lambda *_: True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_is_the_definition(kind: str, left: float, dtype: torch.dtype) -> None:
    a, g = (t.to(dtype) for t in pair(kind, left, 5, 12, 24, 20))
    want = exact(a, g)
    got = reference.product_norm_sq(a, g)
    # The norm itself is a sum of terms that are 1 / sqrt(share) as long.
    tolerance = 2e-6 + 1e-6 / share(a, g).sqrt().min().item()
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=0)
    mask = torch.ones(5, 12)
    torch.testing.assert_close(
        choice.product_norm_sq(a, g, mask).double(), want, rtol=tolerance, atol=0
    )
    assert (share(a, g) < reference.TRUSTED).any() or left >= 0.05


def test_one_sample_among_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the one that cancels is computed directly, and no other norm changes."""
    a, g = torch.randn(6, 12, 24), torch.randn(6, 12, 20)
    before = reference.gram_norm_sq(a, g)
    a[3:4], g[3:4] = pair("opposite tokens", 1e-3, 1, 12, 24, 20)
    direct, seen = reference.width_norm_sq, []
    monkeypatch.setattr(
        reference, "width_norm_sq", lambda x, y: (seen.append(len(x)), direct(x, y))[1]
    )
    got = reference.gram_norm_sq(a, g)
    assert seen == [1]
    others = [0, 1, 2, 4, 5]
    torch.testing.assert_close(got[others], before[others], rtol=1e-6, atol=0)
    torch.testing.assert_close(got.double(), exact(a, g), rtol=1e-3, atol=0)


def test_ordinary_samples_are_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "width_norm_sq", lambda *_: pytest.fail("computed directly"))
    for tokens in (2, 16, 256):
        a, g = torch.randn(4, tokens, 32) + 0.5, torch.randn(4, tokens, 32)
        reference.gram_norm_sq(a, g)


def test_zero_is_zero_and_underflow_is_not() -> None:
    a, g = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    a[0], g[1] = 0, 0
    a[2], g[2] = a[2] * 1e-24, g[2] * 1e18  # squares of activations are zero in fp32
    got = reference.gram_norm_sq(a, g)
    assert got[:2].tolist() == [0, 0]
    torch.testing.assert_close(got[2:].double(), exact(a, g)[2:], rtol=1e-5, atol=0)
    a[2], g[2] = a[2] * 1e22 * 1e22, g[2] * 1e-38  # and here they are infinite
    got = reference.gram_norm_sq(a, g)
    torch.testing.assert_close(got[2:].double(), exact(a, g)[2:], rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    a, g = pair("opposite tokens", 1e-3, 3, 12, 8, 8)
    a[1, 2, 3] = bad
    assert reference.gram_norm_sq(a, g).isfinite().tolist() == [True, False, True]


# --- what a step releases ---


class Pooled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(16, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).sum(1))


class Twice(nn.Module):
    """Tokens that cancel across two uses of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return torch.cat([self.inner(x[:, :half]), self.inner(x[:, half:])], 1)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Keys(nn.Module):
    """The keys' backprops add up to zero, and their inputs have a large mean."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = (nn.Linear(16, 16).requires_grad_(False) for _ in range(2))
        self.k = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        unit = x / x.norm(dim=-1, keepdim=True) * 4
        return F.scaled_dot_product_attention(self.q(unit), self.k(x), self.v(unit))


LAYERS = {
    "linear": lambda: nn.Linear(16, 16),
    "pair": lambda: nn.Sequential(nn.Linear(16, 3, bias=False), nn.Linear(3, 16, bias=False)),
    "twice": Twice,
    "convolution": Convolution,
    "keys": Keys,
}


def batch(layer: str) -> Tensor:
    """``[3, T, 16]``: an ordinary sample, and two whose tokens cancel."""
    x = torch.randn(3, 6, 16)
    if layer == "keys":
        return torch.cat([x[:1], torch.randn(2, 1, 16) * 1e3 + x[1:]])
    u = torch.randn(2, 3, 16) * 1e4
    return torch.cat([x[:1], torch.cat([u, 10 * torch.randn(2, 3, 16) - u], 1)])


def released(model: nn.Module, x: Tensor, mode: str, deferred: bool, bound: float) -> Tensor:
    """The sum of one clipped sample, as a vector."""
    model = copy.deepcopy(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    private, optimizer, criterion, _ = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(parameters, lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.arange(8)), batch_size=len(x)),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        grad_sample_mode=mode,
        poisson_sampling=False,
        deferred_norm=deferred,
    )
    criterion(private(x), torch.zeros(len(x)).long()).backward()
    optimizer.step()
    total = torch.cat([p.grad.flatten() for p in parameters])
    return total * optimizer.expected_batch_size


@pytest.mark.parametrize(("mode", "deferred"), GHOST)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_sample_that_cancels_moves_the_sum_by_its_bound(
    layer: str, mode: str, deferred: bool
) -> None:
    rounding = 0.02 if layer == "keys" else 1e-3  # these norms are of fp32 backprops that cancel
    for seed in range(2):
        torch.manual_seed(seed)
        model, x = Pooled(LAYERS[layer]()), batch(layer)
        alone = nn.CrossEntropyLoss()
        exactly = copy.deepcopy(model).double()
        norms = []
        for row in x.double():
            exactly.zero_grad()
            alone(exactly(row[None]), torch.zeros(1).long()).backward()
            own = [p.grad for p in exactly.parameters() if p.grad is not None]
            norms.append(torch.stack([p.norm() for p in own]).norm().item())
        bound = min(norms) / 4
        assert bound > 0
        want = [bound * norm / (norm + EPSILON) for norm in norms]
        whole = released(model, x, mode, deferred, bound)
        for i, row in enumerate(x):
            rest = [j for j in range(3) if j != i]
            alone_norm = released(model, row[None], mode, deferred, bound).norm().item()
            change = (whole - released(model, x[rest], mode, deferred, bound)).norm().item()
            assert alone_norm == pytest.approx(want[i], rel=rounding), (seed, i)
            assert change == pytest.approx(want[i], rel=rounding), (seed, i)
