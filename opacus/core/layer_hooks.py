"""The two hooks of a tapped layer; see :mod:`opacus.core.recorder`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.core import compiled_tap
from opacus.core.lone_sample import is_alias
from opacus.core.tap import Use, differentiable
from opacus.core.torch_internals import number_of_backward, under_functorch

if TYPE_CHECKING:
    from opacus.core.recorder import Layer, Recorder


class LayerHooks:
    """The two hooks of one layer (an object, so that models can be copied and pickled).

    Both also run while ``torch.compile`` traces them: what they read then must be equal in
    equal layers, or each layer would get a graph of its own.
    """

    def __init__(self, recorder: Recorder, layer: Layer) -> None:
        self.recorder = recorder
        self.layer = layer
        # Parameters of the calls that are running, whose place detached ones have.
        self._swapped: list[dict[str, nn.Parameter]] = []
        self.key = compiled_tap.key_of(self)
        self.mark = compiled_tap.new_mark()  # see compiled_tap.tap

    def before(self, module: nn.Module, args: Any) -> None:
        """Put detached parameters in the places of the trainable ones."""
        recorder = self.recorder
        if not (recorder.detach and recorder.active(module)):
            return
        parameters = self.layer.module._parameters
        kept: dict[str, nn.Parameter] = {}
        for name in self.layer.spec.params:
            parameter = parameters.get(name)
            if parameter is not None and parameter.requires_grad and not is_alias(parameter):
                kept[name] = parameter
        self._swapped.append(kept)
        for name, parameter in kept.items():
            parameters[name] = parameter.detach()  # type: ignore[assignment]

    def put_back(self) -> None:
        """The parameters are in their places again, after calls that were interrupted."""
        while self._swapped:
            self.layer.module._parameters.update(self._swapped.pop())

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Put the parameters back, and tap the output."""
        spec = None
        if self._swapped:
            kept = self._swapped.pop()
            self.layer.module._parameters.update(kept)
            if len(kept) == len(self.layer.spec.params):
                spec = self.layer.spec  # all of them are trainable
        if output is None or not self.recorder.active(module):
            self._note_rows(output)
            return None
        compiling = torch.compiler.is_compiling() and self.recorder.taps_in_graphs
        if compiling and _is_plain(args, kwargs, output):
            names = self._trainable_names()
            return compiled_tap.tap(output, args[0], self, names) if names else None
        try:
            tapped = self.recorder.tap(self.layer, args, kwargs, output, spec)
        except RuntimeError as error:
            if not under_functorch():
                raise
            raise RuntimeError(
                f"{self.layer.spec} belongs to a private model, which records its layers in "
                "training, and not under torch.func (vmap, grad, ...): call disable_hooks() or "
                "eval() on the wrapper first, or use the model of to_standard_module()"
            ) from error
        if self.recorder.indices.follows:
            self.recorder.check_rows(self.layer, (args, kwargs), tapped)
        return tapped

    def _trainable_names(self) -> tuple[str, ...]:
        """As ``Layer.trainable_now``, but equal in equal layers."""
        parameters: list[str] = []
        for name in self.layer.spec.params:
            parameter = self.layer.module._parameters.get(name)
            if parameter is not None and parameter.requires_grad:
                parameters.append(name)
        return tuple(parameters)

    def begin_compiled(self, output: Tensor, names: tuple[str, ...]) -> Use:
        """The layer, with these trainable parameters, has run in a compiled graph.

        Raises:
            RuntimeError: In a checkpoint's recomputation, where the samples are not known.
            ValueError: The output is one row for all samples.
        """
        recorder, layer = self.recorder, self.layer
        spec = layer.part(names)
        if recorder.in_backward or number_of_backward() >= 0:
            raise RuntimeError(
                f"{spec} is computed again by an activation checkpoint, in a compiled graph: its "
                f"samples cannot be told then. Compile parts without checkpoints, or set "
                f"{compiled_tap.ADVICE}"
            )
        forward_pass = recorder.forward_pass()
        batch, dims = forward_pass.batch, output.dim()
        rows_first = dims > 1 and recorder.batch_dim(layer, dims) == 0
        if rows_first and output.shape[0] == 1 and batch not in (None, 1):
            raise ValueError(
                f"{spec} runs once for all {batch} samples, in a compiled graph: give it a row "
                f"for each sample (expand its input), freeze it, or set {compiled_tap.ADVICE}"
            )
        use = Use(recorder, layer, spec, forward_pass, None, None)
        use.register(output.shape, counted=True)
        return use

    def _note_rows(self, output: Any) -> None:
        """Of a layer that ran without a tap, in the forward pass of a lone sample."""
        recorder, forward_pass = self.recorder, self.recorder._current
        if forward_pass is None or not recorder.bare or not self.layer.trainable_now().params:
            return
        first = next((t for t in tree_leaves(output) if differentiable(t)), None)
        if first is not None and first.dim():
            dim = 0 if first.dim() < 2 else recorder.batch_dim(self.layer, first.dim())
            rows, name = forward_pass.rows, self.layer.spec.name
            rows[name] = max(rows.get(name, 0), first.shape[dim])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_swapped": [], "key": None, "mark": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.key = compiled_tap.key_of(self)  # of the copy, not of what it was copied from
        self.mark = compiled_tap.new_mark()


def _is_plain(args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a layer turned one tensor of numbers into another one, as most do."""
    return (
        len(args) == 1
        and not kwargs
        and type(args[0]) is Tensor
        and type(output) is Tensor
        and args[0].is_floating_point()
        and output.is_floating_point()
    )
