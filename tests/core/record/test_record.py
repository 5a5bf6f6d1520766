"""What a record computes from its tensors, and that it does so once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from opacus.core.record.layers import layers_of
from opacus.core.record.passes import Generation
from opacus.core.record.record import Record


def record(x: Tensor, g: Tensor | tuple[Tensor, ...], borrowed: bool = False) -> Record:
    (layer,) = layers_of(nn.Sequential(nn.Linear(3, 2)))
    return Record(layer, layer.spec, (x,), g, len(x), False, Generation(), borrowed=borrowed)


def test_samples_and_elements_are_counted() -> None:
    x, g = torch.randn(5, 4, 3), torch.randn(5, 4, 2)
    for one in (record(x, g), record(x, (g, g[:, 0]))):
        assert one.batch == 5
        assert one.tensors is one.tensors and one.tensors[0] is x
        assert one.elements == x.numel() + sum(t.numel() for t in one.tensors[1:])


def test_a_borrowed_record_that_is_held_has_tensors_of_its_own() -> None:
    x, g = torch.randn(5, 3), torch.randn(5, 2)
    one = record(x, g, borrowed=True)
    assert one.tensors[0] is x  # known before it is held
    want = [t.clone() for t in one.tensors]
    one.keep()
    x.zero_(), g.zero_()  # as a compiled graph may do
    assert all(torch.equal(t, w) and w.any() for t, w in zip(one.tensors, want, strict=True))
    assert one.tensors[0] is one.activations[0] and one.tensors[1] is one.backprops
    held = one.tensors[0]
    one.keep()
    assert one.tensors[0] is held  # copied once


def test_gradients_in_borrowed_memory_are_copied() -> None:
    x, g = torch.randn(5, 3), torch.randn(5, 2)
    grads = {"weight": torch.randn(5, 2, 3), "bias": g}
    assert record(x, g).owned(grads)["bias"] is g
    owned = record(x, g, borrowed=True).owned(grads)
    assert owned["weight"] is grads["weight"]
    assert owned["bias"] is not g and torch.equal(owned["bias"], g)


def test_a_changed_copy_counts_anew() -> None:
    x, g = torch.randn(5, 3), torch.randn(5, 2)
    one = record(x, g)
    assert one.tensors[1] is g
    scaled = replace(one, backprops=2 * g)
    assert scaled.tensors[1] is scaled.backprops
