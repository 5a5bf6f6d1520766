"""What the tests of the Triton kernels share: where they run, inputs, definitions in fp64."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
INTERPRETED = not ON_GPU and os.environ.get("TRITON_INTERPRET") == "1"

# Without a GPU these tests run in Triton's interpreter, which has to be chosen before Triton
# is imported: test_triton_interpreter.py starts a process for them.
MARKS = [
    pytest.mark.gpu
    if ON_GPU
    else pytest.mark.skipif(not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1")
]
DTYPES = [torch.bfloat16, torch.float32]
if not INTERPRETED:  # which knows fp16 no better than NumPy does, and is slow
    DTYPES.insert(1, torch.float16)
# Of the same rounded inputs; what is squared and summed is wider than the inputs.
TOLERANCE = {torch.bfloat16: 1e-4, torch.float16: 1e-4, torch.float32: 1e-5}
# Of a squared norm, for each feature (or token) that is summed; see docs/kernels.md.
LOST = 6e-9
MASKS = ["all", "bool", "weights"]


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def draw_mask(kind: str, batch: int, tokens: int) -> Tensor | None:
    """A mask with some tokens out; its first token stays."""
    if kind == "all":
        return None
    kept = torch.rand(batch, tokens) > 0.3
    kept[:, :1] = True
    return (kept if kind == "bool" else kept * (torch.rand(batch, tokens) + 0.1)).to(DEVICE)


def weighed(backprops: Tensor, mask: Tensor | None) -> Tensor:
    g = backprops.double()
    if mask is None:
        return g
    return g.masked_fill((mask == 0)[..., None], 0.0) * mask.double()[..., None]


def product_definition(a: Tensor, g: Tensor, mask: Tensor | None = None) -> Tensor:
    """One sample and a few columns at a time."""
    if mask is not None:
        a = a.masked_fill((mask == 0)[..., None], 0.0)
    norms = torch.zeros(len(a), dtype=torch.float64, device=a.device)
    for i in range(len(a)):
        own = weighed(g[i : i + 1], None if mask is None else mask[i : i + 1])[0]
        for part in a[i].split(2048, dim=1):
            norms[i] += (part.double().T @ own).square().sum()
    return norms


def check(got: Tensor, want: Tensor, dtype: torch.dtype, features: int = 0) -> None:
    """``features`` that a Gram matrix sums over: tensor cores cut their sums of halves off."""
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    tolerance = max(TOLERANCE[dtype], features * LOST if dtype != torch.float32 else 0.0)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=0)
