"""Biases, normalisation layers and lookup tables against their definitions in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.core.kernels.triton_cases import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    MARKS,
    MASKS,
    ON_GPU,
    check,
    draw,
    draw_mask,
    weighed,
)

pytestmark = MARKS
if ON_GPU or INTERPRETED:
    from opacus.core.kernels.norms import bias_and_affine as rows
    from opacus.core.kernels.norms import embedding as table

SHAPES = [(2, 63, 123), (3, 1, 8), (2, 40, 72)]
LARGE = [(4, 2048, 4096), (2, 1000, 5000), (64, 17, 768), (1, 4097, 8192), (2, 33, 16384)]


def bias_definition(g: Tensor, mask: Tensor | None) -> Tensor:
    return weighed(g, mask).sum(1).square().sum(1)


def affine_definition(x: Tensor, g: Tensor, centre: bool, mask: Tensor | None) -> Tensor:
    x = x.double() if mask is None else x.double().masked_fill((mask == 0)[..., None], 1.0)
    x_hat = (F.layer_norm if centre else F.rms_norm)(x, x.shape[2:], eps=1e-5)
    return (weighed(g, mask) * x_hat).sum(1).square().sum(1)


def table_definition(ids: Tensor, g: Tensor, padding: int | None, mask: Tensor | None) -> Tensor:
    vocabulary = int(ids.max()) + 1
    norms = []
    for own, value in zip(ids, weighed(g, mask), strict=True):
        grad = value.new_zeros(vocabulary, value.shape[1]).index_add_(0, own, value)
        if padding is not None and padding < vocabulary:
            grad[padding] = 0
        norms.append(grad.square().sum())
    return torch.stack(norms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias(dtype, mask, shape) -> None:
    g, m = draw(*shape, dtype=dtype), draw_mask(mask, *shape[:2])
    check(rows.bias_norm_sq(g, m), bias_definition(g, m), dtype)
    strided = g.transpose(1, 2).contiguous().transpose(1, 2)
    check(rows.bias_norm_sq(strided, m), bias_definition(g, m), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("centre", "bias"), [(True, True), (True, False), (False, False)])
def test_normalisation(dtype, mask, shape, centre, bias) -> None:
    x, g = draw(*shape, dtype=dtype) + 0.5, draw(*shape, dtype=dtype)
    m = draw_mask(mask, *shape[:2])
    weight_norm, bias_norm = rows.affine_norm_sq(x, g, eps=1e-5, centre=centre, bias=bias, mask=m)
    check(weight_norm, affine_definition(x, g, centre, m), dtype)
    assert (bias_norm is None) != bias
    if bias_norm is not None:
        check(bias_norm, bias_definition(g, m), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("centre", "bias"), [(True, True), (True, False), (False, False)])
def test_gradients_of_normalisation(dtype, shape, centre, bias) -> None:
    x, g = draw(*shape, dtype=dtype) + 0.5, draw(*shape, dtype=dtype)
    got = rows.affine_grads(x, g, eps=1e-5, centre=centre, bias=bias)
    x_hat = (F.layer_norm if centre else F.rms_norm)(x.double(), x.shape[2:], eps=1e-5)
    want = [(g.double() * x_hat).sum(1), g.double().sum(1)][: 1 + bias]
    assert got.shape == (1 + bias, len(x), x.shape[2])
    for own, right in zip(got, want, strict=True):
        assert (own.double() - right).norm() <= 1e-5 * right.norm()


def test_gradients_of_nothing_are_zero() -> None:
    empty = draw(2, 0, 8)
    got = rows.affine_grads(empty, empty, eps=1e-5, centre=False, bias=True)
    assert torch.equal(got, torch.zeros(2, 2, 8, device=DEVICE))
    empty = draw(0, 3, 8)
    assert rows.affine_grads(empty, empty, eps=0.1, centre=True, bias=True).shape == (2, 0, 8)


@pytest.mark.parametrize("centre", [True, False])
def test_normalisation_without_eps(centre) -> None:
    x, g = draw(2, 5, 9), draw(2, 5, 9)
    got, _ = rows.affine_norm_sq(x, g, eps=0.0, centre=centre, bias=False)
    x_hat = x.double() - (x.double().mean(2, keepdim=True) if centre else 0)
    x_hat = x_hat / x_hat.square().mean(2, keepdim=True).sqrt()
    check(got, (g.double() * x_hat).sum(1).square().sum(1), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("vocabulary", [1, 3, 500])
@pytest.mark.parametrize("padding", [None, 0, 2])
def test_table(dtype, mask, vocabulary, padding) -> None:
    g, m = draw(2, 70, 24, dtype=dtype), draw_mask(mask, 2, 70)
    ids = torch.randint(0, vocabulary, (2, 70), device=DEVICE)
    got = table.embedding_norm_sq(ids, g, padding, m)
    check(got, table_definition(ids, g, padding, m), dtype)


def test_table_adds_repeated_vocabularyfirst() -> None:
    """Otherwise the norm of a row that is looked up n times would be n times too small."""
    g = torch.ones(1, 50, 8, device=DEVICE)
    same = torch.zeros(1, 50, dtype=torch.long, device=DEVICE)
    assert table.embedding_norm_sq(same, g).item() == 50**2 * 8
    different = torch.arange(50, device=DEVICE)[None]
    assert table.embedding_norm_sq(different, g).item() == 50 * 8


@pytest.mark.parametrize("features", [24, 23])
def test_table_strides(features) -> None:
    g = draw(3, features, 70, dtype=torch.bfloat16).transpose(1, 2)
    ids = torch.randint(0, 9, (70, 3), device=DEVICE).t()
    check(table.embedding_norm_sq(ids, g), table_definition(ids, g, None, None), g.dtype)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_nothing_is_zero(shape) -> None:
    g, zero = draw(*shape), torch.zeros(shape[0], device=DEVICE)
    ids = torch.zeros(shape[:2], dtype=torch.long, device=DEVICE)
    assert torch.equal(rows.bias_norm_sq(g), zero)
    assert torch.equal(table.embedding_norm_sq(ids, g), zero)
    for value in rows.affine_norm_sq(g, g, eps=1e-5, centre=True, bias=True):
        assert torch.equal(value, zero)


@pytest.mark.parametrize("mask", ["bool", "weights"])
def test_masked_tokens_may_be_nan(mask) -> None:
    x, g, m = draw(2, 40, 24), draw(2, 40, 24), draw_mask(mask, 2, 40)
    ids = torch.randint(0, 3, (2, 40), device=DEVICE)
    bias, weight = bias_definition(g, m), affine_definition(x, g, True, m)
    lookups = table_definition(ids, g, None, m)
    x[m == 0], g[m == 0] = float("nan"), float("nan")
    check(rows.bias_norm_sq(g, m), bias, torch.float32)
    got, _ = rows.affine_norm_sq(x, g, eps=1e-5, centre=True, bias=False, mask=m)
    check(got, weight, torch.float32)
    check(table.embedding_norm_sq(ids, g, None, m), lookups, torch.float32)


def test_refusals() -> None:
    g = draw(2, 3, 4)
    with pytest.raises(ValueError, match="ids must be"):
        table.embedding_norm_sq(torch.zeros(2, 4, dtype=torch.long, device=DEVICE), g)
    with pytest.raises(ValueError, match="features"):
        rows.affine_norm_sq(g, draw(2, 3, 5), eps=0.1, centre=True, bias=True)
    with pytest.raises(TypeError, match="float64"):
        rows.bias_norm_sq(g.double())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large(dtype, shape) -> None:
    x, g = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    check(rows.bias_norm_sq(g), bias_definition(g, None), dtype)
    for centre in (True, False):
        weight, bias = rows.affine_norm_sq(x, g, eps=1e-5, centre=centre, bias=True)
        check(weight, affine_definition(x, g, centre, None), dtype)
        assert bias is not None
        check(bias, bias_definition(g, None), dtype)
    ids = torch.randint(0, 1000, shape[:2], device=DEVICE)
    ids[:, ::3] = 7  # one that is in many tiles
    check(table.embedding_norm_sq(ids, g), table_definition(ids, g, None, None), dtype)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    g = draw(4, 512, 256, dtype=torch.bfloat16)
    ids = torch.randint(0, 100, (4, 512), device=DEVICE)
    for _ in range(2):
        table.embedding_norm_sq(ids, g, 3)
        torch.cuda.set_sync_debug_mode("error")
        try:
            table.embedding_norm_sq(ids, g, 3)
            rows.bias_norm_sq(g)
        finally:
            torch.cuda.set_sync_debug_mode("default")
