"""The trail: follows, while a model runs, whose rows its tensors have."""

from opacus.core.trail.mode import Trail

__all__ = ["Trail"]
