"""The ``grad`` of private parameters: what was used in a step, and what came from elsewhere.

Hooks of users on parameters are refused; ours look for foreign gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from opacus.core.platform.torch_internals import (
    accumulates,
    at_end_of_backward,
    number_of_backward,
)


def mark_processed(*tensors: Tensor) -> None:
    """Mark tensors as used; the mark of one ends when it is modified in place."""
    for tensor in tensors:
        tensor._processed = True  # type: ignore[attr-defined]
        tensor._processed_version = tensor._version  # type: ignore[attr-defined]


def is_processed(tensor: Tensor) -> bool:
    """Whether ``tensor`` was used in a step and has not been modified since."""
    return getattr(tensor, "_processed_version", None) == tensor._version


def unprocessed(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The tensors, with ``None`` in place of those that :func:`is_processed`."""
    return [None if tensor is None or is_processed(tensor) else tensor for tensor in tensors]


def was_processed(tensor: Tensor) -> bool:
    """Whether ``tensor`` was used in a step, whatever has been done to it since."""
    return getattr(tensor, "_processed", False)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether users' hooks change or consume its gradient."""
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        return True
    hooks: Any = parameter._backward_hooks
    return bool(hooks) and any([type(hook) is not _Arrival for hook in hooks.values()])


def refuse_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters with ``register_hook`` or ``register_post_accumulate_grad_hook``.

    Autograd forms no gradient of private parameters that would reach them.

    Raises:
        ValueError: It names the parameters.
    """
    late = "_post_accumulate_grad_hooks"
    some = [(n, p) for n, p in parameters if p._backward_hooks or getattr(p, late, None)]
    hooked = [name for name, p in some if p.requires_grad and has_hooks(p)]
    if hooked:
        raise ValueError(
            f"parameters {hooked[:5]} have hooks (register_hook or "
            "register_post_accumulate_grad_hook): these see gradients that are not clipped and "
            "have no noise, and what they change does not reach the private step. Remove them; "
            "to change or mask the released gradient, use optimizer.attach_step_hook, which runs "
            "when p.grad is private"
        )


def foreign_gradients(names: Sequence[str]) -> RuntimeError:
    """The error for gradients of private parameters that bypassed their layers."""
    return RuntimeError(
        f"parameters {list(names)} received gradients that were not clipped: they were used "
        "outside their layer's forward (or in the loss, as a penalty on weights is: see "
        "optimizer.add_penalty), in eval mode, or made trainable after make_private. Use them "
        "through their own layer; if another module's forward reads them, name the layer in that "
        "module's attribute reads_parameters_of = ('layer',) before make_private; or freeze them "
        "(requires_grad_(False)) and train LoRA adapters, say. Nothing was added to the model"
    )


class ForeignGradients:
    """Notices gradients that autograd adds to private parameters.

    Their layers run on detached aliases, so whatever arrives has bypassed the taps.

    Args:
        parameters: The private parameters with their names.
        report: Called with the names when a backward pass ends in which any arrived.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        report: Callable[[list[str]], None],
    ) -> None:
        self._parameters = list(parameters)
        self._report = report
        self._backward = -1  # number of the latest backward pass in which any arrived
        self._names: list[str] = []
        self._watch()

    def _watch(self) -> None:
        self._handles = [
            parameter.register_hook(_Arrival(self, parameter, name))
            for name, parameter in self._parameters
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        while self._handles:
            self._handles.pop().remove()

    def arrived(self, name: str) -> None:
        """A parameter receives a gradient."""
        number = number_of_backward()
        if number != self._backward:
            self._backward, self._names = number, []
            at_end_of_backward(self._finish)
        self._names.append(name)

    def _finish(self) -> None:
        names, self._names, self._backward = self._names, [], -1
        self._report(sorted(names))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": [], "_names": [], "_backward": -1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()  # copies of parameters have no hooks


class _Arrival:
    """The hook of one parameter."""

    def __init__(self, watch: ForeignGradients, parameter: nn.Parameter, name: str) -> None:
        self.watch = watch
        self.parameter = parameter
        self.name = name

    def __call__(self, grad: Tensor | None) -> None:
        # Compiled graphs, in which a parameter is detached, send None.
        if grad is not None and accumulates(self.parameter):
            self.watch.arrived(self.name)
