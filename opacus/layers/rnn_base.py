"""Runs recurrent cells over layers, directions and time.

Note [Rows are samples]
    Linear layers are called batch first, row i being sample i of the batch in the
    order in which the caller gave it. Packed sequences are padded and put back into
    that order first; what the padding computes is discarded, so it gets no gradient.
    Rows in order of length, as the packed data has them, would mix up the gradients
    of samples whenever other layers see the batch in its own order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from opacus.layers.param_rename import RenameParamsMixin
from opacus.layers.rnn_cells import RNN_CELL_TYPES, DPRNNCellBase, State


def apply_permutation(tensor: Tensor, dim: int, permutation: Tensor | None) -> Tensor:
    """Reorder ``tensor`` along ``dim``; ``None`` leaves it as it is.

    Args:
        tensor: Any tensor.
        dim: The dimension to reorder.
        permutation: Integers, as many as ``tensor`` has entries along ``dim``.
    """
    return tensor if permutation is None else tensor.index_select(dim, permutation)


class DPRNNBase(RenameParamsMixin, nn.Module):
    """A recurrent network of any cell type, with the interface of torch's ones.

    Args:
        mode: A key of :data:`RNN_CELL_TYPES`, or a cell class.
        input_size: Number of input features D.
        hidden_size: Number of hidden features H.
        num_layers: Number L of layers stacked on one another.
        bias: Whether the linear layers have biases.
        batch_first: Whether inputs and outputs are ``[B, T, *]`` instead of ``[T, B, *]``.
        dropout: Probability of dropout between layers.
        bidirectional: Whether each layer also runs backwards in time.
        proj_size: For LSTMs: size P to which hidden states are projected; 0 for none.
        cell_params: Further arguments of the cells.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        mode: str | type[DPRNNCellBase],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        cell_params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.cell_type, defaults = _cell_type(mode)
        self.cell_params = {**defaults, **(cell_params or {})}
        self.has_cell_state = self.cell_type.has_cell_state
        _check_sizes(hidden_size, num_layers, dropout)
        _check_proj_size(proj_size, hidden_size, self.cell_type)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size = proj_size
        self.num_directions = 2 if bidirectional else 1
        self.dropout_layer = nn.Dropout(self.dropout) if dropout > 0 else None
        self.initialize_cells()

    def initialize_cells(self) -> list[DPRNNCellBase]:
        """Create the cells, named as in torch's state dicts, e.g. ``l0`` and ``l0_reverse``."""
        options = dict(self.cell_params)
        if self.proj_size:
            options["proj_size"] = self.proj_size
        inner = self.num_directions * (self.proj_size or self.hidden_size)
        self.cells = [
            self.cell_type(
                self.input_size if index < self.num_directions else inner,
                self.hidden_size,
                self.bias,
                **options,
            )
            for index in range(self.num_layers * self.num_directions)
        ]
        self.set_rename_map(
            {
                f"{name}.{layer}.{kind}": f"{kind}_{layer}_{name}"
                for name, cell in zip(self._cell_names(), self.cells, strict=True)
                for layer, linear in cell.named_children()
                for kind, _ in linear.named_parameters()
            }
        )
        return self.cells

    @property
    def cells(self) -> list[DPRNNCellBase]:
        """The cells: layer by layer, forward before reverse."""
        return [getattr(self, name) for name in self._cell_names()]

    @cells.setter
    def cells(self, cells: Sequence[DPRNNCellBase]) -> None:
        for name, cell in zip(self._cell_names(), cells, strict=True):
            setattr(self, name, cell)

    def forward(
        self,
        input: Tensor | PackedSequence,
        state_init: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor | tuple[Tensor, Tensor]]:
        """Run the network.

        Args:
            input: ``[T, B, D]`` (``[B, T, D]`` if ``batch_first``), ``[T, D]`` for one
                sample without a batch dimension, or a ``PackedSequence``. B may be 0.
            state_init: Initial hidden states ``[L * directions, B, H or P]``, for an LSTM
                with the cell states ``[L * directions, B, H]``, B left out where the
                input has none. Zeros if not given.

        Returns:
            The outputs of the last layer, laid out as ``input``, and the last states, laid
            out as ``state_init``.

        Raises:
            ValueError: A shape does not fit.
            TypeError: ``state_init`` is not what the kind of network takes.
            RuntimeError: Cells were sharded or changed apart from the whole network.
        """
        self._require_shared_parameters()
        packed = input if isinstance(input, PackedSequence) else None
        batched = isinstance(input, PackedSequence) or input.dim() == 3
        x, running = self._samples_first(input)
        states = self._initial_states(x, state_init, batched)
        x, finals = self._run(x, running, states)
        final = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
        if not batched:
            final = tuple(part.squeeze(1) for part in final)
        output = self._as_given(x, packed, batched)
        return output, (final[0], final[1]) if self.has_cell_state else final[0]

    def _run(
        self, x: Tensor, running: list[Tensor | None] | None, states: list[Tensor]
    ) -> tuple[Tensor, list[State]]:
        """All layers and directions: the last outputs, and the last state of each cell."""
        finals: list[State] = []
        batch, steps = x.shape[:2]
        for layer, directions in self.iterate_layers(self.cells, *states):
            outputs = []
            for direction, (cell, *initial) in directions:
                output, *last = self.forward_layer(
                    x,
                    initial[0],
                    initial[1] if self.has_cell_state else None,
                    running,
                    cell=cell,
                    max_batch_size=batch,
                    seq_length=steps,
                    is_packed=running is not None,
                    reverse_layer=direction == 1,
                )
                outputs.append(output)
                finals.append(tuple(part for part in last if part is not None))
            x = torch.cat(outputs, dim=-1)
            if self.dropout_layer is not None and layer < self.num_layers - 1:
                x = self.dropout_layer(x)
        return x, finals

    def forward_layer(
        self,
        x: Tensor,
        h_0: Tensor,
        c_0: Tensor | None,
        batch_sizes: Sequence[Tensor | None] | None,
        cell: DPRNNCellBase,
        max_batch_size: int,
        seq_length: int,
        is_packed: bool,
        reverse_layer: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run one direction of one layer; see Note [Rows are samples].

        Args:
            x: Inputs ``[B, T, *]``.
            h_0: Hidden state ``[B, H or P]`` to start from.
            c_0: Cell state ``[B, H]`` to start from, for cells that have one.
            batch_sizes: For padded sequences, for each time step which of the rows have
                an element there, bool ``[B, 1]``, or ``None`` where all have.
            cell: The cell to run.
            max_batch_size: B.
            seq_length: T.
            is_packed: Whether ``batch_sizes`` applies.
            reverse_layer: Whether to run backwards in time.

        Returns:
            The outputs ``[B, T, H or P]``, the last hidden and the last cell state.
        """
        cell.set_max_batch_length(max_batch_size)
        projected = cell.ih(x).unbind(dim=1)
        state: State = (h_0,) if c_0 is None else (h_0, c_0)
        outputs: list[Tensor] = []
        steps = range(seq_length)
        for t in reversed(steps) if reverse_layer else steps:
            after = cell.step(projected[t], state)
            rows = batch_sizes[t] if is_packed and batch_sizes is not None else None
            if rows is not None:
                pairs = zip(after, state, strict=True)
                after = tuple(torch.where(rows, new, old) for new, old in pairs)
            state = after
            outputs.append(state[0])
        if reverse_layer:
            outputs.reverse()
        return torch.stack(outputs, dim=1), state[0], state[1] if self.has_cell_state else None

    def iterate_layers(
        self, *args: Sequence[Any] | Tensor
    ) -> Iterator[tuple[int, Iterator[tuple[int, tuple[Any, ...]]]]]:
        """Walk through layers and directions, with the entries of sequences that belong there.

        Args:
            args: Sequences with one entry for each cell, as :attr:`cells` has.

        Yields:
            The index of a layer, and an iterator over its directions that gives the index
            of the direction and the tuple of its entries.
        """
        for layer in range(self.num_layers):
            first = layer * self.num_directions
            yield (
                layer,
                (
                    (direction, tuple(arg[first + direction] for arg in args))
                    for direction in range(self.num_directions)
                ),
            )

    def _cell_names(self) -> list[str]:
        suffixes = ("", "_reverse")[: self.num_directions]
        return [f"l{layer}{suffix}" for layer in range(self.num_layers) for suffix in suffixes]

    def _samples_first(
        self, input: Tensor | PackedSequence
    ) -> tuple[Tensor, list[Tensor | None] | None]:
        """``input`` as ``[B, T, D]``, and which rows have an element at each step."""
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input, batch_first=True)
            running = _rows_running(lengths, x)
        elif input.dim() == 2:
            x, running = input.unsqueeze(0), None
        elif input.dim() == 3:
            x, running = input if self.batch_first else input.transpose(0, 1), None
        else:
            raise ValueError(
                "input must have 2 dimensions [T, D] or 3, of which one is the batch, "
                f"got shape {tuple(input.shape)}"
            )
        if x.shape[2] != self.input_size:
            raise ValueError(f"input must have {self.input_size} features, got {x.shape[2]}")
        if x.shape[1] == 0:
            raise ValueError("input must have at least one time step, got none")
        return x, running

    def _initial_states(
        self, x: Tensor, given: Tensor | tuple[Tensor, Tensor] | None, batched: bool
    ) -> list[Tensor]:
        """The initial states, one ``[L * directions, B, *]`` tensor for each part."""
        cells = self.cells
        zeros = [part.expand(len(cells), *part.shape) for part in cells[0].initial_state(x)]
        if given is None:
            return zeros
        parts = [given] if isinstance(given, Tensor) else list(given)
        if isinstance(given, Tensor) == self.has_cell_state or len(parts) != len(zeros):
            expected = "a tuple (h_0, c_0)" if self.has_cell_state else "one tensor h_0"
            raise TypeError(f"state_init must be {expected}, got {type(given).__name__}")
        states = [part if batched else part.unsqueeze(1) for part in parts]
        for name, state, zero in zip(("h_0", "c_0"), states, zeros, strict=False):
            if state.shape != zero.shape:
                raise ValueError(
                    f"{name} must have shape {tuple(zero.shape)} (one row for each layer and "
                    f"direction, then the batch), got {tuple(state.shape)}"
                )
        return states

    def flatten_parameters(self) -> None:
        """For callers of ``nn.LSTM.flatten_parameters``; there is nothing to flatten."""

    def _as_given(
        self, x: Tensor, packed: PackedSequence | None, batched: bool
    ) -> Tensor | PackedSequence:
        """``x`` ``[B, T, *]`` laid out as the caller's input was."""
        if packed is not None:
            return _pack_like(packed, x)
        if not batched:
            return x.squeeze(0)
        return x if self.batch_first else x.transpose(0, 1)


def _cell_type(
    mode: str | type[DPRNNCellBase],
) -> tuple[type[DPRNNCellBase], dict[str, Any]]:
    if not isinstance(mode, str):
        return mode, {}
    if mode not in RNN_CELL_TYPES:
        raise ValueError(f"mode must be one of {list(RNN_CELL_TYPES)}, got {mode!r}")
    return RNN_CELL_TYPES[mode]


def _check_sizes(hidden_size: int, num_layers: int, dropout: float) -> None:
    if hidden_size <= 0 or num_layers <= 0:
        raise ValueError(
            "hidden_size and num_layers must be positive, got "
            f"hidden_size={hidden_size}, num_layers={num_layers}"
        )
    if isinstance(dropout, bool) or not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be a probability between 0 and 1, got {dropout}")


def _check_proj_size(proj_size: int, hidden_size: int, cell_type: type[DPRNNCellBase]) -> None:
    if not 0 <= proj_size < hidden_size:
        raise ValueError(
            f"proj_size must be at least 0 and smaller than hidden_size={hidden_size}, "
            f"got {proj_size}"
        )
    if proj_size and not cell_type.has_cell_state:
        raise ValueError(f"proj_size={proj_size}: only LSTMs have projections")


def _rows_running(lengths: Tensor, x: Tensor) -> list[Tensor | None]:
    """For each time step the rows of ``x`` ``[B, T, *]`` not yet at their end."""
    shortest = int(lengths.min())
    on_device = lengths.to(x.device).unsqueeze(1)
    return [None if t < shortest else on_device > t for t in range(x.shape[1])]


def _pack_like(packed: PackedSequence, x: Tensor) -> PackedSequence:
    """Pack ``x`` ``[B, T, *]``, samples in order, as ``packed`` is packed."""
    in_data_order = apply_permutation(x, 0, packed.sorted_indices)
    positions = torch.arange(x.shape[0], device=packed.batch_sizes.device)
    lengths = (packed.batch_sizes > positions.unsqueeze(1)).sum(dim=1)
    data = pack_padded_sequence(in_data_order, lengths, batch_first=True).data
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
