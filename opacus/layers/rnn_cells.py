"""One time step of a recurrent network, made of linear layers that can be tapped."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from opacus.layers.linear import RNNLinear

# What a cell carries from one step to the next: (h,) or, for an LSTM, (h, c).
State = tuple[Tensor, ...]


class DPRNNCellBase(nn.Module):
    """Base of the cells: an input-to-hidden and a hidden-to-hidden linear layer.

    Args:
        input_size: Number of input features D.
        hidden_size: Number of hidden features H.
        bias: Whether the linear layers have biases.
        num_chunks: Number of gates; the linear layers have ``num_chunks * H`` outputs.
        proj_size: Size P of the hidden state where it is projected; 0 leaves it at H.
    """

    has_cell_state: bool = False

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool, num_chunks: int, proj_size: int = 0
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias
        self.proj_size = proj_size
        self.ih = RNNLinear(input_size, num_chunks * hidden_size, bias)
        self.hh = RNNLinear(self.output_size, num_chunks * hidden_size, bias)
        if proj_size:
            self.hr = RNNLinear(hidden_size, proj_size, bias=False)
        self.reset_parameters()

    @property
    def output_size(self) -> int:
        """Number of features of the hidden state h."""
        return self.proj_size or self.hidden_size

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly between -1/sqrt(H) and 1/sqrt(H)."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def set_max_batch_length(self, max_batch_length: int) -> None:
        """Tell the linear layers how many samples the batch has."""
        for layer in self.children():
            if isinstance(layer, RNNLinear):
                layer.max_batch_len = max_batch_length

    def initial_state(self, like: Tensor) -> State:
        """Zeros for each row of ``like`` ``[B, *]``, in its dtype and on its device."""
        state = like.new_zeros(like.shape[0], self.output_size)
        return (state, like.new_zeros(like.shape[0], self.hidden_size))[: 1 + self.has_cell_state]

    def step(self, projected: Tensor, state: State) -> State:
        """One time step.

        Args:
            projected: ``[B, num_chunks * H]``, the output of ``self.ih``.
            state: The state before the step, a tuple of ``[B, *]`` tensors.

        Returns:
            The state after the step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step()")

    def _one_step(self, input: Tensor, hx: State | None, batch_size_t: int | None) -> State:
        state = self.initial_state(input) if hx is None else hx
        if batch_size_t is not None:
            state = tuple(part[:batch_size_t] for part in state)
        return self.step(self.ih(input), state)


class DPRNNCell(DPRNNCellBase):
    """An Elman cell, ``h' = nonlinearity(W_ih x + b_ih + W_hh h + b_hh)``.

    Args:
        input_size: Number of input features D.
        hidden_size: Number of hidden features H.
        bias: Whether the linear layers have biases.
        nonlinearity: ``"tanh"`` or ``"relu"``.

    Raises:
        ValueError: Unknown ``nonlinearity``.
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool, nonlinearity: str = "tanh"
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"nonlinearity must be 'tanh' or 'relu', got {nonlinearity!r}")
        super().__init__(input_size, hidden_size, bias, num_chunks=1)
        self.nonlinearity = nonlinearity

    def forward(
        self, input: Tensor, hx: Tensor | None = None, batch_size_t: int | None = None
    ) -> Tensor:
        """The next hidden state ``[B, H]``.

        Args:
            input: ``[B, D]``.
            hx: Hidden state ``[>= B, H]``; zeros if left out.
            batch_size_t: Number of rows of ``hx`` to use, the first ones.
        """
        return self._one_step(input, None if hx is None else (hx,), batch_size_t)[0]

    def step(self, projected: Tensor, state: State) -> State:
        """One time step, see :meth:`DPRNNCellBase.step`."""
        summed = projected + self.hh(state[0])
        return (torch.tanh(summed) if self.nonlinearity == "tanh" else torch.relu(summed),)


class DPGRUCell(DPRNNCellBase):
    """A gated recurrent unit cell (arXiv:1406.1078), as ``nn.GRUCell`` computes it.

    Args:
        input_size: Number of input features D.
        hidden_size: Number of hidden features H.
        bias: Whether the linear layers have biases.
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool) -> None:
        super().__init__(input_size, hidden_size, bias, num_chunks=3)

    def forward(
        self, input: Tensor, hx: Tensor | None = None, batch_size_t: int | None = None
    ) -> Tensor:
        """The next hidden state ``[B, H]``.

        Args:
            input: ``[B, D]``.
            hx: Hidden state ``[>= B, H]``; zeros if left out.
            batch_size_t: Number of rows of ``hx`` to use, the first ones.
        """
        return self._one_step(input, None if hx is None else (hx,), batch_size_t)[0]

    def step(self, projected: Tensor, state: State) -> State:
        """One time step, see :meth:`DPRNNCellBase.step`."""
        (hidden,) = state
        reset_x, update_x, new_x = projected.chunk(3, dim=-1)
        reset_h, update_h, new_h = self.hh(hidden).chunk(3, dim=-1)
        reset = torch.sigmoid(reset_x + reset_h)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + reset * new_h)
        return (new + update * (hidden - new),)


class DPLSTMCell(DPRNNCellBase):
    """A long short-term memory cell, as ``nn.LSTM`` computes it.

    Args:
        input_size: Number of input features D.
        hidden_size: Number of hidden features H.
        bias: Whether the linear layers have biases.
        proj_size: Size P to which the hidden state is projected (arXiv:1402.1128); 0
            for no projection.
    """

    has_cell_state = True

    def __init__(self, input_size: int, hidden_size: int, bias: bool, proj_size: int = 0) -> None:
        super().__init__(input_size, hidden_size, bias, num_chunks=4, proj_size=proj_size)

    def forward(
        self,
        input: Tensor,
        hx: tuple[Tensor, Tensor] | None = None,
        batch_size_t: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The next hidden state ``[B, P or H]`` and cell state ``[B, H]``.

        Args:
            input: ``[B, D]``.
            hx: Hidden and cell state of at least B rows; zeros if left out.
            batch_size_t: Number of rows of ``hx`` to use, the first ones.
        """
        hidden, cell = self._one_step(input, hx, batch_size_t)
        return hidden, cell

    def step(self, projected: Tensor, state: State) -> State:
        """One time step, see :meth:`DPRNNCellBase.step`."""
        hidden, cell = state
        gates = (projected + self.hh(hidden)).chunk(4, dim=-1)
        keep, write, read = (torch.sigmoid(gates[i]) for i in (1, 0, 3))
        cell = keep * cell + write * torch.tanh(gates[2])
        hidden = read * torch.tanh(cell)
        return (self.hr(hidden) if self.proj_size else hidden), cell


RNN_CELL_TYPES: dict[str, tuple[type[DPRNNCellBase], dict[str, Any]]] = {
    "RNN_TANH": (DPRNNCell, {"nonlinearity": "tanh"}),
    "RNN_RELU": (DPRNNCell, {"nonlinearity": "relu"}),
    "GRU": (DPGRUCell, {}),
    "LSTM": (DPLSTMCell, {}),
}
