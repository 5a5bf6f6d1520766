"""The trail: tracks the unit of every row of a model's tensors while the model runs."""

from opacus.core.record.trail.answers import Follower, constant, same_uses
from opacus.core.record.trail.followable import can_follow
from opacus.core.record.trail.labels import NobodysRowsError
from opacus.core.record.trail.mode import Trail

__all__ = ["Follower", "NobodysRowsError", "Trail", "can_follow", "constant", "same_uses"]
