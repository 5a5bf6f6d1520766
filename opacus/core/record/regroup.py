"""Records whose rows are not the units become records whose row u holds all rows of unit u."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from opacus.core.platform.attributes import Attributes
from opacus.core.platform.sharded import is_dtensor
from opacus.core.record.layers import Layer
from opacus.core.record.record import Record, Use, prepared
from opacus.core.rules.base import unsupported
from opacus.core.rules.by_unit import gradients_by_unit
from opacus.core.rules.generic import Call
from opacus.core.rules.spec import LayerSpec
from opacus.core.rules.units import Units

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def regrouped(
    layer: Layer,
    spec: LayerSpec,
    units: Units,
    rebuild: Callable[[list[Tensor]], Arguments],
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor],
    before: tuple[Mapping[str, Tensor] | None, Attributes | None] = (None, None),
) -> tuple[Layer, LayerSpec, Any, Any]:
    """Layer, spec, activations and backprops of a record in which row u is unit u.

    Args:
        layer: The layer.
        spec: Of the parameters that count.
        units: Of its output.
        rebuild: Puts tensors in the places of those among the layer's arguments.
        tensors: Its inputs, detached.
        grads: Gradients with respect to its outputs.
        before: Buffers and attributes that it has started from, where they may be others now.

    Raises:
        ValueError: Names the layer; see :meth:`LayerRule.regroup`.
    """
    dim, units = units.in_front()
    backprops = [_in_front(g.detach(), dim) for g in grads]
    inputs = [_in_front(t, dim) for t in tensors]
    first = backprops[0]
    rule, outputs = layer.rule, first if len(backprops) == 1 else tuple(backprops)
    if rule.needs_parameters:
        activations: Any = Call.of(layer.module, *rebuild(inputs), dim, spec.params, *before)
    elif rule.as_given:
        activations = tuple(inputs)
    else:
        activations = tuple([prepared(t, first.dtype, first.shape[0]) for t in inputs])
    if units.dim and rule.as_given:
        raise unsupported(spec, activations, outputs, "its samples are not in the first dimension")
    if units.dim is not None:
        return layer, spec, activations, outputs
    if not rule.norm_is_local and any(is_dtensor(t) for t in (*inputs, *backprops)):
        reason = "its rows are not the samples, which tensor parallelism does not support"
        raise unsupported(spec, activations, outputs, reason)
    use = None
    if not rule.needs_parameters and isinstance(outputs, Tensor):
        use = rule.regroup(spec, activations, outputs, units)
    if use is not None:
        return layer, spec, *use
    formed = gradients_by_unit(rule, spec, activations, outputs, units)
    return *layer.by_unit(spec), *formed


def record_by_unit(
    use: Use,
    units: Units,
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    borrowed: bool,
) -> Record:
    """The record of a use of a layer whose rows are not the units; see :func:`regrouped`.

    Args:
        use: Of the layer.
        units: Of its output.
        tensors: Its inputs.
        grads: Gradients with respect to its outputs.
        borrowed: See :class:`Record`.
    """
    forward_pass, name = use.forward_pass, use.spec.name
    named = forward_pass.named
    of_tokens = named is not None and named.by_token  # a mean over units, not over rows
    inputs = [t.detach() for t in tensors]
    layer, spec, activations, backprops = regrouped(
        use.layer, use.spec, units, use.rebuild, inputs, grads, use.before
    )
    return Record(
        layer=layer,
        spec=spec,
        activations=activations,
        backprops=backprops,
        rows=units.count,
        averaged=None if of_tokens else forward_pass.batch,
        reused=forward_pass.generation.uses.get(name, 0) > 1,
        generation=forward_pass.generation,
        forward_pass=forward_pass,
        borrowed=borrowed,
    )


def _in_front(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0) if 0 < dim < tensor.dim() else tensor
