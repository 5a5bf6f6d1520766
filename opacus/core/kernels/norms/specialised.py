"""Whether this card and this Triton run the warp-specialised kernels of ``hopper``."""

from __future__ import annotations

import functools

import torch

from opacus.core.kernels.host import operands


def has_specialised(device: torch.device) -> bool:
    """Whether the warp-specialised kernels of ``hopper`` run on this card, in this Triton."""
    if device.type != "cuda" or operands.interpreted():
        return False
    # Trying them waits for the device, which a graph that is being captured cannot.
    return not torch.cuda.is_current_stream_capturing() and _has_specialised(device)


@functools.cache
def _has_specialised(device: torch.device) -> bool:
    try:
        from opacus.core.kernels.norms import hopper
    except ImportError:  # a Triton without Gluon
        return False
    return hopper.works(device)
