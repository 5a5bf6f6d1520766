"""Kernels that multiply Gram matrices, where tokens cancel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opacus.core.platform.sizes import MOST_STACKED
from tests.core.kernels.cancelling import KINDS, exact, pair, share
from tests.core.kernels.triton_cases import DEVICE, DTYPES, INTERPRETED, MARKS, MASKS, ON_GPU, draw

pytestmark = MARKS
if ON_GPU or INTERPRETED:
    from opacus.core.kernels.host import operands
    from opacus.core.kernels.host.operands import Tile
    from opacus.core.kernels.norms import direct, embedding, gram, reference, terms_triton

# The copy engine reads the even ones; the others are read through pointers.
SHAPES = [(3, 70, 136, 72), (4, 10, 33, 17)]


def case(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Samples that cancel, but for the first one, which does not; the last one is zero."""
    batch, tokens, d, p = shape
    a, g = (t.to(DEVICE, dtype) for t in pair(kind, 2e-2, batch, tokens, d, p))
    a[0], g[0] = draw(tokens, d, dtype=dtype), draw(tokens, p, dtype=dtype)
    a[-1] = 0
    return a, g


def check(got: Tensor, a: Tensor, g: Tensor) -> None:
    assert got.dtype == torch.float32
    shares = share(a, g)[:-1]
    assert shares[0] > reference.TRUSTED > shares[1:].max()
    torch.testing.assert_close(got[:-1].double(), exact(a, g)[:-1], rtol=1e-4, atol=0)
    assert got[-1] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_is_the_definition(kind, dtype, mask, shape) -> None:
    a, g = case(kind, shape, dtype)
    m = None if mask == "all" else torch.ones(a.shape[:2], device=DEVICE)
    check(gram.norm_sq(a, g, m.bool() if mask == "bool" else m), a, g)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_layers_and_shared_inputs(dtype) -> None:
    one, two = case(KINDS[0], (3, 70, 136, 72), dtype), case(KINDS[1], (4, 10, 33, 17), dtype)
    shared = (one[0], 2 * one[1])
    for got, own in zip(gram.grouped_norm_sq([one, shared, two]), [one, shared, two], strict=True):
        check(got, *own)
    for got, own in zip(
        gram.shared_norm_sq(one[0], [one[1], shared[1]]), [one, shared], strict=True
    ):
        check(got, *own)


def test_every_tile_size() -> None:
    a, g = case(KINDS[0], (3, 140, 264, 72), torch.bfloat16)
    for tile in (
        *gram.TILES,
        *gram.tiles(a.device),
        Tile(64, 64, 32, 4, 2, tma=False),
    ):
        check(gram.norm_sq(a, g, tile=tile), a, g)


def test_strides_and_few_programs(monkeypatch) -> None:
    a, g = case(KINDS[0], (3, 70, 136, 200), torch.float32)
    monkeypatch.setattr(direct, "PROGRAMS", 1)
    direct._pair_plan.cache_clear()
    strided = a.transpose(1, 2).contiguous().transpose(1, 2)
    check(gram.norm_sq(strided, g), a, g)
    partial = torch.zeros(2, 3, 1, device=DEVICE)
    check(direct.settle(strided, g, None, partial), a, g)
    direct._pair_plan.cache_clear()


def test_masked_tokens_may_be_nan() -> None:
    a, g = case(KINDS[0], (3, 20, 24, 16), torch.float32)
    kept = torch.ones(3, 24, dtype=torch.bool, device=DEVICE)
    kept[:, 20:] = False
    bad = torch.full((3, 4, 24), float("nan"), device=DEVICE)
    more_a, more_g = torch.cat([a, bad], 1), torch.cat([g, bad[..., :16]], 1)
    check(gram.norm_sq(more_a, more_g, kept), a, g)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, interpreted
def test_what_is_not_finite_stays_so() -> None:
    a, g = case(KINDS[0], (4, 20, 24, 16), torch.float32)
    a[1, 3, 3], g[2, 4, 4] = float("nan"), float("inf")
    assert gram.norm_sq(a, g).isfinite().tolist() == [True, False, False, True]


# Of each layer, its input: layers with one input are neighbours.
INPUTS = [[0], [0, 0, 1, 2, 2, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("inputs", INPUTS, ids=str)
def test_sums_of_terms_are_their_definition(monkeypatch, inputs) -> None:
    monkeypatch.setattr(terms_triton, "BLOCK", 64)
    terms_triton._variant.cache_clear()
    for shape, once in (((3, 10, 37), 10), ((2, 30, 30), 30), ((1, 1, 5), 2)):
        left, right = draw(inputs[-1] + 1, *shape), draw(len(inputs), *shape)
        terms = left[inputs].double() * right.double()
        terms[..., once:] *= 2
        got = terms_triton.sums_and_sizes(left, right, inputs, once)
        assert got.shape == (2, len(inputs), shape[0], -(-left[0, 0].numel() // 512))
        torch.testing.assert_close(got[0].sum(2).double(), terms.sum((2, 3)), rtol=0, atol=1e-4)
        sizes = terms.abs().sum((2, 3))
        torch.testing.assert_close(got[1].sum(2).double(), sizes, rtol=1e-6, atol=0)
    left[-1, 0, 0, 4] = float("nan")
    touched = [place == inputs[-1] for place in inputs]
    got = terms_triton.sums_and_sizes(left, right, inputs, once)
    assert got.isnan()[0, :, 0, 0].tolist() == touched
    terms_triton._variant.cache_clear()


def test_as_many_layers_as_a_launch_takes() -> None:
    most = MOST_STACKED
    left, right = draw(most, 2, 3, 3), draw(most, 2, 3, 3)
    got = terms_triton.sums_and_sizes(left, right, range(most), 3)
    want = (left.double() * right.double()).sum((2, 3))
    torch.testing.assert_close(got[0, :, :, 0].double(), want, rtol=0, atol=1e-4)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_the_reference_on_a_gpu(monkeypatch) -> None:
    assert direct.works(torch.device("cuda", 0))
    for dtype in DTYPES:
        a, g = case(KINDS[0], (3, 16, 512, 512), dtype)
        assert reference.gram_is_cheaper(16, 512, 512)
        check(reference.product_norm_sq(a, g), a, g)
    several = [case(KINDS[i % 2], (3, 16, d, 512), dtype) for i, d in enumerate((512, 256, 264))]
    several.insert(1, (several[0][0], 2 * several[0][1]))  # of one input
    monkeypatch.setattr(reference, "gram_is_cheaper", lambda *_: True)
    for rows in (512, 6):  # all rows at once, and several parts
        monkeypatch.setattr(reference, "GRAM_ROWS", rows)
        check(reference.gram_norm_sq(a, g), a, g)
        for got, own in zip(reference.products_norm_sq(several), several, strict=True):
            check(got, *own)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_lookups_that_cancel(dtype, weighted) -> None:
    ids = torch.randint(0, 3, (4, 70), device=DEVICE)
    ids[:, 35:] = ids[:, :35]
    g = draw(4, 35, 300, dtype=dtype)
    rest = draw(4, 35, 300, dtype=dtype, scale=0.02)
    g = torch.cat([g, rest - g], 1)
    g[0], g[3] = draw(70, 300, dtype=dtype), 0
    mask = torch.rand(4, 70, device=DEVICE) + 0.5 if weighted else None
    if mask is not None:
        mask[:, 35:] = mask[:, :35]
    own = g.double() if mask is None else g.double() * mask[..., None].double()
    table_grad = torch.zeros(4, 3, 300, dtype=torch.float64, device=DEVICE)
    table_grad.scatter_add_(1, ids[..., None].expand(own.shape), own)
    want = table_grad.square().sum((1, 2))
    got = embedding.embedding_norm_sq(ids, g, None, mask)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0)
    assert got[3] == 0


def test_nothing_is_left_unwritten() -> None:
    assert operands.blank((1,), torch.device(DEVICE)).isnan().all()
