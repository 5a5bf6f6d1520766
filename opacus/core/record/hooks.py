"""The two hooks of a tapped layer; see :mod:`opacus.core.record.recorder`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.core.platform.attributes import Attributes
from opacus.core.platform.torch_internals import number_of_backward, under_functorch
from opacus.core.record import compiled as compiled_tap
from opacus.core.record.carriers import Carriers, carries, carry
from opacus.core.record.layers import Layer, is_alias
from opacus.core.record.readers import buffered
from opacus.core.record.record import ANCHOR, Tap, Use, differentiable, rows_of
from opacus.core.record.shared import tap_shared
from opacus.core.record.taps import Taps

# A path to a part of a layer, a name in it, and the parameter whose place a detached one has.
Swapped = tuple[str, str, nn.Parameter]


class LayerHooks:
    """The two hooks of one layer (an object, so that models can be copied and pickled).

    Both also run while ``torch.compile`` traces them: what they read then must be equal in
    equal layers, or each layer would get a graph of its own.
    """

    def __init__(self, recorder: Taps, layer: Layer) -> None:
        self.recorder = recorder
        self.layer = layer
        # Of each parameter: the path to the part of the layer that holds it, and its name there.
        splits = [name.rpartition(".") for name in layer.spec.params]
        self._places = tuple((path, local) for path, _, local in splits)
        # Parameters of the calls that are running, whose place detached ones have.
        self._swapped: list[list[Swapped]] = []
        # Parts whose buffers a rule that runs the layer again has to start from.
        self._stateful = buffered(layer.module) if layer.rule.needs_parameters else ()
        self.key = compiled_tap.key_of(self)
        self.mark = compiled_tap.new_mark()  # see compiled_tap.tap
        self.carriers: Carriers | None = None  # where its gradients go, instead of a record

    def before(self, module: nn.Module, args: Any) -> None:
        """Put detached parameters in the places of the trainable ones."""
        if not self.recorder.active(module):
            return
        self._swapped.append(self._detach(module))
        if self.layer.rule.needs_parameters and not torch.compiler.is_compiling():
            self.layer.attributes_before = Attributes(module)
        if self._stateful:
            self.layer.buffers_before = {
                f"{path}.{name}" if path else name: buffer.clone()
                for path in self._stateful
                for name, buffer in module.get_submodule(path)._buffers.items()
                if buffer is not None
            }

    def _detach(self, module: nn.Module) -> list[Swapped]:
        """Put detached tensors in the places of the trainable parameters; returns those."""
        swapped: list[Swapped] = []
        for path, local in self._places:
            held = module.get_submodule(path)._parameters if path else module._parameters
            parameter = held.get(local)
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.is_leaf or not is_alias(parameter):
                swapped.append((path, local, parameter))
                held[local] = parameter.detach()  # type: ignore[assignment]
        return swapped

    def put_back(self) -> None:
        """The parameters are in their places again, after calls that were interrupted."""
        while self._swapped:
            _put_back(self.layer.module, self._swapped.pop())

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Put the parameters back, and tap the output."""
        spec = None
        if self._swapped:
            swapped = self._swapped.pop()
            _put_back(module, swapped)
            if len(swapped) == len(self.layer.spec.params) and not self.layer.unheld:
                spec = self.layer.spec  # all of them are trainable
        carriers = self.carriers
        if carriers is not None and spec is not None and carries(carriers, args, kwargs, output):
            return carry(self, carriers, args[0], output)
        if output is None or not self.recorder.active(module):
            self._note_rows(output)
            return None
        compiling = torch.compiler.is_compiling() and self.recorder.taps_in_graphs
        if compiling and _is_plain(args, kwargs, output):
            names = self.layer.trained_names() if spec is None else spec.params
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
        if self.recorder.whose.indices.follows:
            self._check_rows((args, kwargs), tapped)
        return tapped

    def before_reader(self, module: nn.Module, args: Any) -> None:
        """The module that reads the layer's parameter runs; see :data:`READ`."""
        part = self.layer.module
        if not (self.recorder.active(module) and self.layer.trained_names()):
            return
        alias = self._read()
        self._swapped.append(self._detach(part))
        for _, local, _ in self._swapped[-1]:
            part._parameters[local] = alias  # type: ignore[assignment]

    def after_reader(self, module: nn.Module, args: Any, output: Any) -> None:
        """It has run."""
        if self._swapped:
            _put_back(self.layer.module, self._swapped.pop())

    def counts_rows_first(self) -> bool:
        """Whether dimension 0 of the layer's inputs and outputs counts samples."""
        return all(self.recorder.batch_dim(self.layer, dims) == 0 for dims in (2, 3))

    def _read(self) -> Tensor:
        """The layer's parameter, as the module that reads it gets it; see :data:`READ`.

        Raises:
            RuntimeError: Whose rows it meets cannot be followed.
        """
        taps, layer = self.recorder, self.layer
        spec = layer.trainable_now()
        (parameter,) = layer.parameters(spec.params)
        assert parameter is not None
        value, forward_pass = parameter.detach(), taps.forward_pass()
        use, scope = Use(taps, layer, spec, forward_pass, 0), taps.whose.scope
        if forward_pass.made_up or forward_pass.batch == 1:
            use.register(torch.Size((1, *value.shape)), counted=True)
            return Tap.apply(ANCHOR, use, 1, value[None])[0][0]
        if scope is None:
            raise RuntimeError(
                f"the parameters of {spec} are read without a row for each sample, in a model that "
                "is compiled, computed again by a checkpoint, or whose inputs do not tell the "
                "number of samples: there this cannot be followed. Freeze the layer (adapters in "
                "other layers, such as LoRA, can be trained)"
            )
        return tap_shared(use, value, [], scope)

    def _check_rows(self, inputs: Any, tapped: Any) -> None:
        """Refuse the layer if its rows are found not to be samples."""
        taps, first = self.recorder, tree_leaves(tapped)[0]
        if taps.batch_dim(self.layer, first.dim()) == 0:
            taps.whose.indices.ran(self.layer.spec, inputs, first)

    def _note_rows(self, output: Any) -> None:
        """The layer ran without a tap; in the forward pass of a lone sample its rows count."""
        taps, layer = self.recorder, self.layer
        hidden = taps.enabled and layer.module.training and not (taps.in_backward or taps.lone_runs)
        if hidden and not torch.is_grad_enabled():
            dims = next((t.dim() for t in tree_leaves(output) if differentiable(t)), 0)
            taps.whose.note_hidden(layer, output, taps.batch_dim(layer, dims))
        current = taps.passes.current
        if current is None or not taps.lone_runs or not layer.trainable_now().params:
            return
        first = next((t for t in tree_leaves(output) if differentiable(t)), None)
        if first is not None and first.dim():
            dim = taps.batch_dim(layer, first.dim())
            name, rows = layer.spec.name, rows_of(first.shape, dim)
            current.rows[name] = max(current.rows.get(name, 0), rows)

    def begin_compiled(self, output: Tensor, names: tuple[str, ...]) -> Use:
        """The layer, with these trainable parameters, has run in a compiled graph.

        Raises:
            RuntimeError: A checkpoint runs it again, and for which call is not known.
            ValueError: The output is one row for all samples.
        """
        taps, layer, spec = self.recorder, self.layer, self.layer.part(names)
        recomputed = number_of_backward() >= 0
        forward_pass = taps.reached.now(spec) if recomputed else taps.forward_pass()
        batch, dims = forward_pass.batch, output.dim()
        dim = taps.batch_dim(layer, dims)
        rows_first = dims > 1 and dim == 0
        if rows_first and output.shape[0] == 1 and batch not in (None, 0, 1):
            raise ValueError(
                f"{spec} runs once for all {batch} samples, in a compiled graph: give it a row "
                f"for each sample (expand its input), freeze it, or set {compiled_tap.ADVICE}"
            )
        taps.attention.in_graphs = True
        use = Use(taps, layer, spec, forward_pass, dim)
        taps.whose.place_compiled(use, output, recomputed=recomputed)
        if recomputed:
            if taps.carried is not None:
                taps.carried.check_again(spec, forward_pass)
            forward_pass.generation.recomputed.add(spec.name)
            if taps.lone is not None and not taps.lone.again_in_graphs:
                taps.lone.rule_out("a checkpoint runs compiled parts again")
        elif forward_pass is taps.passes.current:
            taps.reached.note(forward_pass)
        use.register(output.shape, counted=not recomputed)
        return use

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_swapped": [], "carriers": None, "key": None, "mark": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.key = compiled_tap.key_of(self)  # of the copy, not of what it was copied from
        self.mark = compiled_tap.new_mark()


def _put_back(module: nn.Module, swapped: list[Swapped]) -> None:
    for path, local, parameter in swapped:
        held = module.get_submodule(path) if path else module
        held._parameters[local] = parameter


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
