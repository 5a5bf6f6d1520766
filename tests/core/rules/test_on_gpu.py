"""Every rule on a CUDA device, where half-precision products go another way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opacus.core.kernels.norms.reference import sum_of_squares
from opacus.core.rules import rule_for
from tests.core.rules.cases import CASES, norm_sq, observe_case, spec_of
from tests.helpers.oracle import relative_error, weighted_sum

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Using padding='same'")]

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 1e-2,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_results_are_those_of_the_oracle(name: str, dtype: torch.dtype) -> None:
    seen = observe_case(name, 4, dtype)
    rule, tolerance = seen.rule, TOLERANCE[dtype]
    arguments = (seen.spec, tuple(a.cuda() for a in seen.activations), seen.backprops.cuda())
    factors = torch.tensor([0.5, 1.0, 0.25, 2.0])
    norms, grads = rule.norm_sq(*arguments), rule.per_sample_grad(*arguments)
    total, want_total = (
        rule.weighted_grad(*arguments, factors.cuda()),
        weighted_sum(seen.want, factors),
    )
    for name, want in seen.want.items():
        assert relative_error(norms[name].cpu(), norm_sq(want)) <= tolerance
        assert relative_error(grads[name].cpu(), want) <= 2 * tolerance
        assert relative_error(total[name].cpu(), want_total[name]) <= 2 * tolerance


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch(name: str) -> None:
    seen = observe_case(name, 2, torch.float32)
    activations = tuple(a[:0].cuda() for a in seen.activations)
    arguments = (seen.spec, activations, seen.backprops[:0].cuda())
    assert all(n.shape == (0,) for n in seen.rule.norm_sq(*arguments).values())
    assert not any(g.any() for g in seen.rule.weighted_grad(*arguments, None).values())


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("linear", "embedding", "bag"))])
def test_nothing_waits_for_the_device(name: str) -> None:
    seen = observe_case(name, 4, torch.bfloat16)
    arguments = (seen.spec, tuple(a.cuda() for a in seen.activations), seen.backprops.cuda())
    factors = torch.rand(4, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        seen.rule.norm_sq(*arguments)
        seen.rule.weighted_grad(*arguments, factors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_long_lookups_do_not_wait_either() -> None:
    layer = nn.Embedding(1000, 16)
    spec, rule = spec_of("", layer), rule_for(layer)
    ids = torch.randint(0, 1000, (4, 2048), device="cuda")
    backprops = torch.randn(4, 2048, 16, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        rule.norm_sq(spec, (ids,), backprops)
        rule.weighted_grad(spec, (ids,), backprops, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sums_of_many_squares_stay_precise() -> None:
    values = torch.rand(2, 1 << 24, device="cuda", dtype=torch.bfloat16)
    want = values.double().square().sum(1)
    assert relative_error(sum_of_squares(values), want) <= 1e-6
