"""Inputs of layers in a row, cleared of excluded samples once."""

from __future__ import annotations

import torch

from opacus.core.kernels.sums.scaled_rows import Inputs

EXCLUDED = torch.tensor([False, True, False])


def test_layers_in_a_row_share_what_was_cleared() -> None:
    inputs, masking = torch.randn(3, 4), Inputs()
    (first,) = masking.scaled((inputs,), None, EXCLUDED)
    (second,) = masking.scaled((inputs.detach(),), None, EXCLUDED)
    assert second is first
    assert not first[1].any() and torch.equal(first[::2], inputs[::2])


def test_a_buffer_that_has_other_contents_by_now() -> None:
    """Offloading may bring the inputs of all layers back to one place."""
    buffer, masking = torch.randn(3, 4), Inputs()
    masking.scaled((buffer,), None, EXCLUDED)
    buffer.copy_(torch.randn(3, 4))
    (masked,) = masking.scaled((buffer.detach(),), None, EXCLUDED)
    assert torch.equal(masked[::2], buffer[::2])


def test_memory_that_was_given_back_is_not_taken_for_what_it_held() -> None:
    masking = Inputs()
    for value in range(8):
        (masked,) = masking.scaled((torch.full((3, 4), float(value)),), None, EXCLUDED)
        assert torch.equal(masked[0], torch.full((4,), float(value)))


def test_factors_are_part_of_what_is_shared() -> None:
    inputs, scaled = torch.randn(3, 4), Inputs()
    ones, halves = torch.ones(3), torch.full((3,), 0.5)
    assert scaled.scaled((inputs,), ones, None)[0] is scaled.scaled((inputs,), ones[:], None)[0]
    assert torch.equal(scaled.scaled((inputs,), halves, None)[0], inputs / 2)
