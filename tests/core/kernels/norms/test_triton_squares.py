"""The kernel that squares and adds up rows of many tensors."""

from __future__ import annotations

import pytest
import torch

from tests.core.kernels.triton_cases import DEVICE, DTYPES, INTERPRETED, MARKS, ON_GPU, draw

pytestmark = MARKS
if ON_GPU or INTERPRETED:
    from opacus.core.kernels.norms import squares_triton

    PART = squares_triton.BLOCK * squares_triton.LOOPS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_row_has_its_own(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(2, PART + 8), (1, 2 * PART), (3, 5, 8), (4, 2048), (1, 3)]
    for some in (shapes, shapes[:-1]):  # the last is of no multiple of 16 bytes
        tensors = [draw(*shape, dtype=dtype) for shape in some]
        tensors[2][1, 0, 0] = torch.inf
        found = squares_triton.squares_of(tensors)
        assert found is not None
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


def test_what_has_no_kernel_is_left_to_others() -> None:
    wide, turned = draw(2, 6).double(), draw(6, 300).t()
    many, none = draw(20, 3), torch.zeros(0, 3, device=DEVICE)
    assert squares_triton.squares_of([draw(20, 300), draw(8, 3)]) is not None
    for other in (wide, turned, many, none):
        assert squares_triton.squares_of([draw(2, 300), other]) is None


def test_norms_of_whole_tensors() -> None:
    alike = [draw(3, 100), draw(0), draw(7), draw(2, 5, 4)]
    before = squares_triton.squares_of_wholes(alike)
    want = torch.stack([t.double().square().sum() for t in alike])
    assert before is not None
    torch.testing.assert_close(before.double(), want, rtol=2e-6, atol=0)
    again = [t.clone() for t in alike]
    again[2] *= 2
    after = squares_triton.squares_of_wholes(again)
    assert after is not None and (after != before).tolist() == [False, False, True, False]
    for others in ([*alike, draw(30).bfloat16()], [draw(30).double()], [draw(3, 4).t()], [draw(0)]):
        assert squares_triton.squares_of_wholes(others) is None
