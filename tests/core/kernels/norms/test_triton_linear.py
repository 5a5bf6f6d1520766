"""Both algorithms for linear layers against the definition in fp64."""

from __future__ import annotations

import pytest
import torch
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
    product_definition,
)

pytestmark = MARKS
if ON_GPU or INTERPRETED:
    from opacus.core.kernels.host.operands import Tile
    from opacus.core.kernels.norms import gram, width

    MODULES = {"width": width, "input_length": gram}

ALGORITHMS = ["width", "input_length"]
# The copy engine reads the even ones; the others are read through pointers.
SMALL = [(2, 63, 123, 17), (3, 1, 8, 8), (2, 130, 24, 40), (1, 70, 272, 16), (2, 65, 16, 136)]
LARGE = [
    (1, 1024, 1024, 1024),
    (4, 2048, 4096, 1024),
    (3, 1000, 1032, 520),
    (2, 4097, 256, 128),
    (5, 511, 1023, 257),
    (300, 64, 256, 64),
    (2, 8192, 64, 16),
]


def norms(algorithm: str, a: Tensor, g: Tensor, mask: Tensor | None = None, **options) -> Tensor:
    return MODULES[algorithm].norm_sq(a, g, mask, **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_norm_is_the_definition(algorithm, dtype, mask, shape) -> None:
    batch, tokens, d, p = shape
    a, g = draw(batch, tokens, d, dtype=dtype), draw(batch, tokens, p, dtype=dtype)
    m = draw_mask(mask, batch, tokens)
    check(norms(algorithm, a, g, m), product_definition(a, g, m), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_norm_is_the_definition(algorithm, dtype, shape) -> None:
    batch, tokens, d, p = shape
    a, g = draw(batch, tokens, d, dtype=dtype), draw(batch, tokens, p, dtype=dtype)
    got = norms(algorithm, a, g)
    check(got, product_definition(a, g), dtype)
    assert torch.equal(got, norms(algorithm, a, g))  # the same sum in the same order


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_tile_size(algorithm) -> None:
    a, g = draw(2, 140, 264, dtype=torch.bfloat16), draw(2, 140, 40, dtype=torch.bfloat16)
    m = draw_mask("bool", 2, 140)
    for tile in (
        *MODULES[algorithm].TILES,
        *MODULES[algorithm].tiles(a.device),
        Tile(64, 64, 32, 4, 2, group=2, tma=False),
    ):
        check(norms(algorithm, a, g, tile=tile), product_definition(a, g), a.dtype)
        check(norms(algorithm, a, g, m, tile=tile), product_definition(a, g, m), a.dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fast_and_general_path_agree_and_both_are_taken(algorithm, monkeypatch) -> None:
    a, g = draw(3, 80, 64, dtype=torch.bfloat16), draw(3, 80, 32, dtype=torch.bfloat16)
    calls = []
    original = MODULES[algorithm].grouped_norm_sq
    monkeypatch.setattr(
        MODULES[algorithm], "grouped_norm_sq", lambda *x, **y: calls.append(1) or original(*x, **y)
    )
    fast = norms(algorithm, a, g)
    capable = INTERPRETED or torch.cuda.get_device_capability()[0] >= 9
    assert bool(calls) != capable
    calls.clear()
    general = norms(algorithm, a, g, tile=Tile(64, 64, 32, 4, 2, tma=False))
    assert calls
    torch.testing.assert_close(fast, general, rtol=1e-5, atol=0)


def strided(kind: str, tensor: Tensor) -> Tensor:
    """The same numbers with other strides."""
    batch, tokens, features = tensor.shape
    if kind == "features first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "tokens first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "part of a wider one":
        wide = torch.full((batch, tokens, 3 * features), float("nan")).to(tensor)
        wide[..., features : 2 * features] = tensor
        return wide[..., features : 2 * features]
    flat = torch.full((tensor.numel() + 1,), float("nan")).to(tensor)
    flat[1:] = tensor.flatten()  # not aligned to 16 bytes
    return flat[1:].view(tensor.shape)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "kind", ["features first", "tokens first", "part of a wider one", "shifted"]
)
def test_strides(algorithm, kind) -> None:
    a, g = draw(3, 33, 24, dtype=torch.bfloat16), draw(3, 33, 16, dtype=torch.bfloat16)
    want = product_definition(a, g)
    got = norms(algorithm, strided(kind, a), strided(kind, g))
    check(got, want, a.dtype)
    check(norms(algorithm, strided(kind, a), g), want, a.dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_expanded_backprops(algorithm) -> None:
    a, g = draw(3, 33, 24, dtype=torch.bfloat16), draw(3, 1, 16, dtype=torch.bfloat16)
    g = g.expand(3, 33, 16)  # as from a mean over tokens
    check(norms(algorithm, a, g), product_definition(a, g), a.dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(0, 5, 8, 8), (2, 0, 8, 8), (2, 5, 0, 8), (2, 5, 8, 0)])
@pytest.mark.parametrize("mask", [False, True])
def test_norm_of_nothing_is_zero(algorithm, shape, mask) -> None:
    batch, tokens, d, p = shape
    a, g = draw(batch, tokens, d, dtype=torch.float16), draw(batch, tokens, p, dtype=torch.float16)
    m = torch.ones(batch, tokens, dtype=torch.bool, device=DEVICE) if mask else None
    assert torch.equal(norms(algorithm, a, g, m), torch.zeros(batch, device=DEVICE))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, interpreted
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mask", ["bool", "weights"])
@pytest.mark.parametrize("features", [(24, 16), (23, 15)])
def test_masked_tokens_may_be_nan(algorithm, mask, features) -> None:
    a, g = (draw(2, 40, f, dtype=torch.bfloat16) for f in features)
    m = draw_mask(mask, 2, 40)
    assert (m == 0).any()
    want = product_definition(a, g, m)
    a[m == 0], g[m == 0] = float("nan"), float("inf")
    check(norms(algorithm, a, g, m), want, a.dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("features", [(24, 16), (23, 15)])
def test_only_the_bad_sample_has_a_bad_norm(algorithm, features) -> None:
    a, g = (draw(3, 40, f, dtype=torch.bfloat16) for f in features)
    a[1, 39, 3] = float("nan")
    assert norms(algorithm, a, g).isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("a_scale", "g_scale"), [(1e-3, 1e-3), (300, 300), (1e-3, 300)])
def test_half_precision_neither_over_nor_underflows(algorithm, dtype, a_scale, g_scale) -> None:
    a = draw(3, 17, 16, dtype=dtype, scale=a_scale)
    g = draw(3, 17, 8, dtype=dtype, scale=g_scale)
    check(norms(algorithm, a, g), product_definition(a, g), dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dtypes_that_differ_are_promoted(algorithm) -> None:
    a, g = draw(2, 9, 8, dtype=torch.float32), draw(2, 9, 8, dtype=torch.bfloat16)
    check(norms(algorithm, a, g), product_definition(a, g), torch.float32)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fp32_keeps_what_tf32_would_drop(algorithm) -> None:
    """1 + 2^-12 is 1 in tf32, so the norm would be off by 5e-4."""
    a = torch.full((1, 32, 16), 1 + 2.0**-12, device=DEVICE)
    g = torch.full((1, 32, 16), 1 + 2.0**-12, device=DEVICE)
    check(norms(algorithm, a, g), product_definition(a, g), torch.float32)


def test_cancelling_gram_matrices_never_give_a_negative_norm() -> None:
    half, g = draw(16, 9, 8), draw(16, 9, 8)
    a, g = torch.cat([half, half], 1), torch.cat([g, -g], 1)  # A^T G is zero
    got = norms("input_length", a, g)
    assert (got >= 0).all()
    assert (got < 1e-5 * a.square().sum((1, 2)) * g.square().sum((1, 2))).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_refusals(algorithm) -> None:
    a = draw(2, 3, 4)
    with pytest.raises(ValueError, match=r"\[B, T, d\]"):
        norms(algorithm, a, draw(2, 4, 4))
    with pytest.raises(ValueError, match="mask"):
        norms(algorithm, a, a, torch.ones(2, 4, device=DEVICE))
    with pytest.raises(TypeError, match="float64"):
        norms(algorithm, a.double(), a.double())


@pytest.mark.gpu
@pytest.mark.parametrize("features", [32768, 32767])
def test_more_than_two_billion_elements(features) -> None:
    a = torch.randn(2, 36000, 32768, device=DEVICE, dtype=torch.bfloat16)[..., :features]
    assert a.stride(0) * 2 > 2**31
    g = draw(2, 36000, 16, dtype=torch.bfloat16)
    check(norms("width", a, g), product_definition(a, g), a.dtype)
    part, g = a[:, -300:], g[:, -300:]
    check(norms("input_length", part, g), product_definition(part, g), a.dtype, features)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("summed", [4096, 32768])
def test_sums_of_one_sign_lose_no_more_than_documented(algorithm, summed) -> None:
    """All products positive, the worst case for sums that are cut off instead of rounded."""
    tokens, d = (summed, 128) if algorithm == "width" else (128, summed)
    a = (torch.rand(2, tokens, d, device=DEVICE) + 0.5).bfloat16()
    g = (torch.rand(2, tokens, d, device=DEVICE) + 0.5).bfloat16()
    check(norms(algorithm, a, g), product_definition(a, g), a.dtype, 2 * summed)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("d", [4096, 4095])
def test_memory_is_a_sliver_of_the_gradients(algorithm, d) -> None:
    a, g = draw(4, 2048, d, dtype=torch.bfloat16), draw(4, 2048, d, dtype=torch.bfloat16)
    norms(algorithm, a, g)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    norms(algorithm, a, g)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 4 * 2048 * 2048 * 4 // 256
