"""Per-sample gradients of models with recurrent and attention layers, in every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from opacus.core.rules import RULES
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention, SequenceBias
from opacus.layers.linear import BatchFirstLinear
from opacus.layers.rnn_cells import RNNLinear
from tests.helpers.oracle import norms, per_sample_gradients, relative_error

B, T, D, H = 4, 5, 3, 4
RECURRENT = {
    "rnn": lambda **kw: DPRNN(D, H, **kw),
    "gru": lambda **kw: DPGRU(D, H, **kw),
    "lstm": lambda **kw: DPLSTM(D, H, **kw),
    "lstm_proj": lambda **kw: DPLSTM(D, 2 * H, proj_size=H, **kw),
}


class Recurrent(nn.Module):
    """Embedding, recurrent layers, head; the batch of token ids and lengths is ``[B, *]``."""

    def __init__(self, make: Callable[..., nn.Module], layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.tokens = nn.Embedding(7, D)
        options = {"num_layers": 2, "bidirectional": True, "batch_first": layout != "time"}
        self.recurrent = make(**options)
        self.head = nn.Linear(2 * H, 2)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, lengths = batch
        x = self.tokens(ids)
        if self.layout == "packed":
            lengths = lengths.cpu()
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, state = self.recurrent(packed)
        else:
            _, state = self.recurrent(x.transpose(0, 1) if self.layout == "time" else x)
        hidden = state[0] if isinstance(state, tuple) else state  # [L * directions, B, H]
        return self.head(torch.cat([hidden[-2], hidden[-1]], dim=-1))


class Attention(nn.Module):
    """Embedding, attention with every extra, head."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.attention = DPMultiheadAttention(
            8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=batch_first
        )
        self.head = nn.Linear(8, 2)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, lengths = batch
        x = self.tokens(ids)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        padding = torch.arange(T) >= lengths.unsqueeze(1)
        x, _ = self.attention(x, x, x, key_padding_mask=padding)
        return self.head(x.mean(1 if self.attention.batch_first else 0))


def sample_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch) ** 2).sum()


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 7, (size, T)), torch.tensor([3, 5, 1, 4])[:size]


def check_hooks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    want = per_sample_gradients(model, sample_loss, batch)
    private = GradSampleModule(model.double(), loss_reduction="sum")
    (private(batch) ** 2).sum().backward()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad_sample, want[name]) < 1e-9, name
    assert len({float(n) for n in norms(want)}) == len(batch[0])  # rows can be told apart


def check_norms(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    want = norms(per_sample_gradients(model, sample_loss, batch))
    private = GradSampleModuleFastGradientClipping(
        model.double(), loss_reduction="sum", max_grad_norm=1.0
    )
    (private(batch) ** 2).sum().backward()
    assert relative_error(private.get_norm_sample(), want) < 1e-9


@pytest.mark.parametrize("layout", ["batch", "time", "packed"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent(kind: str, layout: str) -> None:
    for check in (check_hooks, check_norms):
        check(Recurrent(RECURRENT[kind], layout), batch_of(B))


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention(batch_first: bool) -> None:
    for check in (check_hooks, check_norms):
        check(Attention(batch_first), batch_of(B))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "layer", [lambda **kw: DPLSTM(D, H, **kw), lambda **kw: SequenceBias(D, **kw)]
)
def test_layers_know_where_their_batch_is(layer, batch_first: bool) -> None:
    # The wrapper's own batch_first is about other layers.
    module = layer(batch_first=batch_first).double()
    x = torch.randn(B, T, D, dtype=torch.float64)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x if batch_first else x.transpose(0, 1))
        output = output[0] if isinstance(output, tuple) else output
        return (output**2).sum()

    want = per_sample_gradients(module, forward, x)
    for wrapper_says in (False, True):
        private = GradSampleModule(module, batch_first=wrapper_says, loss_reduction="sum")
        forward(private, x).backward()
        for name, parameter in module.named_parameters():
            assert relative_error(parameter.grad_sample, want[name]) < 1e-9
        private.to_standard_module()


@pytest.mark.parametrize("size", [1, B])
def test_packed_input_of_the_model_itself(size: int) -> None:
    module = DPGRU(D, H, batch_first=True).double()
    x, lengths = torch.randn(size, T, D, dtype=torch.float64), batch_of(size)[1]

    def pack(x: Tensor, lengths: Tensor) -> PackedSequence:
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(pack(*batch))[0].data ** 2).sum()

    want = per_sample_gradients(module, loss, (x, lengths))
    private = GradSampleModule(module, loss_reduction="sum")
    loss(private, (x, lengths)).backward()
    for name, parameter in module.named_parameters():
        assert relative_error(parameter.grad_sample, want[name]) < 1e-9


def test_empty_batch() -> None:
    model = Recurrent(RECURRENT["lstm"], "batch")
    private = GradSampleModule(model, loss_reduction="sum")
    private(batch_of(0)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad_sample.shape == (0, *parameter.shape)


def test_each_layer_has_a_rule_of_its_own() -> None:
    assert {BatchFirstLinear, RNNLinear, SequenceBias} <= RULES.keys()
    layers = {layer.spec.name for layer in GradSampleModule(DPLSTM(D, H))._recorder.layers}
    assert layers == {"l0.ih", "l0.hh"}
