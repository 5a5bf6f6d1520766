"""The trail: follows, while a model runs, whose rows its tensors have."""

from opacus.core.record.trail.answers import Follower, can_follow
from opacus.core.record.trail.labels import NobodysRowsError
from opacus.core.record.trail.mode import Trail

__all__ = ["Follower", "NobodysRowsError", "Trail", "can_follow"]
