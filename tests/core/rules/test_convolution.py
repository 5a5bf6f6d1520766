"""Convolutions: bounded memory, shapes that are refused, uses that cannot be joined."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from opacus.core.rules import LayerRule, convolution
from opacus.core.rules.spec import LayerSpec
from tests.core.rules.cases import norm_sq, observe
from tests.core.rules.dispatched import largest_bytes
from tests.helpers.oracle import relative_error


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


def wide_layers() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Layers whose samples are groups of one convolution on a CPU, and their input shapes."""
    return {
        "1d": (nn.Conv1d(16, 24, 3, stride=2, padding=1), (16, 50)),
        "2d": (nn.Conv2d(16, 24, 3, padding=1), (16, 8, 9)),
        "2d_groups": (nn.Conv2d(32, 48, (3, 2), (1, 2), (1, 0), (1, 2), groups=2), (32, 9, 20)),
        "2d_reflect": (nn.Conv2d(16, 16, 3, padding=(2, 1), padding_mode="reflect"), (16, 6, 6)),
        "2d_circular": (
            nn.Conv2d(16, 16, 2, padding="same", padding_mode="circular"),
            (16, 6, 6),
        ),
        "3d": (nn.Conv3d(16, 16, (2, 3, 1), padding=(1, 0, 1)), (16, 3, 5, 4)),
    }


@pytest.mark.parametrize("name", wide_layers())
def test_samples_as_groups_of_one_convolution(name: str) -> None:
    layer, shape = wide_layers()[name]
    seen = observe(layer, torch.randn(5, *shape), torch.float32)
    arguments = (seen.spec, seen.activations, seen.backprops)
    assert not forms_patches(arguments, seen.rule)
    norms, grads = seen.rule.norm_sq(*arguments), seen.rule.per_sample_grad(*arguments)
    for parameter, want in seen.want.items():
        assert grads[parameter].shape == want.shape
        assert relative_error(grads[parameter], want) <= 1e-5
        assert relative_error(norms[parameter], norm_sq(want)) <= 1e-5


@pytest.mark.parametrize("outputs", [16, 24])
def test_a_sample_that_is_not_finite_stays_in_its_group(outputs: int) -> None:
    seen = observe(nn.Conv2d(24, outputs, 3, padding=1), torch.randn(4, 24, 6, 6), torch.float32)
    x = seen.activations[0].clone()
    x[1] = float("nan")
    assert not forms_patches((seen.spec, (x,), seen.backprops), seen.rule)
    got = seen.rule.norm_sq(seen.spec, (x,), seen.backprops)["weight"]
    want = norm_sq(seen.want["weight"])
    assert got[1].isnan()
    others = [0, 2, 3]
    assert relative_error(got[others], want[others]) <= 1e-5


def test_samples_as_groups_are_convolved_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observe(nn.Conv2d(16, 16, 3, padding=1), torch.randn(5, 16, 6, 6), torch.float32)
    arguments = (seen.spec, seen.activations, seen.backprops)
    monkeypatch.setattr(convolution, "CHUNK_ELEMENTS", 2 * 16 * 16 * 9)
    assert largest_bytes(seen.rule.norm_sq, *arguments) <= 2 * 16 * 16 * 9 * 4
    norms = seen.rule.norm_sq(*arguments)
    assert relative_error(norms["weight"], norm_sq(seen.want["weight"])) <= 1e-5


@pytest.mark.parametrize(("channels", "outputs"), [(3, 16), (16, 3), (3, 5)])
def test_norms_of_either_order_of_the_product(channels: int, outputs: int) -> None:
    layer = nn.Conv2d(channels, outputs, 3)
    seen = observe(layer, torch.randn(3, channels, 9, 9), torch.float32)
    arguments = (seen.spec, seen.activations, seen.backprops)
    assert forms_patches(arguments, seen.rule)
    got = seen.rule.norm_sq(*arguments)["weight"]
    assert relative_error(got, norm_sq(seen.want["weight"])) <= 1e-5


def forms_patches(arguments: tuple[LayerSpec, Any, torch.Tensor], rule: LayerRule) -> bool:
    """Whether the norm makes a tensor of the patches of the input."""
    spec, _, g = arguments
    positions = g.numel() // g.shape[1]
    patches = positions * spec.options["groups"] * math.prod(spec.shapes["weight"][1:])
    return largest_bytes(rule.norm_sq, *arguments) >= patches * g.element_size()
