"""Refuses steps that other optimizers take with gradients that a private one has yet to release."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from opacus.core.platform.sharded import local_of
from opacus.core.privacy.gradients import unprocessed


class Guarded(Protocol):
    """What a private optimizer is asked before another one takes a step."""

    original_optimizer: Optimizer
    params: list[nn.Parameter]
    listed: list[nn.Parameter] | None  # while its own step runs; gradients may share memory then
    unreleased: list[nn.Parameter]  # whose ``p.grad`` is of private samples, without noise

    __hash__: Callable[[], int]  # type: ignore[assignment]


_GUARDED: WeakSet[Any] = WeakSet()


def guard_steps(private: Guarded) -> None:
    """From now on no other optimizer steps with what ``private`` has not released.

    A variable that still holds the plain optimizer is stepped easily, or one that was built after
    ``make_private``: nothing would be noised or counted.
    """
    _look_at_all_steps()
    plain = _plain(private)
    for other in list(_GUARDED):  # private takes the place of earlier ones
        if any(part in plain for part in _plain(other)):
            _GUARDED.discard(other)
    _GUARDED.add(private)


def let_go(private: Any) -> None:
    """The model is private no longer: what was not released is dropped, and others may step."""
    for parameter in private.unreleased:
        parameter.grad = None
    _GUARDED.discard(private)


@functools.cache
def _look_at_all_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(stepping: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Look at the gradients that are there, and at those that a closure will form."""
    if torch.compiler.is_compiling() or getattr(stepping, "reads_samples", False):
        return None
    _look(stepping)
    own, *given = args
    if given and callable(given[0]):
        return (own, _looked_at(given[0], stepping), *given[1:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _looked_at(kwargs["closure"], stepping)}
    return None


def _looked_at(closure: Callable[[], Any], stepping: Optimizer) -> Callable[[], Any]:
    def looked_at() -> Any:
        loss = closure()
        _look(stepping)
        return loss

    return looked_at


def _look(stepping: Optimizer) -> None:
    for private in list(_GUARDED):
        if stepping is not private and private.listed is None:
            _refuse(private, stepping)


def _plain(private: Guarded) -> list[Optimizer]:
    plain = private.original_optimizer
    return list(getattr(plain, "optimizers", (plain,)))


def _refuse(private: Guarded, stepping: Optimizer) -> None:
    """What the private step has released is marked; other gradients are not private.

    Raises:
        RuntimeError: ``stepping`` would use some that are not.
    """
    own = any(part is stepping for part in _plain(private))
    held = private.params if own else private.unreleased
    if not held:
        return
    taken = {id(p) for group in stepping.param_groups for p in group["params"]}
    fresh = unprocessed([p.grad for p in held if own or id(p) in taken])
    # torch.distributed.checkpoint steps with zeros, to make a state.
    if any(grad is not None and bool((local_of(grad) != 0).any()) for grad in fresh):
        which = "the plain optimizer" if own else f"another optimizer ({type(stepping).__name__})"
        raise RuntimeError(
            f"step() of {which} was called with gradients that are not private: nothing would be "
            "noised or counted. Call step() of the optimizer that make_private returned; for "
            "steps on public data, build another optimizer, clear the gradients of the private "
            "one first (its zero_grad()), and run the model after its disable_hooks()"
        )
