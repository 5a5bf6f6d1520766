"""Norms of many small tensors of few shapes: those of equal shape are taken together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opacus.core.kernels.norms import reference


def exact(tensor: Tensor) -> Tensor:
    return tensor.double().reshape(len(tensor), -1).square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_ones_are_as_each_alone(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(reference, "STACK_ELEMENTS", 100)  # several calls for a shape
    monkeypatch.setattr(reference, "GROUP_ELEMENTS", 90)
    torch.manual_seed(0)
    shapes = [(3, 5, 2), (3, 4), (3, 5, 2), (3,), (3, 31), (3, 5, 2), (3,), (3, 31), (3, 5, 2)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    tensors[2][1, 0, 0] = torch.inf
    found = reference.squares_of_equals(tensors)
    assert sorted(found) == [0, 2, 3, 5, 6, 8]  # one has no equal, two are large
    for place, value in found.items():
        assert value.shape == (3,) and value.dtype == torch.float32
        torch.testing.assert_close(value.double(), exact(tensors[place]), rtol=1e-6, atol=0)
    assert torch.isinf(found[2][1]) and torch.isfinite(found[2][[0, 2]]).all()


def test_none_and_empty_ones_are_left_out() -> None:
    assert reference.squares_of_equals([]) == {}
    assert reference.squares_of_equals([torch.ones(0, 3), torch.ones(0, 3)]) == {}
