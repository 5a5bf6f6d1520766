"""Records of linear layers, and the norms that a ledger is to find in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.core.norms.ledger import NormLedger
from opacus.core.record.layers import Layer
from opacus.core.record.passes import Generation
from opacus.core.record.record import Record


def records_of(layers: Sequence[Layer], inputs: Sequence[Tensor]) -> list[Record]:
    """What a backward pass shows, last layer first."""
    uses = reversed(list(zip(layers, inputs, strict=True)))
    return [
        Record(layer, layer.spec, (x,), backprops(layer, x), len(x), False, Generation())
        for layer, x in uses
    ]


def backprops(layer: Layer, x: Tensor) -> Tensor:
    """Random, of the layer's output."""
    width = layer.spec.shapes["weight"][0]
    return torch.randn(*x.shape[:-1], width, dtype=x.dtype, device=x.device)


def expected(records: Sequence[Record]) -> dict[str, Tensor]:
    """Squared norms, one sample at a time."""
    found: dict[str, list[Tensor]] = {}
    for record in records:
        for a, g in zip(record.activations[0], record.backprops, strict=True):
            a, g = a.reshape(-1, a.shape[-1]).double(), g.reshape(-1, g.shape[-1]).double()
            grads = {"weight": g.T @ a, "bias": g.sum(0)}
            for name in record.spec.params:
                norm_sq = grads[name].square().sum()
                found.setdefault(record.layer.owners[name], []).append(norm_sq)
    return {name: torch.stack(values) for name, values in found.items()}


def check(ledger: NormLedger, records: Sequence[Record]) -> None:
    want = expected(records)
    for record in records:
        ledger.add(record)
    got = ledger.finish()
    assert got.keys() == want.keys()
    for name in want:
        assert want[name].min() > 0
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-5, atol=0)
