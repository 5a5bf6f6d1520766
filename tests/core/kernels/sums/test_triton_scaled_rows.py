"""The kernel that scales rows and clears excluded ones, against PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.core.kernels.triton_cases import DEVICE, DTYPES, INTERPRETED, MARKS, ON_GPU, draw

pytestmark = MARKS
if ON_GPU or INTERPRETED:
    from opacus.core.kernels.sums import scaled_rows_triton as kernel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 700, 4097])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("some_out", [False, True])
def test_rows_are_scaled_and_excluded_ones_are_zero(
    dtype, size, scaled, some_out, monkeypatch
) -> None:
    rows, factors = draw(3, size, dtype=dtype), torch.rand(3, device=DEVICE)
    excluded = torch.tensor([False, some_out, False], device=DEVICE)
    want = rows.double() * factors.double()[:, None] if scaled else rows.double()
    if some_out:
        rows[1], want[1] = float("nan"), 0.0
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, float("nan")))
    got = kernel.launch(rows, factors if scaled else None, excluded if some_out else None)
    torch.testing.assert_close(got, want.to(dtype), rtol=1e-6 if dtype == torch.float32 else 8e-3,
                               atol=0)  # fmt: skip
