"""Batches of one sample, whose per-sample gradient is the gradient that autograd forms.

Note [Parameters through one node]
    While the model runs on a single sample, its layers are not tapped. All trainable
    parameters are replaced by aliases that come out of one autograd node, so that its
    backward receives the whole gradient of the sample, from whichever place in the forward
    pass it comes: tied, reused, or used outside its layer. The parameters themselves take
    no part: nothing reaches their ``grad``, in whichever way backward is started.

    What is left of the cost of private training is the norm, the factor and the noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opacus.core.tap import ANCHOR
from opacus.core.torch_internals import TakenOff, put_back, take_off

if TYPE_CHECKING:
    from opacus.core.recorder import ForwardPass, Layer

VARIABLE = "OPACUS_LONE_SAMPLE"

WholeSink = Callable[["ForwardPass", dict[str, Tensor]], None]


def lone_sample_from_environment() -> bool:
    """Whether ``OPACUS_LONE_SAMPLE`` lets batches of one sample run without taps (default: yes).

    Raises:
        ValueError: The variable is neither ``0`` nor ``1``.
    """
    value = os.environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


class LoneSample:
    """Runs the model without taps where its batch is one sample.

    Guarantee: the gradient handed on is that of one loss with respect to all trainable
    parameters, so clipping it bounds the sample's whole contribution. It starts only after a
    step with taps has shown that the model's inputs tell the number of samples; a loss
    of another number of samples is refused before anything is summed.

    Args:
        layers: The tapped layers: all that own trainable parameters.
        sink: Called in the backward pass with a forward pass and its gradients
            ``[*shape]`` by parameter name, without gradient tracking.
        handles: Of the layers' hooks, which have nothing to do while no layer is tapped.
    """

    def __init__(
        self, layers: Sequence[Layer], sink: WholeSink, handles: Sequence[Any] = ()
    ) -> None:
        self._layers = layers
        self._handles = handles
        self._sink = sink
        self._proven = False
        # Why batches of one sample are tapped like others; ``None`` if they are not.
        self.ruled_out: str | None = None
        # What stands for parameters now: (a module's parameters, the name, the parameter).
        self._replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._off: TakenOff = []

    @property
    def ready(self) -> bool:
        """Whether the next batch of one sample runs without taps."""
        return self._proven and self.ruled_out is None

    def rule_out(self, reason: str) -> None:
        """From now on tap batches of one sample like others."""
        self.ruled_out = self.ruled_out or reason

    def learn(self, passes: Collection[ForwardPass], samples: int) -> None:
        """A step of ``samples`` losses with taps has gone well, on these forward passes."""
        if self._proven or self.ruled_out or not samples or not passes:
            return
        if {one.batch for one in passes} == {samples}:
            self._proven = True
        else:
            self.rule_out("the model's inputs do not tell the number of samples")

    def takes(self, batch: int | None) -> bool:
        """Whether a batch of so many samples runs without taps."""
        return batch == 1 and self.ready

    def begin(self, forward_pass: ForwardPass) -> None:
        """The model's forward begins: put the aliases in the places of the parameters."""
        self.end()
        parameters: dict[str, nn.Parameter] = {}
        places = []
        for layer in self._layers:
            own = layer.module._parameters
            for local, owner in layer.owners.items():
                parameter = own.get(local)
                if parameter is not None and parameter.requires_grad:
                    parameters[owner] = parameter
                    places.append((own, local, owner, parameter))
        if not places:
            return
        use = WholeUse(forward_pass, tuple(parameters), self._sink)
        forward_pass.generation.waiting.add(use)
        aliases = dict(
            zip(parameters, _Aliases.apply(ANCHOR, use, list(parameters.values())), strict=True)
        )
        for own, local, owner, parameter in places:
            self._replaced.append((own, local, parameter))
            own[local] = aliases[owner]  # type: ignore[assignment]
        self._off = take_off(self._handles)

    def end(self) -> None:
        """The model's forward has ended or failed: the parameters are back in their places."""
        put_back(self._off)
        while self._replaced:
            own, local, parameter = self._replaced.pop()
            own[local] = parameter

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_replaced": [], "_off": []}


class WholeUse:
    """One forward pass on one sample, until its graph is gone."""

    __slots__ = ("__weakref__", "_names", "_sink", "forward_pass")

    def __init__(self, forward_pass: ForwardPass, names: tuple[str, ...], sink: WholeSink) -> None:
        self.forward_pass = forward_pass
        self._names = names
        self._sink = sink

    def deliver(self, grads: tuple[Tensor | None, ...]) -> None:
        """Hand on the gradients of one backward pass; what took no part has none."""
        generation = self.forward_pass.generation
        generation.waiting.discard(self)
        generation.begun = True
        pairs = zip(self._names, grads, strict=True)
        with torch.no_grad():
            self._sink(self.forward_pass, {n: g.detach() for n, g in pairs if g is not None})


class _Aliases(torch.autograd.Function):
    """Aliases of the parameters; see Note [Parameters through one node]."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, use: WholeUse, parameters: list[nn.Parameter]
    ) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.use.deliver(grads)
        return None, None, None


def only_whole(waiting: Collection[Any]) -> bool:
    """Whether all forward passes that wait for their backward run without taps."""
    return bool(waiting) and all(isinstance(use, WholeUse) for use in waiting)
