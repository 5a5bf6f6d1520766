"""Loss scaling (``torch.amp.GradScaler``): the scale of gradients, and overflows.

Note [Loss scale]
    ``scaler.scale(loss)`` multiplies the loss by S, so that half-precision backprops do not
    underflow. Every per-sample gradient is then S times too large, and has to be divided
    by S before its norm is compared with C. With per-sample gradients the optimizer does
    that in its step, where the scaler says what S is. Ghost clipping clips in
    ``backward()``, before any scaler speaks; a multiplication does not say who asks for
    it, and a weight (``2 * loss``) must not be mistaken for a scale. So the loss looks
    whether the multiplication was written in :meth:`GradScaler.scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.amp import GradScaler

from opacus.core.platform.callers import callers

SCALING = frozenset({"scale", "apply_scale"})
STEPPING = frozenset({"step", "_maybe_opt_step"})


@dataclass(frozen=True)
class ScaledStep:
    """The state that a scaler passes to the optimizer whose step it calls.

    Attributes:
        scale: S; 1 without a scaler.
        divided: Whether ``unscale_`` has divided ``p.grad`` by S already.
        overflow: Whether a gradient is not finite, so that the step is to be skipped.
        active: Whether there is a scaler.
    """

    scale: float = 1.0
    divided: bool = False
    overflow: bool = False
    active: bool = False


NO_SCALER = ScaledStep()


def calling_scaler(functions: frozenset[str]) -> GradScaler | None:
    """The scaler in one of whose ``functions`` the caller runs, or None."""
    for frame in callers():
        if frame.f_code.co_name in functions:
            owner = frame.f_locals.get("self")
            if isinstance(owner, GradScaler):
                return owner
    return None


def scaled_step(optimizer: Any) -> ScaledStep:
    """What the scaler that calls ``optimizer.step()`` says; see :class:`ScaledStep`.

    A scaler sets ``optimizer.found_inf``, and ``optimizer.grad_scale`` unless
    ``unscale_`` was called before.

    Raises:
        RuntimeError: ``unscale_`` was called, and which scale it divided by is unknown.
    """
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return NO_SCALER
    scale: Any = getattr(optimizer, "grad_scale", None)
    divided = scale is None
    if divided:
        scaler = calling_scaler(STEPPING)
        if scaler is None:
            raise RuntimeError(
                "step() was told of an overflow check, but not by torch.amp.GradScaler, so the "
                "loss scale is unknown: call scaler.step(optimizer)"
            )
        scale = scaler.get_scale()
    return ScaledStep(float(scale), divided, bool(found), active=True)
