"""What the book-keeping modes keep of a parameter, and the sum they make of it."""

from __future__ import annotations

import pytest
import torch

from opacus.core.sums.terms import Terms


@pytest.mark.parametrize("later", [0, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_sums_are_written_in_the_order_of_the_parameter(transposed: bool, later: int) -> None:
    """Also from transposes, and in rows that are the shards of the ranks."""
    stored = torch.randn(3, 4, 6, dtype=torch.float64)
    if transposed:
        stored = torch.randn(3, 6, 4, dtype=torch.float64).transpose(1, 2)
    more = [torch.randn(6, 4, dtype=torch.float64).t() for _ in range(later)]
    factors, excluded = torch.rand(3, dtype=torch.float64), torch.tensor([False, True, False])
    terms = Terms(stored, [lambda t=t: t for t in more], factors, excluded)
    want = torch.tensordot(factors.masked_fill(excluded, 0.0), stored, dims=1) + sum(more)
    out = torch.empty(2, 12, dtype=torch.float64)
    terms.write(out)
    torch.testing.assert_close(out, want.reshape(2, 12))
    torch.testing.assert_close(terms.value(), want)
