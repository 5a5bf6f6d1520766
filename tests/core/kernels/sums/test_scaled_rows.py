"""Inputs of layers in a row, cleared of excluded samples once."""

from __future__ import annotations

import torch

from opacus.core.kernels.sums.scaled_rows import Masking

EXCLUDED = torch.tensor([False, True, False])


def test_layers_in_a_row_share_what_was_cleared() -> None:
    inputs, masking = torch.randn(3, 4), Masking()
    (first,) = masking.without((inputs,), EXCLUDED)
    (second,) = masking.without((inputs.detach(),), EXCLUDED)
    assert second is first
    assert not first[1].any() and torch.equal(first[::2], inputs[::2])


def test_a_buffer_that_has_other_contents_by_now() -> None:
    """Offloading may bring the inputs of all layers back to one place."""
    buffer, masking = torch.randn(3, 4), Masking()
    masking.without((buffer,), EXCLUDED)
    buffer.copy_(torch.randn(3, 4))
    (masked,) = masking.without((buffer.detach(),), EXCLUDED)
    assert torch.equal(masked[::2], buffer[::2])


def test_memory_that_was_given_back_is_not_taken_for_what_it_held() -> None:
    masking = Masking()
    for value in range(8):
        (masked,) = masking.without((torch.full((3, 4), float(value)),), EXCLUDED)
        assert torch.equal(masked[0], torch.full((4,), float(value)))
