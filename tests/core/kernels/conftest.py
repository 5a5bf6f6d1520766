"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from opacus.core.kernels.host import operands
from tests.core.kernels.interpreter import work_once
from tests.core.kernels.triton_cases import INTERPRETED

if INTERPRETED:
    work_once()


@pytest.fixture(autouse=True)
def _nan_where_kernels_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten shows."""

    def poisoned(shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.full(tuple(shape), float("nan"), dtype=torch.float32, device=device)

    monkeypatch.setattr(operands, "blank", poisoned)
