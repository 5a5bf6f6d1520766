"""Linear layers: precision, memory, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opacus.core.rules import LinearRule, rule_for
from tests.core.rules.cases import norm_sq, observe, spec_of, vectors
from tests.helpers.oracle import relative_error


@pytest.mark.parametrize("tokens", [1, 5, 96])
@pytest.mark.parametrize("scale", [1e-4, 300.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_norms_neither_vanish_nor_overflow(
    dtype: torch.dtype, scale: float, tokens: int
) -> None:
    seen = observe(nn.Linear(9, 7), vectors(tokens, 9)(3) * scale, dtype, scale=scale)
    product = seen.backprops.transpose(1, 2) @ seen.activations[0]
    if dtype == torch.float16:  # half precision would not do
        assert product.isinf().any() or (product.abs() < 1e-5).all()
    got = seen.rule.norm_sq(seen.spec, seen.activations, seen.backprops)
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert relative_error(value.sqrt(), norm_sq(seen.want[name]).sqrt()) <= 1e-3


def test_long_sequences_in_bfloat16_keep_their_precision() -> None:
    seen = observe(nn.Linear(16, 8), vectors(2048, 16)(2), torch.bfloat16)
    got = seen.rule.norm_sq(seen.spec, seen.activations, seen.backprops)
    for name, value in got.items():
        assert relative_error(value, norm_sq(seen.want[name])) <= 1e-3


@pytest.mark.parametrize(
    ("inputs", "backprops"),
    [((5,), (3,)), ((4, 5), (6, 3)), ((1, 5), (4, 3)), ((4, 2, 5), (4, 3, 3)), ((4, 2, 5), (4, 3))],
    ids=str,
)
@pytest.mark.parametrize("method", ["per_sample_grad", "norm_sq", "weighted_grad"])
def test_shapes_that_do_not_fit_are_named(
    method: str, inputs: tuple[int, ...], backprops: tuple[int, ...]
) -> None:
    seen = observe(nn.Linear(5, 3), torch.randn(4, 5))
    extra = (None,) if method == "weighted_grad" else ()
    with pytest.raises(ValueError) as error:
        getattr(seen.rule, method)(
            seen.spec, (torch.randn(inputs),), torch.randn(backprops), *extra
        )
    for part in ("net.layer", "Linear", str(list(inputs)), str(list(backprops))):
        assert part in str(error.value)


def test_joined_uses_without_tokens() -> None:
    layer = nn.Linear(5, 3)
    uses = [observe(layer, torch.randn(rows, 5)) for rows in (2, 4, 3)]
    spec = uses[0].spec
    joined = uses[0].rule.join(spec, [(u.activations, u.backprops) for u in uses])
    assert joined is not None
    got = uses[0].rule.norm_sq(spec, *joined)
    for name in spec.params:
        total = torch.zeros(4, *spec.shapes[name], dtype=torch.float64)
        for use in uses:
            total[: len(use.backprops)] += use.want[name]
        assert relative_error(got[name], norm_sq(total)) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_factors_are_not_rounded_before_they_are_applied(dtype: torch.dtype) -> None:
    """A factor rounded up would make every clipped gradient too long by as much."""
    layer = nn.Linear(2048, 2048, bias=False)
    rule, spec = rule_for(layer), spec_of("", layer)
    eps = torch.finfo(dtype).eps
    factor = torch.tensor([(int(1.37 / eps) + 0.51) * eps])
    error = (factor.to(dtype).float() / factor - 1).item()
    assert error > 0.3 * eps
    x, g = torch.randn(1, 2048).to(dtype), torch.randn(1, 2048).to(dtype)
    norm = rule.norm_sq(spec, (x,), g)["weight"].sqrt()
    total = rule.weighted_grad(spec, (x,), g, factor)["weight"]
    want = (norm * factor).item()
    assert total.double().norm().item() == pytest.approx(want, rel=error / 4)


@pytest.mark.parametrize("tokens", [1, 6])
def test_gpt2s_transposed_linear_layer_has_a_rule(tokens: int) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    seen = observe(conv1d(7, 9), vectors(tokens, 9)(3), torch.float64)
    assert isinstance(seen.rule, LinearRule)
    factors = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    got = seen.rule.per_sample_grad(seen.spec, seen.activations, seen.backprops)
    sums = seen.rule.weighted_grad(seen.spec, seen.activations, seen.backprops, factors)
    norms = seen.rule.norm_sq(seen.spec, seen.activations, seen.backprops)
    for name, want in seen.want.items():
        assert got[name].is_contiguous()  # else every sum of stored gradients copies them
        assert relative_error(got[name], want) <= 1e-12
        assert relative_error(sums[name], torch.tensordot(factors, want, dims=1)) <= 1e-12
        assert relative_error(norms[name], norm_sq(want)) <= 1e-12
