"""The border between users' sampler functions and the core's layer rules.

A sampler is Opacus' public form of a rule: ``sampler(layer, activations, backprops)``
returns ``{parameter: per-sample gradient}``. The core's rules are keyed by parameter
name and never see a parameter; here one is translated into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.rules import LayerRule, rule_for
from opacus.core.rules.generic import Call, GenericRule
from opacus.core.rules.spec import LayerSpec, layer_kind, make_spec

Sampler = Callable[[nn.Module, list[Tensor], Tensor], Mapping[nn.Parameter, Tensor]]


class SamplerRule(LayerRule):
    """Runs a user's grad sampler, and a norm sampler where there is one."""

    needs_parameters = True

    def __init__(self, module: nn.Module, grad: Sampler | None, norm: Sampler | None) -> None:
        self.module = module
        self.grad = grad
        self.norm = norm
        self.generic = GenericRule(module)
        self.measures = norm is not None

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        if self.grad is None:
            return self.generic.per_sample_grad(spec, activations, backprops)
        grads = self.grad(self.module, list(activations.args), backprops)
        return self._named(grads, backprops, whole=True)

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        if self.norm is None:
            return super().norm_sq(spec, activations, backprops)
        norms = self.norm(self.module, list(activations.args), backprops)
        norms = self._named(norms, backprops, whole=False)
        return {name: norm.square() for name, norm in norms.items()}

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        if self.grad is None:
            return self.generic.weighted_grad(spec, activations, backprops, factors)
        return super().weighted_grad(spec, activations, backprops, factors)

    def _named(
        self, values: Mapping[nn.Parameter, Tensor], backprops: Any, *, whole: bool
    ) -> dict[str, Tensor]:
        """What a sampler returned, by parameter name; ``whole``: gradients, else norms."""
        names = {id(p): n for n, p in self.module._parameters.items() if p is not None}
        unknown = [tuple(p.shape) for p in values if id(p) not in names]
        if unknown:
            raise ValueError(
                f"the sampler registered for {type(self.module).__name__} returned gradients of "
                f"parameters that the layer does not own (shapes {unknown})"
            )
        rows = len(backprops[0] if isinstance(backprops, tuple) else backprops)
        for parameter, value in values.items():
            shape = (rows, *parameter.shape) if whole else (rows,)
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"the sampler registered for {type(self.module).__name__} returned "
                    f"{tuple(value.shape)} for {names[id(parameter)]!r}: it must be {shape}, one "
                    f"{'gradient' if whole else 'norm'} for each row of backprops"
                )
        return {names[id(p)]: value for p, value in values.items()}


class FormedRule(LayerRule):
    """A rule without its shortcuts: norms are taken of the per-sample gradients."""

    def __init__(self, rule: LayerRule) -> None:
        self.rule = rule
        self.needs_parameters = rule.needs_parameters

    def options(self, module: nn.Module) -> dict[str, Any]:
        return self.rule.options(module)

    def by_rows(self, activations: Any, batch: int) -> bool:
        return self.rule.by_rows(activations, batch)

    def token_features(self, spec: LayerSpec) -> tuple[int, int] | None:
        return self.rule.token_features(spec)

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        return self.rule.per_sample_grad(spec, activations, backprops)


def sample_with_rule(
    layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients ``{parameter: [B, *shape]}`` of one layer by the core's rule.

    Args:
        layer: The layer.
        activations: Its inputs, batch first.
        backprops: Gradient of the summed losses with respect to its output.
    """
    rule = rule_for(layer)
    spec = make_spec("", layer, rule.options(layer))
    grads = rule.per_sample_grad(spec, _inputs(rule, layer, activations), backprops)
    return {getattr(layer, name): grad for name, grad in grads.items()}


def norm_with_rule(
    layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradient norms ``{parameter: [B]}`` of one layer by the core's rule.

    Args:
        layer: The layer.
        activations: Its inputs, batch first.
        backprops: Gradient of the summed losses with respect to its output.
    """
    rule = rule_for(layer)
    spec = make_spec("", layer, rule.options(layer))
    norms = rule.norm_sq(spec, _inputs(rule, layer, activations), backprops)
    return {getattr(layer, name): norm_sq.sqrt() for name, norm_sq in norms.items()}


def _inputs(rule: LayerRule, layer: nn.Module, activations: Sequence[Tensor]) -> Any:
    if not rule.needs_parameters:
        return tuple(activations)
    parameters = {n: p.detach() for n, p in layer._parameters.items() if p is not None}
    buffers = {n: b for n, b in layer._buffers.items() if b is not None}
    return Call(tuple(activations), {}, parameters, buffers)


def choose_rule(
    module: nn.Module,
    grad_samplers: Mapping[type[nn.Module], Sampler],
    norm_samplers: Mapping[type[nn.Module], Sampler],
    force_functorch: bool,
) -> LayerRule:
    """The rule of a module: a user's sampler, else the core's, else the generic one."""
    if force_functorch:
        return GenericRule(module)
    kind = layer_kind(module)
    grad, norm = grad_samplers.get(kind), norm_samplers.get(kind)
    users = [s for s in (grad, norm) if s not in (None, sample_with_rule, norm_with_rule)]
    if users:
        return SamplerRule(module, grad if grad in users else None, norm if norm in users else None)
    return rule_for(module)


def same_device(values: Sequence[Tensor]) -> list[Tensor]:
    """The values, all on the device of the first one."""
    return [value.to(values[0].device) for value in values] if values else []


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """``[B]`` norm of per-parameter norms ``[B]``."""
    return torch.stack(same_device(norms)).norm(2, dim=0)
