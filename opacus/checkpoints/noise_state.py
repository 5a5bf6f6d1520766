"""The noise in a one-file checkpoint: step numbers continue, and no noise is drawn twice.

Two steps with equal noise are not private: their difference has no noise. A checkpoint holds the
public name of the run's key and the number of the next step. A run that resumes from it never
returns to a smaller number and gets another key. If both runs are seeded, it draws the noise that
the saved run would have drawn, so the checkpoint of a seeded run holds its key. So does that of a
run with correlated noise, whose later steps take back earlier noise.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opacus.core.privacy.key import NOISE

if TYPE_CHECKING:
    from opacus.optimizers.optimizer import DPOptimizer

logger = logging.getLogger(__name__)

ENTRY = "noise_generator"
_CORRELATION = "correlation"
_PASSES = "passes"  # numbers of the Poisson sampler


def noise_entries(optimizer: DPOptimizer) -> dict[str, Any]:
    """The noise in a checkpoint: nothing in ``secure_mode``, or before its key is known."""
    parallelism = optimizer._parallelism
    correlation = parallelism.correlation
    secret = parallelism.secure_mode and correlation is None
    if secret or not parallelism.key.agreed:
        return {}
    state = parallelism.key.state_dict()
    if correlation is not None:
        state[_CORRELATION] = correlation.state_dict()
    if optimizer.sampler is not None:
        state[_PASSES] = optimizer.sampler.key.numbers
    return {ENTRY: state}


def check_noise(optimizer: DPOptimizer, saved: Mapping[str, Any], *, steps: int) -> None:
    """Refuse a checkpoint of a run whose noise was correlated in another way.

    Args:
        optimizer: The private optimizer.
        saved: The checkpoint.
        steps: Number of steps that it counts.

    Raises:
        ValueError: It says what the checkpoint has, and what this run has.
    """
    correlation = optimizer._parallelism.correlation
    state = _entry(saved).get(_CORRELATION)
    if correlation is not None and (steps or state):
        correlation.check(state)
    elif correlation is None and state:
        raise ValueError(
            f"the run that saved this had the correlated noise {state['plan']}, and this one has "
            "independent noise: pass the same correlated_noise to make_private"
        )


def _entry(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = saved.get(ENTRY)
    return entry if isinstance(entry, Mapping) and "next" in entry else {}


def restore_noise(
    optimizer: DPOptimizer, saved: Mapping[str, Any], *, steps: int, taken: int
) -> None:
    """Continue from the saved entries, or with a new key.

    A seeded run goes on with the key of the seeded run that saved the checkpoint. If that was not
    seeded, or if this process has taken steps that the checkpoint does not know of, its key is
    replaced by one of the operating system. Call it on all ranks.

    Args:
        optimizer: The private optimizer.
        saved: The checkpoint.
        steps: Number of steps that the checkpoint counts.
        taken: Number of steps that had been taken in this process.

    A log warns of steps that are not counted any more.

    Warns:
        UserWarning: A seed was asked for, and the noise does not come from it any more.
    """
    key, parallelism = optimizer._parallelism.key, optimizer._parallelism
    optimizer.know_books()
    _restore_passes(optimizer, _entry(saved).get(_PASSES), steps)
    # An earlier load, or one of the model alone, may have set the accountant back already.
    taken = max(taken, key.step)
    back = taken > steps
    say_what_is_not_counted(taken, steps)
    entry = _entry(saved)
    known = bool(entry) and key.resume(entry)
    if parallelism.correlation is not None and _CORRELATION in entry:
        parallelism.correlation.load_state_dict(entry[_CORRELATION])
    # A known state has its own number: steps that released nothing drew no noise.
    key.at_least({NOISE: taken if known else max(taken, steps)})
    if (known and not back) or not (steps or taken):
        return
    key.renew()
    if key.asked and parallelism.draws_shared_noise():
        _warn(back)


def say_what_is_not_counted(taken: int, steps: int) -> None:
    """Tell of steps that have been taken and that a checkpoint does not count."""
    if taken > steps:
        logger.warning(
            "%d steps have been taken or loaded before, and the checkpoint counts %d: the others "
            "are not counted any more. If anything of them was seen, such as an evaluation that "
            "led back, they cost privacy, too: add both histories with "
            "opacus.accountants.runs.compose.",
            taken,
            steps,
        )


def _restore_passes(optimizer: DPOptimizer, saved: Any, steps: int) -> None:
    """Let Poisson sampling go on after the passes of the saved run, or with other coins.

    The same batches again would not be the independent ones that the accountant counts.
    """
    if optimizer.sampler is None:
        return
    key = optimizer.sampler.key
    if saved is not None:
        key.at_least(saved)
    elif steps and key.seeded and optimizer._parallelism.correlation is None:
        key.renew()
        warnings.warn(
            "the checkpoint does not say which batches its run has drawn: the coming ones have a "
            "new seed from the operating system, also if a seed was set. Epsilon is not affected",
            stacklevel=4,
        )


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
