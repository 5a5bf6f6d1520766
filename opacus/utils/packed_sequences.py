"""Packed sequences: lengths, and random ones to test with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence


def compute_seq_lengths(batch_sizes: Tensor) -> list[int]:
    """Lengths of the sequences in a ``PackedSequence``, longest first.

    Args:
        batch_sizes: ``PackedSequence.batch_sizes``: integers ``[T]``, how many sequences
            have an element at each time step.

    Returns:
        One length for each sequence, in the order in which the packed data holds them.
    """
    if len(batch_sizes) == 0:
        return []
    positions = torch.arange(int(batch_sizes[0]), device=batch_sizes.device)
    lengths: list[int] = (batch_sizes > positions.unsqueeze(1)).sum(dim=1).tolist()
    return lengths


def _gen_packed_data(
    minibatch_size: int,
    max_seq_length: int,
    input_dim: int,
    batch_first: bool,
    sorted_: bool | None = False,
) -> PackedSequence:
    """Random sequences of random lengths, packed.

    Args:
        minibatch_size: Number of sequences B.
        max_seq_length: Lengths are drawn from 1 to this.
        input_dim: Number of features.
        batch_first: Whether the data is laid out ``[B, T, *]`` before it is packed.
        sorted_: Whether the sequences are sorted by length before they are packed.
    """
    lengths = torch.randint(1, max_seq_length + 1, (minibatch_size,), device="cpu")
    if sorted_:
        lengths = lengths.sort(descending=True).values
    steps = int(lengths.max())
    shape = (minibatch_size, steps) if batch_first else (steps, minibatch_size)
    data = torch.randn(*shape, input_dim)
    return pack_padded_sequence(
        data, lengths, batch_first=batch_first, enforce_sorted=bool(sorted_)
    )
