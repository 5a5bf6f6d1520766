"""The kernels of the loss without logits against plain PyTorch's logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from opacus.core.kernels.loss.head import LossOptions
from tests.core.kernels.triton_cases import DEVICE, DTYPES, INTERPRETED, MARKS, ON_GPU, draw

if ON_GPU or INTERPRETED:
    from opacus.core.kernels.loss import head_triton

pytestmark = MARKS
SHAPES = [(5, 37, 16), (3, 2500, 2048)]  # tokens, vocabulary, columns at once
OPTIONS = [LossOptions(), LossOptions(smoothing=0.1, z_loss=0.02)]


def case(tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    logits = draw(tokens, vocabulary, dtype=dtype, scale=4.0)
    targets = torch.randint(vocabulary, (tokens,)).to(DEVICE)
    targets[1] = -100
    grads = torch.randn(tokens).to(DEVICE)
    grads[1] = 0.0
    return logits, targets, grads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "vocabulary", "columns"), SHAPES)
def test_sums_over_parts(tokens: int, vocabulary: int, columns: int, dtype: torch.dtype) -> None:
    logits, targets, _ = case(tokens, vocabulary, dtype)
    state = torch.zeros(3, tokens, device=DEVICE)
    state[0].fill_(-torch.inf)
    for start in range(0, vocabulary, columns):
        part = logits[:, start : start + columns].contiguous()
        head_triton.accumulate(part, targets, state, start)
    wide = logits.double()
    picked = wide.gather(1, targets.clamp(min=0)[:, None])[:, 0].masked_fill(targets < 0, 0.0)
    for got, want in zip(state, (wide.logsumexp(1), picked, wide.sum(1)), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smooth"])
@pytest.mark.parametrize(("tokens", "vocabulary", "columns"), SHAPES)
def test_gradients_of_logits(
    tokens: int, vocabulary: int, columns: int, options: LossOptions, dtype: torch.dtype
) -> None:
    logits, targets, grads = case(tokens, vocabulary, dtype)
    wide = logits.double().requires_grad_()
    lse = wide.logsumexp(1)
    losses = (
        F.cross_entropy(wide, targets, reduction="none", label_smoothing=options.smoothing)
        + options.z_loss * lse.square()
    )
    (want,) = torch.autograd.grad((losses * grads.double()).sum(), wide)
    assert float(want.abs().max()) > 0.1
    sums = lse.detach().float()
    for start in range(0, vocabulary, columns):
        part = logits[:, start : start + columns].contiguous()
        smoothing, z_loss = options.smoothing, options.z_loss
        head_triton.differentiate(part, targets, sums, grads, smoothing, z_loss, start, vocabulary)
        own = want[:, start : start + columns]
        rtol = 1e-2 if dtype != torch.float32 else 1e-4
        torch.testing.assert_close(part.double(), own, rtol=rtol, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, interpreted
def test_a_token_that_counts_for_nothing_may_be_infinite() -> None:
    logits, targets, grads = case(3, 16, torch.float32)
    logits[1] = torch.inf
    head_triton.differentiate(
        logits, targets, torch.full((3,), 5.0, device=DEVICE), grads, 0.0, 0.0, 0, 16
    )
    assert bool((logits[1] == 0).all()) and bool((logits[0] != 0).all())
