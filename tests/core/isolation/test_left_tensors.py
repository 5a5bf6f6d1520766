"""What runs leave in tensors of a model is told apart, whatever these are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from opacus.core.isolation.left_tensors import depend_on_samples, left_tensors, versions
from tests.helpers.isolation import MODES, private, step, vectors


class Odd(nn.Module):
    """Holds tensors of many sorts, and writes to some in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("nowhere", torch.empty(3, device="meta"), persistent=False)
        self.table = nn.Parameter(torch.zeros(300, 300), requires_grad=False)
        self.large = torch.zeros(300, 300, dtype=torch.int32)
        self.small = torch.arange(4)
        self.others = [
            torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
            torch.randn(4).to(torch.float8_e4m3fn),
            torch.randn(3, dtype=torch.complex64).conj(),
            torch.tensor(3.0),
            torch.empty(0),
            torch.tensor([True]),
            torch.zeros(3, dtype=torch.uint16),
        ]

    def forward(self, x: Tensor) -> Tensor:
        self.large = self.large + 1
        self.table.data = torch.zeros(300, 300)
        return self.b(self.a(x).relu())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("mode", MODES)
def test_models_that_hold_tensors_of_all_sorts_train(mode: str) -> None:
    parts = private(Odd(), mode)
    for _ in range(3):
        step(parts, vectors())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_differs_is_named() -> None:
    model = Odd()
    before = versions(model)
    first = left_tensors(model, before)
    model.small = model.small.flip(0)  # the same sums
    model.table.data = torch.ones(300, 300)
    with torch.no_grad():
        model.large[7, 9] += 1
    second = left_tensors(model, before)
    assert depend_on_samples([first, left_tensors(Odd(), before)]) >= {"attribute 'large'"}
    found = depend_on_samples([first, second])
    assert {"attribute 'small'", "attribute 'large'"} <= found
    assert "attribute 'others'" not in found
