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
