"""Runs of a model on the side that leave training unchanged."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opacus.core.platform.attributes import same_attributes

# Buffers up to so many elements are put back if a run has changed them.
BUFFER_ELEMENTS = 1 << 24


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Afterwards gradients, random states, buffers and the modules' attributes are as before.

    Inside, parameters have no ``grad``, replicas communicate nothing, and compiled parts run
    eagerly. What a module changes in place in a tensor that is no buffer, or in a list within a
    list, stays changed.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_states(model))
        stack.enter_context(same_state(model))
        stack.enter_context(_gradients(model))
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = False
                module.modules_buffers = []  # none to broadcast, however that is asked for
        yield


class RandomNumbers:
    """The states of random generators at one moment: the numbers that follow can be drawn again.

    Those of Python, NumPy and PyTorch that programs share; not a model's own generators.

    Args:
        model: On whose devices.
    """

    def __init__(self, model: nn.Module) -> None:
        devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
        self._devices = sorted(d for d in devices if d is not None)
        self._states = self._now()

    def drawn(self) -> bool:
        """Whether any has been drawn since then."""
        pairs = zip(self._now(), self._states, strict=True)
        return not all(_equal(now, before) for now, before in pairs)

    def again(self) -> None:
        """Draw the same ones from now on."""
        python, numpy, cpu, *gpus = self._states
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, gpus, strict=True):
            torch.cuda.set_rng_state(state, device)

    def _now(self) -> list[Any]:
        numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        other = None if numpy is None else numpy.get_state(legacy=False)
        gpus = [torch.cuda.get_rng_state(device) for device in self._devices]
        return [random.getstate(), other, torch.get_rng_state(), *gpus]


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    return repr(one) == repr(two)  # NumPy's state holds an array: repr shows its ends


@contextmanager
def _random_states(model: nn.Module) -> Iterator[None]:
    numbers = RandomNumbers(model)
    try:
        yield
    finally:
        numbers.again()


@contextmanager
def same_state(model: nn.Module) -> Iterator[None]:
    """Afterwards the modules' attributes and buffers are as before."""
    with same_buffers(model), same_attributes(model):
        yield


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Afterwards the buffers are as before (power iterations, statistics, counters)."""
    tables = [(m._buffers, dict(m._buffers)) for m in model.modules() if m._buffers]
    kept = [
        (b, b.detach().clone())
        for b in model.buffers()
        if type(b) is Tensor and b.numel() <= BUFFER_ELEMENTS
        if not (b.is_inference() or b.is_meta)
    ]
    try:
        yield
    finally:
        for table, values in tables:
            table.clear()
            table.update(values)
        with torch.no_grad():
            for buffer, value in kept:
                if not torch.equal(buffer, value):  # batch norm leaves the version as it is
                    buffer.copy_(value)


@contextmanager
def _gradients(model: nn.Module) -> Iterator[None]:
    before = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in before:
            parameter.grad = grad


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout does nothing, whether a module or a function does it, in recomputations too.

    Functions are replaced where torch looks them up: a ``TorchFunctionMode`` would not reach
    what a checkpoint computes again in the backward pass.
    """
    with ExitStack() as stack:
        for module in model.modules():
            drops = "drop" in type(module).__name__.lower()
            if drops and next(module.parameters(), None) is None:
                stack.enter_context(_replaced(module, "training", False))
        for owner in (torch, torch._VF):  # type: ignore[attr-defined]
            for name in _DROPS:
                stack.enter_context(_replaced(owner, name, _unchanged))
        attention = _never_dropping(F.scaled_dot_product_attention)
        stack.enter_context(_replaced(F, "scaled_dot_product_attention", attention))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _unchanged(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


def _never_dropping(attention: Any) -> Any:
    def run(query: Any, key: Any, value: Any, *more: Any, **kwargs: Any) -> Any:
        if len(more) > 1:
            more = (more[0], 0.0, *more[2:])
        elif "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return attention(query, key, value, *more, **kwargs)

    return run


_ABSENT = object()
_DROPS = tuple(
    name + ending
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for ending in ("", "_")
)
