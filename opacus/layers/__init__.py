"""Layers that take the place of torch's where those cannot be trained privately."""

from opacus.layers import rules
from opacus.layers.dp_multihead_attention import (
    DPMultiheadAttention,
    SequenceBias,
    torch_state_dict,
)
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN
from opacus.layers.param_rename import RenameParamsMixin

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "DPMultiheadAttention",
    "RenameParamsMixin",
    "SequenceBias",
    "rules",
    "torch_state_dict",
]
