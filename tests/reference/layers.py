"""Scenarios: per-sample gradients and ghost norms of one layer of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._pytree import tree_leaves

import opacus.layers as dp
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

B, T = 4, 5


@dataclass(frozen=True)
class LayerCase:
    """A layer and its inputs.

    Attributes:
        build: Makes the layer; its weights are drawn anew afterwards.
        inputs: Makes the positional arguments.
        batch_first: Where the batch is in inputs and outputs.
        modes: What to compare; embeddings cannot be run under vmap.
        wrong: Why the gradients of Opacus 1.6.0 are not those of autograd, if so.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    batch_first: bool = True
    modes: tuple[str, ...] = ("hooks", "functorch", "ghost")
    wrong: str = ""


class Attention(nn.Module):
    """Self-attention with one input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = dp.DPMultiheadAttention(6, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Packed(nn.Module):
    """A recurrent layer on sequences of different lengths."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(T, T - B, -1)
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        output = self.layer(packed)[0]
        assert isinstance(output, PackedSequence)
        return nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0]


class Custom(nn.Module):
    """A layer that no rule is written for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.shift = nn.Parameter(torch.empty(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale) + self.shift


def numbers(*shape: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(*shape, dtype=torch.float64),)


def indices(limit: int, *shape: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randint(0, limit, shape),)


def bags() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 9, (11,)), torch.tensor([0, 3, 4, 8])


LAST_BAG = "the last bag has no gradient"
RULES_ONLY = ("hooks", "ghost")
LAYERS: dict[str, LayerCase] = {
    "linear": LayerCase(partial(nn.Linear, 6, 3), numbers(B, 6)),
    "linear_no_bias": LayerCase(partial(nn.Linear, 6, 3, bias=False), numbers(B, 6)),
    "linear_3d": LayerCase(partial(nn.Linear, 6, 3), numbers(B, T, 6)),
    "linear_3d_time_major": LayerCase(partial(nn.Linear, 6, 3), numbers(T, B, 6), False),
    "linear_4d": LayerCase(
        partial(nn.Linear, 6, 3),
        numbers(B, T, 2, 6),
        modes=("hooks", "functorch"),  # Opacus has no ghost norms of 4-D inputs
    ),
    "embedding": LayerCase(partial(nn.Embedding, 9, 4), indices(9, B, T), modes=RULES_ONLY),
    "embedding_1d": LayerCase(partial(nn.Embedding, 9, 4), indices(9, B), modes=RULES_ONLY),
    "embedding_3d": LayerCase(partial(nn.Embedding, 9, 4), indices(9, B, T, 2), modes=RULES_ONLY),
    "embedding_padding": LayerCase(
        partial(nn.Embedding, 9, 4, padding_idx=2),
        indices(9, B, T),
        modes=RULES_ONLY,
        wrong="the padding row, which is never trained, has a gradient",
    ),
    "bag_sum": LayerCase(
        partial(nn.EmbeddingBag, 9, 4, mode="sum"), bags, modes=RULES_ONLY, wrong=LAST_BAG
    ),
    "bag_mean": LayerCase(
        partial(nn.EmbeddingBag, 9, 4, mode="mean"), bags, modes=RULES_ONLY, wrong=LAST_BAG
    ),
    "layer_norm": LayerCase(partial(nn.LayerNorm, 6), numbers(B, T, 6)),
    "layer_norm_2_dims": LayerCase(partial(nn.LayerNorm, [T, 6]), numbers(B, T, 6)),
    "group_norm": LayerCase(partial(nn.GroupNorm, 2, 6), numbers(B, 6, T)),
    "group_norm_images": LayerCase(partial(nn.GroupNorm, 3, 6), numbers(B, 6, 4, 3)),
    "instance_norm_1d": LayerCase(partial(nn.InstanceNorm1d, 3, affine=True), numbers(B, 3, T)),
    "instance_norm_2d": LayerCase(partial(nn.InstanceNorm2d, 3, affine=True), numbers(B, 3, T, 4)),
    "instance_norm_3d": LayerCase(
        partial(nn.InstanceNorm3d, 3, affine=True), numbers(B, 3, T, 4, 2)
    ),
    "rms_norm": LayerCase(partial(nn.RMSNorm, 6), numbers(B, T, 6)),
    "sequence_bias": LayerCase(
        partial(dp.SequenceBias, 6, batch_first=True), numbers(B, T, 6), modes=RULES_ONLY
    ),
    "sequence_bias_time_major": LayerCase(
        partial(dp.SequenceBias, 6, batch_first=False), numbers(T, B, 6), False, RULES_ONLY
    ),
    "attention": LayerCase(
        partial(Attention, batch_first=True),
        numbers(B, T, 6),
        wrong="heads and time steps are interleaved, and time steps taken for samples",
    ),
    "attention_time_major": LayerCase(Attention, numbers(T, B, 6), False),
    "attention_biases": LayerCase(
        partial(Attention, add_bias_kv=True, add_zero_attn=True),
        numbers(T, B, 6),
        False,
        ("hooks",),
    ),
    "custom": LayerCase(Custom, numbers(B, T, 6)),
}
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": 2},
    "padding": {"padding": 1, "bias": False},
    "same": {"padding": "same", "dilation": 2},
    "dilation": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2, "stride": 2, "padding": 1},
    "depthwise": {"groups": 4},
}
IMAGES = {1: (nn.Conv1d, (9,)), 2: (nn.Conv2d, (9, 8)), 3: (nn.Conv3d, (7, 6, 6))}
for number, (convolution, size) in IMAGES.items():
    for option_name, options in CONVOLUTIONS.items():
        LAYERS[f"conv{number}d_{option_name}"] = LayerCase(
            partial(convolution, 4, 8, 3, **options), numbers(B, 4, *size)
        )
for cell in (dp.DPRNN, dp.DPGRU, dp.DPLSTM):
    for option_name, options in {
        "plain": {},
        "no_bias": {"bias": False},
        "two_layers": {"num_layers": 2},
        "both_ways": {"bidirectional": True, "num_layers": 2},
    }.items():
        make = partial(cell, 6, 3, batch_first=True, **options)
        LAYERS[f"{cell.__name__}_{option_name}"] = LayerCase(make, numbers(B, T, 6))
    LAYERS[f"{cell.__name__}_time_major"] = LayerCase(
        partial(cell, 6, 3, batch_first=False), numbers(T, B, 6), False
    )
    LAYERS[f"{cell.__name__}_packed"] = LayerCase(
        lambda cell=cell: Packed(cell(6, 3, batch_first=True)), numbers(B, T, 6)
    )
CASES = [(name, mode) for name, case in LAYERS.items() for mode in case.modes]


def redraw(module: nn.Module) -> nn.Module:
    """Weights that do not depend on how the layer draws its own."""
    torch.manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.5)
    return module


def forward(name: str, wrap: Callable[[nn.Module], Any]) -> tuple[Any, nn.Module, Tensor, Tensor]:
    """The wrapped layer, the layer, its output, and weights that make a loss of the output."""
    case = LAYERS[name]
    torch.manual_seed(0)
    inputs = case.inputs()
    layer = redraw(case.build().double())
    module = wrap(layer)
    output = tree_leaves(module(*inputs))[0]
    torch.manual_seed(2)
    return module, layer, output, torch.randn(output.shape, dtype=torch.float64)


def run(name: str, mode: str) -> dict[str, Any]:
    """Per-sample gradients of each parameter, or its norms and those of the whole."""
    wrapper: Any = GradSampleModuleFastGradientClipping if mode == "ghost" else GradSampleModule
    options = {"force_functorch": True} if mode == "functorch" else {}
    wrap = partial(wrapper, batch_first=LAYERS[name].batch_first, **options)
    module, layer, output, weights = forward(name, wrap)
    (output * weights).sum().div(B).backward()
    named = dict(layer.named_parameters())
    if mode != "ghost":
        return {key: p.grad_sample.detach() for key, p in named.items()}
    whole = module.get_norm_sample().detach()
    return {key: p._norm_sample.detach() for key, p in named.items()} | {"whole": whole}


def right(name: str, mode: str) -> dict[str, Tensor]:
    """The same by plain autograd, one sample at a time."""
    _, layer, output, weights = forward(name, lambda layer: layer)
    named = dict(layer.named_parameters())
    losses = (output * weights).movedim(0 if LAYERS[name].batch_first else 1, 0)
    rows = [
        torch.autograd.grad(loss.sum(), list(named.values()), retain_graph=True) for loss in losses
    ]
    grads = {
        key: torch.stack(column) for key, column in zip(named, zip(*rows, strict=True), strict=True)
    }
    if mode != "ghost":
        return grads
    norms = {key: grad.flatten(1).norm(dim=1) for key, grad in grads.items()}
    return norms | {"whole": torch.stack(list(norms.values())).norm(dim=0)}


RUNS = {f"{name}-{mode}": partial(run, name, mode) for name, mode in CASES}
