"""Recurrent networks with the interface of ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM``.

They are made of linear layers, for which per-sample gradients are known, and take
and give the state dicts of torch's modules.
"""

from __future__ import annotations

from opacus.layers.linear import RNNLinear
from opacus.layers.rnn_base import DPRNNBase, apply_permutation
from opacus.layers.rnn_cells import (
    RNN_CELL_TYPES,
    DPGRUCell,
    DPLSTMCell,
    DPRNNCell,
    DPRNNCellBase,
)

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "RNN_CELL_TYPES",
    "DPGRUCell",
    "DPLSTMCell",
    "DPRNNBase",
    "DPRNNCell",
    "DPRNNCellBase",
    "RNNLinear",
    "apply_permutation",
]


class DPRNN(DPRNNBase):
    """``nn.RNN`` for differentially private training.

    Args:
        input_size: Number of input features D.
        hidden_size: Number of hidden features H.
        num_layers: Number of layers stacked on one another.
        bias: Whether the linear layers have biases.
        batch_first: Whether inputs and outputs are ``[B, T, *]`` instead of ``[T, B, *]``.
        dropout: Probability of dropout between layers.
        bidirectional: Whether each layer also runs backwards in time.
        proj_size: Must be 0; only LSTMs have projections.
        nonlinearity: ``"tanh"`` or ``"relu"``.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
        nonlinearity: str = "tanh",
    ) -> None:
        super().__init__(
            DPRNNCell,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            {"nonlinearity": nonlinearity},
        )


class DPGRU(DPRNNBase):
    """``nn.GRU`` for differentially private training.

    Args:
        input_size: Number of input features D.
        hidden_size: Number of hidden features H.
        num_layers: Number of layers stacked on one another.
        bias: Whether the linear layers have biases.
        batch_first: Whether inputs and outputs are ``[B, T, *]`` instead of ``[T, B, *]``.
        dropout: Probability of dropout between layers.
        bidirectional: Whether each layer also runs backwards in time.
        proj_size: Must be 0; only LSTMs have projections.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
    ) -> None:
        super().__init__(
            DPGRUCell,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
        )


class DPLSTM(DPRNNBase):
    """``nn.LSTM`` for differentially private training.

    Args:
        input_size: Number of input features D.
        hidden_size: Number of hidden features H.
        num_layers: Number of layers stacked on one another.
        bias: Whether the linear layers have biases.
        batch_first: Whether inputs and outputs are ``[B, T, *]`` instead of ``[T, B, *]``.
        dropout: Probability of dropout between layers.
        bidirectional: Whether each layer also runs backwards in time.
        proj_size: Size to which hidden states are projected, smaller than ``hidden_size``;
            0 for no projection.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
    ) -> None:
        super().__init__(
            DPLSTMCell,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
        )
