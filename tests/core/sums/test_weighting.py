"""Records times factors: the sums, whose factor meets which row, and what is masked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from opacus.core.norms.kept import Kept
from opacus.core.privacy.clipping import Clipped, ClippedEach, Factors
from opacus.core.record.layers import layers_of
from opacus.core.record.passes import Generation
from opacus.core.record.record import Record
from opacus.core.sums import terms as terms_module
from opacus.core.sums.terms import Bucket, KeptSums, LocalSink, Terms
from opacus.core.sums.weighting import Weighting

B, D, P = 4, 3, 2


def record(x: Tensor, g: Tensor, model: nn.Module | None = None) -> Record:
    (layer,) = layers_of(nn.Sequential(nn.Linear(D, P)) if model is None else model)
    return Record(layer, layer.spec, (x,), g, len(x), False, Generation())


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def flat(factors: Tensor, *excluded: int) -> Clipped:
    out = torch.zeros(len(factors), dtype=torch.bool)
    out[list(excluded)] = True
    return Clipped(factors.masked_fill(out, 0.0), out)


def want(x: Tensor, g: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """The sum over tokens and samples, one outer product at a time."""
    x, g = x.reshape(len(x), -1, D), g.reshape(len(g), -1, P)
    weighted = factors[:, None, None] * g
    return {"weight": torch.einsum("btp,btd->pd", weighted, x), "bias": weighted.sum((0, 1))}


@pytest.mark.parametrize("shape", [(B,), (B, 5)])
def test_each_row_is_weighted_by_its_own_factor(shape: tuple[int, ...]) -> None:
    x, g, factors = rows(*shape, D), rows(*shape, P), torch.rand(B, dtype=torch.float64)
    got = Weighting(flat(factors)).sums(record(x, g))
    torch.testing.assert_close(got, want(x, g, factors))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, want(x, g, factors.flip(0)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_excluded_sample_contributes_nothing(bad: float) -> None:
    x, g, factors = rows(B, 5, D), rows(B, 5, P), torch.rand(B, dtype=torch.float64)
    right = want(x, g, factors * torch.tensor([1, 0, 1, 1]))
    x[1], g[1] = bad, bad
    torch.testing.assert_close(Weighting(flat(factors, 1)).sums(record(x, g)), right)
    unmasked = Weighting(Clipped(flat(factors, 1).factors, torch.zeros(B, dtype=torch.bool)))
    assert not unmasked.sums(record(x, g))["weight"].isfinite().all()


def test_each_parameter_may_have_its_own_factors() -> None:
    x, g = rows(B, D), rows(B, P)
    by_name = {"0.weight": torch.rand(B).double(), "0.bias": torch.rand(B).double()}
    clipped: Factors = ClippedEach(by_name, torch.zeros(B, dtype=torch.bool))
    got = Weighting(clipped).sums(record(x, g))
    torch.testing.assert_close(got["weight"], want(x, g, by_name["0.weight"])["weight"])
    torch.testing.assert_close(got["bias"], want(x, g, by_name["0.bias"])["bias"])


def test_a_record_of_fewer_rows_has_the_first_factors() -> None:
    x, g, factors = rows(2, D), rows(2, P), torch.rand(B, dtype=torch.float64)
    torch.testing.assert_close(
        Weighting(flat(factors, 3)).sums(record(x, g)), want(x, g, factors[:2])
    )
    formed = rows(2, 7)
    got = Weighting(flat(factors, 3)).sum_of_formed("0.weight", formed)
    torch.testing.assert_close(got, factors[:2] @ formed)


def test_sums_of_half_precision_are_wide() -> None:
    """One unit in 256 is lost in bf16, if it is rounded."""
    x = torch.ones(1, 257, D, dtype=torch.bfloat16)
    g = torch.ones(1, 257, P, dtype=torch.bfloat16)
    got = Weighting(flat(torch.ones(1))).sums(record(x, g))
    assert got["weight"].dtype == torch.float32 and (got["weight"] == 257).all()


@pytest.mark.parametrize("excluded", [(), (1,)])
def test_memory_that_a_compiled_graph_writes_to_again(excluded: tuple[int, ...]) -> None:
    """Two layers' inputs in one place, one after the other, with no count of versions."""
    x, g, factors = rows(B, 5, D), rows(B, 5, D), torch.rand(B, dtype=torch.float64)
    weighting, model = Weighting(flat(factors, *excluded)), nn.Sequential(nn.Linear(D, D, False))
    for _ in range(2):
        lent = record(x, g, model)
        lent.borrowed = True
        own = flat(factors, *excluded).factors
        right = torch.einsum("b,btp,btd->pd", own, g, x)
        torch.testing.assert_close(weighting.sums(lent)["weight"], right)
        x.numpy()[:] = rows(B, 5, D).numpy()


def test_kept_records_of_one_parameter_are_terms_of_one_sum() -> None:
    layer = nn.Linear(D, D)
    model = nn.Sequential(layer, layer)
    pairs = [(rows(B, D), rows(B, D)) for _ in range(2)]
    records = [record(x, g, model) for x, g in pairs]
    factors = torch.rand(B, dtype=torch.float64)
    kept = Kept()
    kept.held = list(records)
    sums = KeptSums(kept, Weighting(flat(factors)))
    terms = sums.terms_of("0.weight")
    assert len(terms.later) == 2 and terms.stored is None and kept.held == []
    assert sums.terms_of("0.weight").later == []
    got = terms.value()
    right = sum(torch.einsum("b,bp,bd->pd", factors, g, x) for x, g in pairs)
    torch.testing.assert_close(got, right)


def test_a_sink_adds_to_gradients_and_can_be_abandoned() -> None:
    parameters = {name: nn.Parameter(rows(3)) for name in ("a", "b")}
    factors, stored = torch.rand(B, dtype=torch.float64), rows(B, 3)
    sink = LocalSink(parameters)
    sink.put("a", Terms(stored, [], factors, None))
    sink.abandon()
    sink.finish()
    assert parameters["a"].grad is None
    before = parameters["a"].grad = rows(3)
    kept = before.clone()
    sink.put("a", Terms(stored, [], factors, None))
    sink.put("b", Terms(stored, [lambda: torch.ones(3, dtype=torch.float64)], factors, None))
    sink.finish()
    torch.testing.assert_close(parameters["a"].grad, kept + factors @ stored)
    torch.testing.assert_close(parameters["b"].grad, 1 + factors @ stored)
    assert torch.equal(before, kept)  # nobody else's gradient is written over


def test_a_bucket_takes_what_is_handled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms_module, "BUCKET_ELEMENTS", 10)
    terms = Terms(rows(B, 3), [], torch.rand(B, dtype=torch.float64), None)
    bucket = Bucket()
    assert Bucket().put("large", terms, 11, "a")  # alone
    assert bucket.put("one", terms, 6, "a")
    assert not bucket.put("two", terms, 5, "a") and not bucket.put("two", terms, 4, "b")
    assert bucket.put("two", terms, 4, "a")
    assert list(bucket.terms) == ["one", "two"] and not bucket.put("three", terms, 1, "a")
