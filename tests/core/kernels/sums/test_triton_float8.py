"""The kernel that rounds gradients to float8 against its definition, and their weighted sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opacus.core.kernels.sums import float8
from opacus.core.kernels.sums import weighted_sum as sums
from tests.core.kernels.triton_cases import DEVICE, DTYPES, INTERPRETED, MARKS, draw

pytestmark = MARKS
KEY = bytes(range(32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 70), (2, 5, 3300)])
def test_it_rounds_as_the_definition_does(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from opacus.core.kernels.sums import float8_triton

    torch.manual_seed(0)
    grads = draw(*shape, dtype=dtype) * torch.logspace(-6, 4, shape[0]).to(DEVICE, dtype).view(
        -1, *[1] * (len(shape) - 1)
    )
    grads[0].view(-1)[:3] = torch.tensor([0.0, 1e-8, -1e-8])  # subnormal numbers
    want = float8.rounded(grads.cpu(), KEY, 5)
    finite = torch.ones(shape[0], dtype=torch.bool, device=DEVICE)
    scales = want.scales.to(DEVICE)
    values, squares = float8_triton.launch(grads.flatten(1), scales, finite, KEY, 5)
    same = values.cpu().view(torch.uint8) == want.values.flatten(1).view(torch.uint8)
    assert bool(same.all())
    torch.testing.assert_close(squares.cpu() * want.scales**2, want.norm_sq, rtol=1e-5, atol=0)


def test_a_unit_that_is_not_finite_is_stored_as_zeros() -> None:
    from opacus.core.kernels.sums import float8_triton

    grads = draw(2, 40)
    grads[0, 3] = torch.nan
    finite = torch.tensor([False, True], device=DEVICE)
    values, squares = float8_triton.launch(grads, torch.ones(2, device=DEVICE), finite, KEY, 1)
    assert bool((values[0].float() == 0).all()) and float(squares[0]) == 0 < float(squares[1])


def test_sums_of_what_is_stored() -> None:
    torch.manual_seed(1)
    found = float8.rounded(draw(4, 3, 50, dtype=torch.bfloat16), KEY, 2)
    factors = torch.rand(4, device=DEVICE)
    excluded = torch.tensor([False, True, False, False], device=DEVICE)
    own = float8.scaled_factors(factors, found.scales, excluded)
    want = (stored(found) * factors.double().masked_fill(excluded, 0).view(4, 1, 1)).sum(0)
    got = torch.empty(1, 150, device=DEVICE)
    if INTERPRETED:
        from opacus.core.kernels.sums import weighted_sum_triton as gpu

        gpu.launch([gpu.Sum(found.values, own, 0, 150)], excluded, got, 150)
    else:
        sums.weighted_sums([found.values], [own], excluded, got, [0], [150])
    torch.testing.assert_close(got.view(3, 50).double(), want, rtol=1e-5, atol=1e-6)


def stored(found: float8.Rounded) -> Tensor:
    rows = len(found.scales)
    return found.values.double() * found.scales.double().view(rows, 1, 1)
