"""FSDP2's running passes: where units stand, what they reduce, how they get out of a failed one.

Only private parts of torch say so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from opacus.core.platform.sharded import is_fsdp
from opacus.core.platform.torch_internals import fsdp_state, fsdp_states, groups_of


def communication_state(model: nn.Module) -> str:
    """The state of each FSDP2 unit within a pass, equal where ranks have communicated equally."""
    states = []
    for state in fsdp_states(model):
        for group in groups_of(state):
            training = getattr(getattr(group, "_training_state", None), "name", "-")
            fetched = getattr(group, "_all_gather_result", None) is not None
            states.append(f"{training[:3]}{'+' * fetched}")
    return " ".join(states)


def is_idle(model: nn.Module) -> bool:
    """Whether no FSDP2 unit is in the middle of a pass."""
    return set(communication_state(model).split()) <= {"IDL"}


def has_open_backward(model: nn.Module) -> bool:
    """Whether a backward pass has come to units of FSDP2, and has not ended there."""
    contexts = [getattr(fsdp_state(root), "_state_ctx", None) for root in _outermost(model)]
    return any(getattr(c, "post_backward_final_callback_queued", False) for c in contexts)


@contextmanager
def reduced_as_a_whole(model: nn.Module) -> Iterator[None]:
    """Let FSDP2 reduce all trainable parameters of a unit each time it comes by in a backward pass.

    It reduces those that have a gradient, in one call. A layer that only some ranks' batches take
    (an expert, a second modality), or take in only one of several calls of the model, would give
    that call another size on each rank, which would hang or add up the wrong numbers. So
    parameters without a gradient get zeros there. No rank asks another one.
    """
    groups = [g for state in fsdp_states(model) for g in groups_of(state) if g is not None]
    for group in groups:
        group.post_backward = functools.partial(_reduce_all, group)
    try:
        yield
    finally:
        for group in groups:
            del group.post_backward


def _reduce_all(group: Any, *unused: Any) -> None:
    for state in group.fsdp_params:
        whole = getattr(state, "_unsharded_param", None)  # none, if the unit has never run
        if whole is not None and whole.grad is None and state.sharded_param.requires_grad:
            whole.grad = torch.zeros_like(whole)
    type(group).post_backward(group)


def _outermost(module: nn.Module) -> Iterator[Any]:
    if is_fsdp(module):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


# What an FSDP2 group, and what all groups of a model share, keep of a running pass.
_OF_GROUP = (
    *("_all_gather_result", "_post_reduce_event", "_reshard_after_forward_event"),
    *("_partial_reduce_output", "_all_reduce_state"),
)
_OF_ALL = ("all_gather_state", "reduce_scatter_state")
_LISTS = ("post_forward_order", "reduce_scatter_states", "_last_post_reduce_events")
_STREAMS = ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce")


def drop_pass(model: nn.Module) -> bool:
    """Let FSDP2 drop a forward or backward pass that has failed, and shard all units.

    Later work of the device waits for the collectives that have begun; the host does not.

    Returns:
        Whether no unit is in the middle of a pass now. Not in a version of torch that is different.
    """
    roots = list(_outermost(model))
    if all(hasattr(root, "reset_iter_state") for root in roots):  # since torch 2.13
        for root in roots:
            root.reset_iter_state()
        return is_idle(model)
    try:
        for state in fsdp_states(model):
            _drop_pass(state)
    except AttributeError:
        return False
    return is_idle(model)


def _drop_pass(state: Any) -> None:
    """:func:`drop_pass` of one unit."""
    shared, running = state._comm_ctx, state._state_ctx
    now = shared.device_handle.current_stream()
    for name in _STREAMS:
        now.wait_stream(getattr(shared, f"{name}_stream"))
    for name in _OF_ALL:
        setattr(shared, name, None)
    for name in _LISTS:
        getattr(shared, name, []).clear()
    running.iter_forward_root = None
    running.post_backward_final_callback_queued = False
    idle = type(state._training_state).IDLE
    state._training_state = idle
    getattr(state, "_modules_to_run_forward", set()).clear()
    for group in groups_of(state):
        if group is None:
            continue
        work = getattr(group._all_gather_result, "all_gather_work", None)
        if work is not None:
            work.wait()
        for name in _OF_GROUP:
            setattr(group, name, None)
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()
