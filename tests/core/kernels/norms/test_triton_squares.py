"""The kernel that squares and adds up rows of many tensors."""

from __future__ import annotations

import pytest
import torch

from tests.core.kernels.triton_cases import DEVICE, DTYPES, INTERPRETED, MARKS, ON_GPU, draw

pytestmark = MARKS
if ON_GPU or INTERPRETED:
    from opacus.core.kernels.norms import squares, squares_triton

    PART = squares_triton.BLOCK * squares_triton.LOOPS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_row_has_its_own(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(2, PART + 8), (1, 2 * PART), (3, 5, 8), (4, 2048), (1, 3)]
    for some in (shapes, shapes[:-1]):  # the last is of no multiple of 16 bytes
        tensors = [draw(*shape, dtype=dtype) for shape in some]
        tensors[2][1, 0, 0] = torch.inf
        found = squares.squares_of(tensors)
        for tensor, got in zip(tensors, found, strict=True):
            want = tensor.double().flatten(1).square().sum(1)
            assert got.shape == want.shape and got.dtype == torch.float32
            torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=0)
        assert torch.isinf(found[2][1]) and torch.isfinite(found[2][[0, 2]]).all()


def test_parts_of_a_storage_and_more_parts_than_are_added_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(squares_triton, "BLOCK", 16)
    monkeypatch.setattr(squares_triton, "LOOPS", 1)
    monkeypatch.setattr(squares_triton, "TOTAL_BLOCK", 4)
    for variants in (squares_triton._variant, squares_triton._total_variant):
        variants.cache_clear()
    flat = draw(700)
    tensors = [flat[1:301].view(3, 100), flat[:0].view(1, 0), flat[302:699].view(1, 397)]
    try:
        found = squares_triton.launch(tensors, [3, 1, 1])
    finally:
        for variants in (squares_triton._variant, squares_triton._total_variant):
            variants.cache_clear()
    want = torch.cat([t.double().square().sum(1) for t in tensors])
    torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=0)


def test_what_has_no_kernel_is_computed_without() -> None:
    wide, turned = draw(2, 6).double(), draw(6, 300).t()
    many, none = draw(20, 3), torch.zeros(0, 3, device=DEVICE)
    assert not any(map(squares.has_kernel, (wide, turned, many, none)))
    assert squares.has_kernel(draw(20, 300))
    tensors = [wide, draw(2, 300), turned, many, none]
    for tensor, got in zip(tensors, squares.squares_of(tensors), strict=True):
        want = tensor.double().flatten(1).square().sum(1)
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=0)


def test_norms_of_whole_tensors() -> None:
    alike = [draw(3, 100), draw(0), draw(7), draw(2, 5, 4)]
    mixed = [*alike, draw(30, dtype=torch.bfloat16)]
    for tensors, rtol in ((alike, 1e-6), (mixed, 1e-2)):
        got, want = squares.norms_of(tensors), torch.stack([t.double().norm() for t in tensors])
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=0)
        assert torch.equal(got, squares.norms_of(tensors))
    before = squares.norms_of(alike)
    alike[2][3] *= 2
    assert (squares.norms_of(alike) != before).tolist() == [False, False, True, False]
