"""Convolutions: bounded memory, shapes that are refused, uses that cannot be joined."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opacus.core.rules import convolution
from tests.core.rules.cases import norm_sq, observe
from tests.core.rules.dispatched import largest_bytes
from tests.oracle import relative_error


def test_patches_are_made_a_few_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observe(nn.Conv2d(3, 2, 3, padding=1), torch.randn(16, 3, 8, 8))
    arguments = (seen.spec, seen.activations, seen.backprops)
    whole = largest_bytes(seen.rule.norm_sq, *arguments)
    assert whole >= 16 * 64 * 27 * 8
    monkeypatch.setattr(convolution, "CHUNK_ELEMENTS", 2 * 64 * 27)
    assert largest_bytes(seen.rule.norm_sq, *arguments) <= 2 * 64 * 27 * 8
    norms = seen.rule.norm_sq(*arguments)
    grads = seen.rule.per_sample_grad(*arguments)
    for name, want in seen.want.items():
        assert relative_error(norms[name], norm_sq(want)) <= 1e-10
        assert relative_error(grads[name], want) <= 1e-10


def test_an_input_without_batch_is_named() -> None:
    seen = observe(nn.Conv2d(2, 4, 3), torch.randn(3, 2, 5, 5))
    with pytest.raises(ValueError, match=r"net\.layer.*Conv2d.*\[2, 5, 5\].*\[4, 3, 3\]"):
        seen.rule.norm_sq(seen.spec, (torch.randn(2, 5, 5),), torch.randn(4, 3, 3))


def test_uses_of_different_sizes_are_not_joined() -> None:
    layer = nn.Conv1d(2, 3, 2)
    uses = [observe(layer, torch.randn(3, 2, length)) for length in (4, 5)]
    joined = uses[0].rule.join(uses[0].spec, [(u.activations, u.backprops) for u in uses])
    assert joined is None


@pytest.mark.parametrize("scale", [1e-4, 300.0])
def test_half_precision_norms_neither_vanish_nor_overflow(scale: float) -> None:
    seen = observe(nn.Conv1d(3, 4, 3), torch.randn(2, 3, 20) * scale, torch.float16, scale=scale)
    got = seen.rule.norm_sq(seen.spec, seen.activations, seen.backprops)
    for name, value in got.items():
        assert relative_error(value.sqrt(), norm_sq(seen.want[name]).sqrt()) <= 1e-2
