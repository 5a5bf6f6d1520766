"""The noise of a run in its one-file checkpoint: its steps go on, and none has its noise again.

Two steps with equal noise are no two private releases: their difference has none. A checkpoint
holds the name of the run's key and the number of the next step. A run that goes on from it never
goes back to a smaller number, and has another key: unless both runs are seeded, which asks for the
noise that the saved run would have had. The checkpoint of a seeded run therefore holds its key.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opacus.core.privacy.key import NOISE

if TYPE_CHECKING:
    from opacus.optimizers.optimizer import DPOptimizer

ENTRY = "noise_generator"


def noise_entries(optimizer: DPOptimizer) -> dict[str, Any]:
    """What a checkpoint holds of the noise: nothing in ``secure_mode``, or before its key is known.

    With DDP the noise is drawn on rank 0, so a file that another rank writes has none either.
    """
    layout = optimizer._layout
    if layout.secure_mode or not layout.noise_is_due() or not layout.key.agreed:
        return {}
    return {ENTRY: layout.key.state_dict()}


def restore_noise(
    optimizer: DPOptimizer, saved: Mapping[str, Any], *, steps: int, taken: int
) -> None:
    """Go on where :func:`noise_entries` looked, or with a new key.

    A seeded run goes on with the key of the seeded run that saved the checkpoint. If that was not
    seeded, or if this process has taken steps that the checkpoint does not know of, its key is
    replaced by one of the operating system. To be called on all ranks alike.

    Args:
        optimizer: The private optimizer.
        saved: The checkpoint.
        steps: Number of steps that the checkpoint counts.
        taken: Number of steps that had been taken in this process.

    Warns:
        UserWarning: A seed was asked for, and the noise does not come from it any more.
    """
    key, layout = optimizer._layout.key, optimizer._layout
    # The accountant may have been set back already: by the load before, or one of the model alone.
    taken = max(taken, key.step)
    back = taken > steps
    entry = saved.get(ENTRY)
    entry = entry if isinstance(entry, Mapping) and "next" in entry else None
    known = entry is not None and key.resume(entry)
    # What is known says the number itself: steps that released nothing have none.
    key.at_least({NOISE: taken if known else max(taken, steps)})
    if (known and not back) or not (steps or taken):
        return
    key.renew()
    if key.asked and layout.draws_shared_noise():
        _warn(back)


def _warn(back: bool) -> None:
    reason = (
        "this process has taken more steps than the checkpoint, whose noise must not be drawn again"
        if back
        else "the checkpoint holds no state of this run's noise generator"
    )
    warnings.warn(
        f"{reason}: the noise of the coming steps has a new seed from the operating system, also "
        "if a seed was set. Epsilon is not affected",
        stacklevel=4,
    )
