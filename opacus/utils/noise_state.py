"""The noise of a run in its one-file checkpoint: it goes on, or starts anew, but never repeats.

Two steps with equal noise are no two private releases: their difference has none. A seeded
generator that started again when a run resumes would make such steps.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from opacus.core.layout import Sharded, TensorParallel
from opacus.utils.random_state import fits, on_this_device

if TYPE_CHECKING:
    from opacus.optimizers.optimizer import DPOptimizer

GENERATOR = "noise_generator"
STREAMS = "noise_streams"

# Device type and state of each generator that noise comes from.
_States = list[tuple[str, Tensor]]


def noise_entries(optimizer: DPOptimizer) -> dict[str, Any]:
    """What a checkpoint holds of the noise; under FSDP2 a collective call.

    Nothing in ``secure_mode``, whose noise is new in any case. With DDP the noise is drawn on
    rank 0, so a file that another rank writes has none either.
    """
    if optimizer.secure_mode:
        return {}
    layout = optimizer._layout
    own = _generators(optimizer) if layout.draws_shared_noise() else None
    if isinstance(layout, Sharded):
        every: list[Any] = [None] * layout.world_size
        dist.all_gather_object(every, (own, layout.streams.state_dict()))
        streams = {"world_size": layout.world_size, "ranks": [of_rank for _, of_rank in every]}
        return {GENERATOR: every[0][0], STREAMS: streams}
    entries: dict[str, Any] = {} if own is None else {GENERATOR: own}
    if isinstance(layout, TensorParallel):
        # A stream goes by its shard's number, so this rank's are no danger to another one.
        entries[STREAMS] = {"world_size": dist.get_world_size(), "all": layout.streams.state_dict()}
    return entries


def restore_noise(
    optimizer: DPOptimizer, saved: Mapping[str, Any], *, steps: int, taken: int
) -> None:
    """Go on where :func:`noise_entries` looked; new noise where that is not known.

    New noise also if this process has taken steps that the checkpoint does not know of: what
    they drew must not be drawn again, for other gradients. With sharded parameters a collective
    call.

    Args:
        optimizer: The private optimizer.
        saved: The checkpoint.
        steps: Number of steps that the checkpoint counts.
        taken: Number of steps that had been taken in this process.

    Warns:
        UserWarning: The noise does not go on from the generator's state.
    """
    if optimizer.secure_mode:
        return
    # The accountant may have been set back already: by the load before, or one of the model alone.
    taken = max(taken, optimizer._noised_steps)
    layout, back = optimizer._layout, taken > steps
    optimizer._noised_steps = max(taken, steps)
    if layout.draws_shared_noise():
        known = not back and _restore(optimizer, saved.get(GENERATOR))
        if not known and (steps or taken):
            _reseed(optimizer, back)
    if isinstance(layout, (Sharded, TensorParallel)):
        _restore_streams(optimizer, saved.get(STREAMS) or {}, steps, back)


# --- generators ---


def _generators(optimizer: DPOptimizer) -> dict[str, _States]:
    """The generator that the optimizer was given, or the global ones of its devices."""
    generator = optimizer.generator
    if generator is not None:
        return {"own": [(generator.device.type, generator.get_state())]}
    return {"global": [(d.type, _global_state(d)) for d in _devices(optimizer)]}


def _restore(optimizer: DPOptimizer, saved: Mapping[str, _States] | None) -> bool:
    """Set the generators to a saved state; whether there was one for each of them."""
    generator = optimizer.generator
    states = (saved or {}).get("global" if generator is None else "own")
    devices = _devices(optimizer) if generator is None else [generator.device]
    if states is None or [kind for kind, _ in states] != [device.type for device in devices]:
        return False
    for device, (_, state) in zip(devices, states, strict=True):
        if generator is not None:
            generator.set_state(state)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
    return True


def _devices(optimizer: DPOptimizer) -> list[torch.device]:
    """The CPU, on which seeds and small noise are drawn, and all others with parameters."""
    used = {p.device for p in optimizer.params if p.device.type == "cuda"}
    return [torch.device("cpu"), *sorted(used, key=str)]


def _global_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _reseed(optimizer: DPOptimizer, back: bool) -> None:
    seed = int.from_bytes(os.urandom(8), "big") >> 1
    if optimizer.generator is None:
        torch.manual_seed(seed)  # and the accelerators'
    else:
        optimizer.generator.manual_seed(seed)
    reason = (
        "this process has taken more steps than the checkpoint, whose noise must not be drawn again"
        if back
        else "the checkpoint holds no state of this run's noise generator"
    )
    warnings.warn(
        f"{reason}: the noise of the coming steps has a new seed from the operating system, also "
        "if a seed was set. Epsilon is not affected",
        stacklevel=5,
    )


# --- streams of shards ---


def _restore_streams(
    optimizer: DPOptimizer, saved: Mapping[str, Any], steps: int, back: bool
) -> None:
    """Continue the streams of shards, or start new ones on another number of ranks.

    New ones must differ from all that the run has had: a run that goes from 2 ranks to 4 and
    back would otherwise draw its first noise again, if its generators are seeded.
    """
    streams: Any = optimizer._layout.streams  # type: ignore[attr-defined]
    size = dist.get_world_size()
    same = not back and saved.get("world_size") == size
    device = optimizer.params[0].device
    if not same or "all" in saved:  # another rank's file may lack this rank's streams
        streams.renew(_label(steps, size, back), device)
    if same:
        states = saved["all"] if "all" in saved else saved["ranks"][dist.get_rank()]
        if fits(states):
            streams.load_state_dict(on_this_device(states))
        else:
            streams.renew(_label(steps, size, back), device)


def _label(steps: int, size: int, back: bool) -> str:
    """What new streams are derived from; the same on all ranks."""
    if not back:
        return f"{steps} steps, {size} ranks"
    token: list[Any] = [os.urandom(16).hex()]
    dist.broadcast_object_list(token, src=0)
    return str(token[0])
