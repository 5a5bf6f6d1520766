"""Runs of a model on the side, of which training notices nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Buffers up to so many elements are put back if a run has changed them.
BUFFER_ELEMENTS = 1 << 24


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Afterwards gradients, random states, buffers and the modules' attributes are as before.

    Inside, parameters have no ``grad``, replicas communicate nothing, and compiled parts run
    eagerly. What a module changes in place in an attribute that is no buffer (a list of its
    own, say) stays changed.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_states(model))
        stack.enter_context(_attributes(model))
        stack.enter_context(_buffers(model))
        stack.enter_context(_gradients(model))
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():  # of DistributedDataParallel
            for name in ("require_backward_grad_sync", "require_forward_param_sync"):
                if name in module.__dict__:
                    module.__dict__[name] = False
        yield


@contextmanager
def _random_states(model: nn.Module) -> Iterator[None]:
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    python, other = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        with torch.random.fork_rng(devices=[d for d in devices if d is not None]):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(other)


@contextmanager
def _attributes(model: nn.Module) -> Iterator[None]:
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, values in before:
            for name in [n for n in module.__dict__ if n not in values]:
                del module.__dict__[name]
            module.__dict__.update(values)


@contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    tables = [(m._buffers, dict(m._buffers)) for m in model.modules() if m._buffers]
    kept = [
        (b, b._version, b.detach().clone())
        for b in model.buffers()
        if type(b) is Tensor and b.numel() <= BUFFER_ELEMENTS and not b.is_inference()
    ]
    try:
        yield
    finally:
        for table, values in tables:
            table.clear()
            table.update(values)
        with torch.no_grad():
            for buffer, version, value in kept:
                if buffer._version != version:
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
    """Dropout does nothing, whether a module or a function does it."""
    drops = [
        module
        for module in model.modules()
        if "drop" in type(module).__name__.lower() and not any(True for _ in module.parameters())
    ]
    before = [module.training for module in drops]
    for module in drops:
        module.training = False
    try:
        with _NoDropout():
            yield
    finally:
        for module, training in zip(drops, before, strict=True):
            module.training = training


class _NoDropout(TorchFunctionMode):
    """Makes the functions of torch that drop elements return what they are given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPS:
            return args[0] if args else kwargs["input"]
        if func in _WITH_PROBABILITY:
            place = _WITH_PROBABILITY[func]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


_DROPS = frozenset(
    (
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
        torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_,
        torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout,
        torch.feature_alpha_dropout_,
    )
)  # fmt: skip
# Functions with an argument `dropout_p`, and its place.
_WITH_PROBABILITY: dict[Any, int] = {
    F.scaled_dot_product_attention: 4,
    F.multi_head_attention_forward: 10,
}
