"""Layers with inputs, as data for the tests that every rule has to pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.rules import LayerRule, rule_for
from opacus.core.rules.generic import Call, GenericRule
from opacus.core.rules.spec import LayerSpec, make_spec
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.layers.dp_rnn import RNNLinear
from tests.helpers import oracle


@dataclass(frozen=True)
class Case:
    """A layer and its inputs for B samples."""

    layer: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


def vectors(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def ids(rows: int, *shape: int) -> Callable[[int], Tensor]:
    """Few rows, so that they repeat within a sample."""
    return lambda batch: torch.randint(0, rows, (batch, *shape))


def frozen(layer: nn.Module, name: str) -> nn.Module:
    getattr(layer, name).requires_grad_(False)
    return layer


CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(5, 3), vectors(5)),
    "linear_tokens": Case(lambda: nn.Linear(5, 3), vectors(7, 5)),
    "linear_one_token": Case(lambda: nn.Linear(5, 3), vectors(1, 5)),
    "linear_grid": Case(lambda: nn.Linear(5, 3), vectors(3, 2, 5)),
    "linear_wide": Case(lambda: nn.Linear(33, 17), vectors(2, 33)),
    "linear_long": Case(lambda: nn.Linear(3, 2), vectors(65, 3)),
    "linear_one_feature": Case(lambda: nn.Linear(1, 1), vectors(4, 1)),
    "linear_no_bias": Case(lambda: nn.Linear(5, 3, bias=False), vectors(7, 5)),
    "linear_frozen_weight": Case(lambda: frozen(nn.Linear(5, 3), "weight"), vectors(7, 5)),
    "linear_frozen_bias": Case(lambda: frozen(nn.Linear(5, 3), "bias"), vectors(5)),
    "linear_attention_output": Case(
        lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(5, 3), vectors(7, 5)
    ),
    "linear_recurrent": Case(lambda: RNNLinear(5, 3), vectors(7, 5)),
    "sequence_bias": Case(lambda: SequenceBias(5, batch_first=True), vectors(4, 5)),
    "embedding": Case(lambda: nn.Embedding(4, 3), ids(4)),
    "embedding_tokens": Case(lambda: nn.Embedding(4, 3), ids(4, 9)),
    "embedding_grid": Case(lambda: nn.Embedding(4, 3), ids(4, 2, 3)),
    "embedding_padding": Case(lambda: nn.Embedding(4, 3, padding_idx=2), ids(4, 9)),
    "embedding_sparse": Case(lambda: nn.Embedding(4, 3, sparse=True), ids(4, 9)),
    "bag_mean": Case(lambda: nn.EmbeddingBag(4, 3), ids(4, 9)),
    "bag_sum": Case(lambda: nn.EmbeddingBag(4, 3, mode="sum"), ids(4, 9)),
    "bag_padding": Case(lambda: nn.EmbeddingBag(4, 3, padding_idx=1), ids(4, 9)),
    "layer_norm": Case(lambda: nn.LayerNorm(5), vectors(5)),
    "layer_norm_tokens": Case(lambda: nn.LayerNorm(5, eps=0.1), vectors(7, 5)),
    "layer_norm_grid": Case(lambda: nn.LayerNorm((2, 5)), vectors(3, 2, 5)),
    "layer_norm_no_bias": Case(lambda: nn.LayerNorm(5, bias=False), vectors(7, 5)),
    "layer_norm_frozen_weight": Case(lambda: frozen(nn.LayerNorm(5), "weight"), vectors(7, 5)),
    "rms_norm": Case(lambda: nn.RMSNorm(5), vectors(7, 5)),
    "rms_norm_eps": Case(lambda: nn.RMSNorm((2, 5), eps=0.1), vectors(3, 2, 5)),
    "group_norm": Case(lambda: nn.GroupNorm(2, 6, eps=0.1), vectors(6, 3, 4)),
    "group_norm_flat": Case(lambda: nn.GroupNorm(2, 6), vectors(6)),
    "group_norm_frozen_bias": Case(lambda: frozen(nn.GroupNorm(3, 6), "bias"), vectors(6, 5)),
    "instance_norm_1d": Case(lambda: nn.InstanceNorm1d(3, affine=True), vectors(3, 5)),
    "instance_norm_2d": Case(lambda: nn.InstanceNorm2d(3, eps=0.1, affine=True), vectors(3, 4, 5)),
    "instance_norm_3d": Case(lambda: nn.InstanceNorm3d(2, affine=True), vectors(2, 2, 3, 2)),
    "instance_norm_statistics": Case(
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), vectors(3, 5)
    ),
    "conv1d": Case(lambda: nn.Conv1d(4, 6, 3), vectors(4, 9)),
    "conv1d_strided": Case(
        lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), vectors(4, 12)
    ),
    "conv1d_same": Case(lambda: nn.Conv1d(2, 3, 4, padding="same", dilation=3), vectors(2, 11)),
    "conv1d_no_bias": Case(lambda: nn.Conv1d(2, 3, 1, bias=False), vectors(2, 5)),
    "conv2d": Case(lambda: nn.Conv2d(2, 4, 3, padding=1), vectors(2, 5, 6)),
    "conv2d_uneven": Case(
        lambda: nn.Conv2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), groups=2), vectors(4, 8, 9)
    ),
    "conv2d_remainder": Case(lambda: nn.Conv2d(2, 3, 3, stride=3), vectors(2, 8, 10)),
    "conv2d_depthwise": Case(lambda: nn.Conv2d(3, 6, 3, groups=3), vectors(3, 5, 5)),
    "conv2d_valid": Case(lambda: nn.Conv2d(2, 3, 2, padding="valid"), vectors(2, 4, 4)),
    "conv2d_reflect": Case(
        lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"), vectors(2, 5, 4)
    ),
    "conv2d_circular": Case(
        lambda: nn.Conv2d(2, 3, (2, 3), padding="same", padding_mode="circular"), vectors(2, 5, 4)
    ),
    "conv2d_replicate": Case(
        lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, padding_mode="replicate"), vectors(2, 5, 5)
    ),
    "conv2d_frozen_weight": Case(lambda: frozen(nn.Conv2d(2, 3, 3), "weight"), vectors(2, 5, 5)),
    "conv2d_large_image": Case(lambda: nn.Conv2d(1, 2, 3, padding=1), vectors(1, 12, 12)),
    "conv3d": Case(
        lambda: nn.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), padding=(1, 0, 1), groups=2),
        vectors(2, 4, 5, 3),
    ),
}


@dataclass(frozen=True)
class Observed:
    """What a rule is given for one call of a layer, and what it should answer."""

    rule: LayerRule
    spec: LayerSpec
    activations: Any
    backprops: Any
    want: dict[str, Tensor]
    layer: nn.Module  # which rules hold weakly


def observe(
    layer: nn.Module,
    inputs: Tensor,
    dtype: torch.dtype = torch.float64,
    *,
    scale: float = 1.0,
    generic: bool = False,
) -> Observed:
    """Call a layer in ``dtype``, with random backprops times ``scale``.

    The wanted gradients are the oracle's, in float64, from the rounded inputs.
    """
    layer = layer.to(dtype)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    with torch.no_grad():
        output = layer(inputs)
    backprops = (torch.randn(output.shape, dtype=torch.float64) * scale).to(dtype)
    want = oracle.per_sample_gradients(
        layer, lambda m, b: (m(b[0]) * b[1]).sum(), (inputs, backprops)
    )
    if not generic:
        spec = spec_of("net.layer", layer)
        return Observed(rule_for(layer), spec, (inputs,), backprops, want, layer)
    rule = GenericRule(layer)
    spec = make_spec("net.layer", layer, rule.options(layer))
    return Observed(rule, spec, call_of(layer, inputs), backprops, want, layer)


def spec_of(name: str, layer: nn.Module) -> LayerSpec:
    """The spec of a layer with the options that its own rule asks for."""
    return make_spec(name, layer, rule_for(layer).options(layer))


def call_of(layer: nn.Module, *args: Any, **kwargs: Any) -> Call:
    """A call of a module, as the recorder describes it."""
    parameters = {n: p.detach() for n, p in layer._parameters.items() if p is not None}
    buffers = {n: b for n, b in layer._buffers.items() if b is not None}
    return Call(args, kwargs, parameters, buffers)


def observe_case(name: str, batch: int, dtype: torch.dtype = torch.float64) -> Observed:
    case = CASES[name]
    return observe(case.layer(), case.inputs(batch), dtype)


def norm_sq(gradients: Tensor) -> Tensor:
    """``[B, ...] -> [B]`` in float64."""
    return gradients.double().flatten(1).square().sum(1)
