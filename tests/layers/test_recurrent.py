"""DPRNN, DPGRU and DPLSTM compute what torch's modules do, in every setting."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.layers.dp_rnn import (
    RNN_CELL_TYPES,
    DPGRUCell,
    DPLSTMCell,
    DPRNNBase,
    DPRNNCell,
    RNNLinear,
    apply_permutation,
)

D, H, B, T = 4, 5, 3, 6
LENGTHS = {"sorted": [6, 4, 1], "unsorted": [3, 6, 3]}
KINDS = {
    "rnn": (nn.RNN, DPRNN, {}),
    "rnn_relu": (nn.RNN, DPRNN, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, DPGRU, {}),
    "lstm": (nn.LSTM, DPLSTM, {}),
    "lstm_proj": (nn.LSTM, DPLSTM, {"proj_size": 2}),
}


def pair(kind: str, **options) -> tuple[nn.RNNBase, DPRNNBase]:
    """torch's module and ours with the same weights, in float64."""
    theirs, ours, extra = KINDS[kind]
    reference = theirs(D, H, **extra, **options).double()
    module = ours(D, H, **extra, **options).double()
    module.load_state_dict(reference.state_dict())
    return reference, module


def flat(outputs) -> list[Tensor]:
    if isinstance(outputs, PackedSequence):
        return [t for t in outputs if t is not None]
    if isinstance(outputs, tuple):
        return [tensor for part in outputs for tensor in flat(part)]
    return [outputs]


def results(module: nn.Module, x: Tensor, layout: str, batch_first: bool, state) -> list[Tensor]:
    """Outputs, final states, and gradients of a loss that weighs each entry differently."""
    given: Tensor | PackedSequence = x
    if layout in LENGTHS:
        given = pack_padded_sequence(
            x, torch.tensor(LENGTHS[layout]), batch_first, enforce_sorted=layout == "sorted"
        )
    outputs = flat(module(given, state))
    generator = torch.Generator().manual_seed(3)
    loss = sum(
        (t**2 * torch.rand(t.shape, dtype=t.dtype, generator=generator)).sum()
        for t in outputs
        if t.is_floating_point()
    )
    leaves = [x, *(p for _, p in sorted(module.named_parameters()))]
    if state is not None:
        leaves += flat(state)
    return outputs + list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("layout", ["batched", "unbatched", "sorted", "unsorted"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch(kind: str, layout: str) -> None:
    for layers, both, batch_first, bias, given in itertools.product((1, 2), *[(False, True)] * 4):
        options = {"num_layers": layers, "bidirectional": both, "batch_first": batch_first}
        reference, module = pair(kind, bias=bias, **options)
        size = (T, D) if layout == "unbatched" else (B, T, D) if batch_first else (T, B, D)
        x = torch.randn(size, dtype=torch.float64, requires_grad=True)
        rows = (layers * (1 + both),) if layout == "unbatched" else (layers * (1 + both), B)
        state = None
        if given:
            widths = [module.proj_size or H, H][: 1 + module.has_cell_state]
            parts = [torch.randn(*rows, w, dtype=torch.float64, requires_grad=True) for w in widths]
            state = tuple(parts) if module.has_cell_state else parts[0]
        want = results(reference, x, layout, batch_first, state)
        got = results(module, x, layout, batch_first, state)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_output_is_packed_like_the_input(kind: str) -> None:
    # Equal lengths may be sorted in either order; the input's own order must be kept.
    _, module = pair(kind)
    x = torch.randn(T, B, D, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor([3, 6, 3]), enforce_sorted=False)
    swapped = packed.sorted_indices[[0, 2, 1]]
    data = torch.cat([x[:3, swapped].flatten(0, 1), x[3:, 1]])
    packed = PackedSequence(data, packed.batch_sizes, swapped)
    output, _ = module(packed)
    alone, _ = module(x[:3, 2:])
    assert torch.equal(output.sorted_indices, swapped)
    rows = output.data[torch.tensor([1, 4, 7])]  # sample 2 comes second in the data
    torch.testing.assert_close(rows, alone[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batch(kind: str) -> None:
    _, module = pair(kind, num_layers=2, bidirectional=True)
    width = 2 * (module.proj_size or H)
    output, state = module(torch.randn(T, 0, D, dtype=torch.float64))
    assert output.shape == (T, 0, width)
    assert all(part.shape[:2] == (4, 0) for part in flat(state))
    output.sum().backward()
    assert all(not p.grad.any() for p in module.parameters())


def test_dropout_acts_between_layers_in_training_only() -> None:
    torch.manual_seed(1)
    module = DPLSTM(D, H, num_layers=2, dropout=0.5)
    x = torch.randn(T, B, D)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])
    certain = DPLSTM(D, H, num_layers=2, dropout=1.0)
    certain.load_state_dict(module.state_dict())
    first = DPLSTM(D, H, num_layers=1)
    first.load_state_dict({k: v for k, v in module.state_dict().items() if k.endswith("l0")})
    # The first layer runs as ever, the second on zeros.
    output, (hidden, _) = certain(x)
    torch.testing.assert_close(hidden[0], first(x)[1][0][0])
    torch.testing.assert_close(output[:, 0], output[:, 1])
    assert output.abs().max() > 0.01


def test_input_layers_run_once_and_recurrent_ones_each_step() -> None:
    module = DPGRU(D, H)
    seen: list[tuple[str, torch.Size]] = []
    for name, layer in module.l0.named_children():
        assert isinstance(layer, RNNLinear) and isinstance(layer, nn.Linear)
        layer.register_forward_hook(lambda _, args, out, name=name: seen.append((name, out.shape)))
    module(torch.randn(T, B, D))
    assert seen == [("ih", (B, T, 3 * H))] + [("hh", (B, 3 * H))] * T
    assert module.l0.ih.max_batch_len == module.l0.hh.max_batch_len == B


@pytest.mark.parametrize(
    ("theirs", "ours", "extra"),
    [
        (nn.RNNCell, DPRNNCell, {}),
        (nn.RNNCell, DPRNNCell, {"nonlinearity": "relu"}),
        (nn.GRUCell, DPGRUCell, {}),
        (nn.LSTMCell, DPLSTMCell, {}),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_cells_alone_equal_torch(theirs, ours, extra: dict, bias: bool) -> None:
    reference, cell = theirs(D, H, bias, **extra).double(), ours(D, H, bias, **extra).double()
    for name, value in reference.state_dict().items():
        kind, layer = name.split("_")
        getattr(getattr(cell, layer), kind).data.copy_(value)
    x = torch.randn(B, D, dtype=torch.float64)
    state = torch.randn(2, B + 2, H, dtype=torch.float64)
    given = tuple(state) if ours.has_cell_state else state[0]
    first = tuple(state[:, :B]) if ours.has_cell_state else state[0, :B]
    for got, want in (
        (cell(x), reference(x)),
        (cell(x, first), reference(x, first)),
        (cell(x, given, batch_size_t=B), reference(x, first)),
    ):
        for a, b in zip(flat(got), flat(want), strict=True):
            torch.testing.assert_close(a, b)


def test_base_class_by_mode_name() -> None:
    assert set(RNN_CELL_TYPES) == {"RNN_TANH", "RNN_RELU", "GRU", "LSTM"}
    for mode, (cell, defaults) in RNN_CELL_TYPES.items():
        module = DPRNNBase(mode, D, H, num_layers=2)
        assert all(type(c) is cell for c in module.cells) and len(module.cells) == 2
        assert module.cell_params == defaults
    assert DPRNNBase("RNN_RELU", D, H).l0.nonlinearity == "relu"


def test_layers_are_walked_with_their_directions() -> None:
    module = DPRNN(D, H, num_layers=2, bidirectional=True)
    walked = [(i, list(rest)) for i, rest in module.iterate_layers([1, 2, 3, 4], "abcd")]
    assert walked == [(0, [(0, (1, "a")), (1, (2, "b"))]), (1, [(0, (3, "c")), (1, (4, "d"))])]


def test_permutation() -> None:
    x = torch.arange(6).view(2, 3)
    assert apply_permutation(x, 1, None) is x
    assert apply_permutation(x, 1, torch.tensor([2, 0, 1])).tolist() == [[2, 0, 1], [5, 3, 4]]


def test_parameters_are_drawn_within_torchs_bound() -> None:
    weight = torch.cat([p.detach().flatten() for p in DPLSTM(64, 100).parameters()])
    assert 0.099 < weight.abs().max() <= 0.1
    assert abs(float(weight.std()) - 0.1 / 3**0.5) < 1e-3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_layers": 0}, "num_layers"),
        ({"dropout": 1.5}, "dropout"),
        ({"proj_size": -1}, "proj_size"),
        ({"proj_size": H}, "proj_size"),
    ],
)
def test_bad_sizes_are_named(options: dict, named: str) -> None:
    for kind in (DPRNN, DPGRU, DPLSTM):
        with pytest.raises(ValueError, match=named):
            kind(**{"input_size": D, "hidden_size": H, **options})


def test_other_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="projections"):
        DPGRU(D, H, proj_size=2)
    with pytest.raises(ValueError, match="nonlinearity"):
        DPRNN(D, H, nonlinearity="gelu")
    with pytest.raises(ValueError, match="mode"):
        DPRNNBase("ELMAN", D, H)
    module = DPLSTM(D, H)
    with pytest.raises(ValueError, match="4 features, got 7"):
        module(torch.randn(T, B, 7))
    with pytest.raises(ValueError, match="time step"):
        module(torch.randn(0, B, D))
    with pytest.raises(ValueError, match="dimensions"):
        module(torch.randn(1, T, B, D))
    with pytest.raises(TypeError, match="tuple"):
        module(torch.randn(T, B, D), torch.zeros(1, B, H))
    with pytest.raises(TypeError, match="one tensor"):
        DPGRU(D, H)(torch.randn(T, B, D), (torch.zeros(1, B, H), torch.zeros(1, B, H)))
    with pytest.raises(ValueError, match=r"c_0 must have shape \(1, 3, 5\)"):
        module(torch.randn(T, B, D), (torch.zeros(1, B, H), torch.zeros(1, 1, H)))
