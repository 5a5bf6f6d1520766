"""Norm computations form nothing larger than a chunk."""

from __future__ import annotations

import pytest
import torch

from opacus.core.kernels.norms import reference
from tests.core.rules.dispatched import largest_bytes


@pytest.mark.parametrize("norm", [reference.width_norm_sq, reference.gram_norm_sq])
def test_products_are_bounded(monkeypatch: pytest.MonkeyPatch, norm) -> None:
    a, g = torch.randn(2, 96, 80), torch.randn(2, 96, 72)
    assert largest_bytes(norm, a, g) >= 2 * 72 * 80 * 4
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 1000)
    assert largest_bytes(norm, a, g) <= 1000 * 4


def test_a_product_larger_than_a_chunk_for_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    a, g = torch.randn(64, 3, 50), torch.randn(64, 3, 4)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 500)
    assert largest_bytes(reference.width_norm_sq, a, g) <= 500 * 4


def test_sums_of_squares_widen_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(2, 5000).bfloat16()
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 1000)
    assert largest_bytes(reference.sum_of_squares, values) <= 1000 * 4


@pytest.mark.parametrize(
    ("norm", "row"), [(reference.width_norm_sq, 80), (reference.gram_norm_sq, 200)]
)
def test_parts_of_products_have_whole_tiles(monkeypatch: pytest.MonkeyPatch, norm, row) -> None:
    a, g = (
        torch.randn(2, 200, 80, dtype=torch.float64),
        torch.randn(2, 200, 190, dtype=torch.float64),
    )
    want, shapes, bmm = norm(a, g), [], reference.wide_bmm

    def seen(left, right, **more):
        shapes.append(left.shape)
        return bmm(left, right, **more)

    monkeypatch.setattr(reference, "wide_bmm", seen)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 2 * row * 101)  # for 101 of them
    torch.testing.assert_close(norm(a, g), want)
    parts = [shape[1] for shape in shapes]
    assert len(parts) > 1
    assert {n % reference.TILE for n in parts} <= {0, 190 % reference.TILE, 200 % reference.TILE}
