"""Lengths of packed sequences, and random ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from opacus.utils.packed_sequences import _gen_packed_data, compute_seq_lengths


@pytest.mark.parametrize("lengths", [[3, 1, 4, 4], [1], [2, 2, 2], [5, 1]])
def test_lengths_in_the_order_of_the_data(lengths: list[int]) -> None:
    packed = pack_padded_sequence(
        torch.zeros(max(lengths), len(lengths), 2), torch.tensor(lengths), enforce_sorted=False
    )
    assert compute_seq_lengths(packed.batch_sizes) == sorted(lengths, reverse=True)
    assert sum(compute_seq_lengths(packed.batch_sizes)) == len(packed.data)


def test_no_sequences() -> None:
    assert compute_seq_lengths(torch.tensor([], dtype=torch.long)) == []
    assert compute_seq_lengths(torch.tensor([0])) == []


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sorted_", [False, True])
def test_random_sequences(batch_first: bool, sorted_: bool) -> None:
    seen = set()
    for _ in range(30):
        packed = _gen_packed_data(4, 6, 3, batch_first, sorted_)
        padded, lengths = pad_packed_sequence(packed, batch_first=True)
        assert padded.shape == (4, int(lengths.max()), 3)
        assert (packed.sorted_indices is None) == sorted_
        assert not sorted_ or lengths.tolist() == sorted(lengths.tolist(), reverse=True)
        seen.update(lengths.tolist())
    assert seen == set(range(1, 7))
