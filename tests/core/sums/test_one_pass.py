"""What the book-keeping modes keep of a parameter, and the sum they make of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opacus.core.norms.kept import Kept
from opacus.core.privacy.clipping import Clipped
from opacus.core.record.layers import layers_of
from opacus.core.record.passes import Generation
from opacus.core.record.record import Record
from opacus.core.rules import linear
from opacus.core.sums.terms import KeptSums, Terms
from opacus.core.sums.weighting import Weighting


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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("excluded", [(), (1,)], ids=["all", "excluded"])
def test_a_product_is_written_where_its_sum_goes(
    monkeypatch: pytest.MonkeyPatch, ranks: int, transposed: bool, excluded: tuple[int, ...]
) -> None:
    """Among others in a bucket, whose rows are the ranks' parts; a second use is added."""
    monkeypatch.setattr(linear, "RANK_ROWS", 2)
    layer = nn.Linear(6, 4, bias=False)
    (known,) = layers_of(layer)
    if transposed:
        known.rule = linear.TransposedLinearRule()
    factors, skip = torch.rand(3), torch.zeros(3, dtype=torch.bool)
    skip[list(excluded)] = True
    uses = [(torch.randn(3, 5, 6), torch.randn(3, 5, 4)) for _ in range(2)]
    kept, want = Kept(), torch.zeros(4, 6)
    for x, g in uses:
        want += torch.einsum("b,btp,btd->pd", factors.masked_fill(skip, 0.0), g, x)
        x[list(excluded)] = torch.nan
        kept.held.append(Record(known, known.spec, (x,), g, 3, False, Generation()))
    clipped = Clipped(factors.masked_fill(skip, 0.0), skip)
    sums = KeptSums(kept, Weighting(clipped))
    terms = sums.terms_of("weight")
    taken: list[bool] = []
    first = terms.first
    assert first is not None
    terms.first = lambda out: taken.append(first(out)) or taken[0]  # type: ignore[func-returns-value]
    bucket = torch.full((ranks, 40), 7.0)
    terms.write(bucket[:, 5 : 5 + 24 // ranks])
    assert taken == [True]
    want = want.t() if transposed else want
    got = bucket[:, 5 : 5 + 24 // ranks].reshape(want.shape)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert (bucket[:, :5] == 7).all() and (bucket[:, 5 + 24 // ranks :] == 7).all()


def test_what_cannot_be_written_is_formed_first() -> None:
    known = [layers_of(nn.Linear(6, 4, bias=bias))[0] for bias in (True, False)]
    bias_alone, square = nn.Linear(6, 4), nn.Linear(1, 4)
    for layer in (bias_alone, square):
        layer.weight.requires_grad_(False)
    known += [layers_of(layer)[0] for layer in (bias_alone, square)]
    x, g, out = torch.randn(3, 5, 6), torch.randn(3, 5, 4), torch.full((2, 12), 7.0)
    weighting = Weighting(Clipped(torch.rand(3), torch.zeros(3, dtype=torch.bool)))
    for layer, dtype, place in (
        (known[0], torch.float32, out[:1]),  # two parameters
        (known[1], torch.bfloat16, out[:1]),  # the sum would be rounded
        (known[1], torch.float32, out),  # ranks get too few rows
        (known[1], torch.float32, out[:1, :8]),  # it is not of this size
        (known[2], torch.float32, out[:1, :4]),  # the bias alone
        (known[3], torch.float32, out[:1, :4]),  # with as many elements as the weight
    ):
        own = x[..., :1] if layer is known[3] else x
        record = Record(layer, layer.spec, (own.to(dtype),), g.to(dtype), 3, False, Generation())
        assert not weighting.write(record, place)
    assert (out == 7).all()
