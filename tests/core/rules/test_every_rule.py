"""What every rule has to do, against one sample at a time in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opacus.core.rules.generic import GenericRule
from tests.core.rules.cases import CASES, Observed, norm_sq, observe, observe_case
from tests.helpers.oracle import relative_error, weighted_sum

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}
# Inputs are rounded before the oracle sees them: what is left is the rule's own error.
HALF = {torch.bfloat16: 1e-2, torch.float16: 1e-2}

# Torch's own remark on an even kernel.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

every_case = pytest.mark.parametrize("name", CASES)


def assert_norms(seen: Observed, tolerance: float) -> None:
    got = seen.rule.norm_sq(seen.spec, seen.activations, seen.backprops)
    assert got.keys() == seen.want.keys()
    for name, value in got.items():
        wide = torch.float64 if seen.backprops.dtype == torch.float64 else torch.float32
        assert value.dtype == wide
        assert relative_error(value, norm_sq(seen.want[name])) <= tolerance


@every_case
def test_the_table_has_a_rule(name: str) -> None:
    seen = observe_case(name, 2)
    assert not isinstance(seen.rule, GenericRule)
    assert all(want.abs().max() > 0 for want in seen.want.values())


@every_case
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_per_sample_gradients_and_norms(name: str, batch: int, dtype: torch.dtype) -> None:
    seen = observe_case(name, batch, dtype)
    got = seen.rule.per_sample_grad(seen.spec, seen.activations, seen.backprops)
    assert got.keys() == seen.want.keys() == set(seen.spec.params)
    for name, grad in got.items():
        assert relative_error(grad, seen.want[name]) <= EXACT[dtype]
    assert_norms(seen, EXACT[dtype])


@every_case
@pytest.mark.parametrize("factors", [None, "random", "zero"])
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_weighted_gradient_is_the_weighted_sum(
    name: str, factors: str | None, dtype: torch.dtype
) -> None:
    seen = observe_case(name, 4, dtype)
    weights = torch.zeros(4) if factors == "zero" else torch.rand(4) + 0.1
    got = seen.rule.weighted_grad(
        seen.spec, seen.activations, seen.backprops, weights if factors else None
    )
    want = weighted_sum(seen.want, weights.to(dtype).double() if factors else torch.ones(4))
    assert got.keys() == want.keys()
    for name, grad in got.items():
        assert grad.shape == seen.spec.shapes[name]
        assert relative_error(grad, want[name]) <= EXACT[dtype]


@every_case
def test_an_empty_batch(name: str) -> None:
    case = CASES[name]
    seen = observe(case.layer(), case.inputs(2), torch.float32)
    arguments = (seen.spec, tuple(a[:0] for a in seen.activations), seen.backprops[:0])
    assert all(
        grad.shape == (0, *seen.spec.shapes[name])
        for name, grad in seen.rule.per_sample_grad(*arguments).items()
    )
    assert all(norm.shape == (0,) for norm in seen.rule.norm_sq(*arguments).values())
    for factors in (None, torch.zeros(0)):
        total = seen.rule.weighted_grad(*arguments, factors)
        assert total.keys() == set(seen.spec.params)
        for name, grad in total.items():
            assert grad.shape == seen.spec.shapes[name]
            assert not grad.any()


@every_case
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    seen = observe_case(name, 3, dtype)
    assert_norms(seen, HALF[dtype])
    got = seen.rule.per_sample_grad(seen.spec, seen.activations, seen.backprops)
    for name, grad in got.items():
        assert relative_error(grad, seen.want[name]) <= 2e-2


def strided(tensor: Tensor) -> Tensor:
    """The same values, with the dimensions stored in reverse order."""
    order = list(reversed(range(tensor.dim())))
    result = tensor.permute(order).contiguous().permute(order)
    assert tensor.numel() <= max(tensor.shape) or not result.is_contiguous()
    return result


@every_case
def test_the_layout_in_memory_does_not_matter(name: str) -> None:
    seen = observe_case(name, 4)
    factors = torch.rand(8, dtype=torch.float64)[::2]
    activations, backprops = tuple(strided(a) for a in seen.activations), strided(seen.backprops)
    for method, extra in (("per_sample_grad", ()), ("norm_sq", ()), ("weighted_grad", (factors,))):
        run = getattr(seen.rule, method)
        want = run(seen.spec, seen.activations, seen.backprops, *extra)
        got = run(seen.spec, activations, backprops, *extra)
        assert all(relative_error(got[n], want[n]) <= 1e-12 for n in want)


@every_case
def test_one_row_expanded_to_all_samples(name: str) -> None:
    case = CASES[name]
    seen = observe(case.layer(), case.inputs(1))
    activations = tuple(a.expand(3, *a.shape[1:]) for a in seen.activations)
    backprops = seen.backprops.expand(3, *seen.backprops.shape[1:])
    got = seen.rule.per_sample_grad(seen.spec, activations, backprops)
    norms = seen.rule.norm_sq(seen.spec, activations, backprops)
    total = seen.rule.weighted_grad(seen.spec, activations, backprops, None)
    for name, want in seen.want.items():
        assert relative_error(got[name], want.expand_as(got[name])) <= 1e-10
        assert relative_error(norms[name], norm_sq(want).expand(3)) <= 1e-10
        assert relative_error(total[name], 3 * want[0]) <= 1e-10


@every_case
def test_inputs_are_left_alone(name: str) -> None:
    seen = observe_case(name, 4)
    before = [t.clone() for t in (*seen.activations, seen.backprops)]
    seen.rule.per_sample_grad(seen.spec, seen.activations, seen.backprops)
    seen.rule.norm_sq(seen.spec, seen.activations, seen.backprops)
    seen.rule.weighted_grad(seen.spec, seen.activations, seen.backprops, torch.rand(4))
    after = (*seen.activations, seen.backprops)
    assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))


@every_case
def test_a_sample_that_is_not_finite_spoils_itself_alone(name: str) -> None:
    seen = observe_case(name, 4)
    backprops = seen.backprops.clone()
    backprops[1] = float("nan")
    norms = seen.rule.norm_sq(seen.spec, seen.activations, backprops)
    for name, value in norms.items():
        assert value[1].isnan()
        kept = [0, 2, 3]
        assert relative_error(value[kept], norm_sq(seen.want[name])[kept]) <= 1e-10


@every_case
def test_joined_uses_have_the_norm_of_the_summed_gradients(name: str) -> None:
    case = CASES[name]
    layer = case.layer()
    uses = [observe(layer, case.inputs(4)), observe(layer, case.inputs(2))]
    first = uses[0]
    joined = first.rule.join(first.spec, [(u.activations, u.backprops) for u in uses])
    if joined is None:
        assert name.startswith(("group_norm", "instance_norm", "bag", "sequence_bias"))
        return
    got = first.rule.norm_sq(first.spec, *joined)
    formed = first.rule.per_sample_grad(first.spec, *joined)
    total = first.rule.weighted_grad(first.spec, *joined, torch.arange(1.0, 5.0))
    for name, want in first.want.items():
        want = want.clone()
        alone = norm_sq(want)[:2] + norm_sq(uses[1].want[name])
        want[:2] += uses[1].want[name]
        assert relative_error(alone, norm_sq(want)[:2]) > 1e-6  # the cross term counts
        assert relative_error(got[name], norm_sq(want)) <= 1e-10
        assert relative_error(formed[name], want) <= 1e-10
        weighted = torch.tensordot(torch.arange(1.0, 5.0).double(), want, dims=1)
        assert relative_error(total[name], weighted) <= 1e-10
