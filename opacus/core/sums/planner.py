"""Decides what a single backward pass keeps of each layer for the clipped sum.

``"store"``: the per-sample gradients, formed once; their norm is a reading of them, and
the sum weights them. No matrix work beyond that of ordinary training, ``B n`` elements.

``"keep"``: activations and backprops. The norm is computed from them (by Gram matrices or
in pieces, whichever is cheaper), the weighted gradient by one product later.

Both are exact; the choice changes speed and memory only.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opacus.core.platform.sizes import FREE_MEMORY_SHARE
from opacus.core.record.record import Record
from opacus.core.sums.rates import rates_of

# Passes over the stored per-sample gradients: written, read for the norm, read for the sum.
STORE_PASSES = 3
# Passes over kept tensors: read and written once more, with the clipping factors.
KEEP_PASSES = 2
# Choices that are remembered.
MOST_KNOWN = 10_000


@dataclass(frozen=True)
class Choice:
    """What was decided for a layer, and why.

    Attributes:
        layer: Qualified name.
        kind: Class of the layer.
        batch: Number of samples B.
        shapes: Shapes of activations and backprops.
        what: ``"store"`` or ``"keep"``.
        milliseconds: Estimated time beyond non-private training, of each choice.
        bytes: Memory held until the sum, of each choice.
    """

    layer: str
    kind: str
    batch: int
    shapes: str
    what: str
    milliseconds: dict[str, float]
    bytes: dict[str, int]


class Planner:
    """Chooses for each record of one backward pass.

    Args:
        budget_bytes: Memory that may be held; beyond it whatever is smaller is held.
            ``None``: no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.choices: dict[str, Choice] = {}
        self._known: dict[Hashable, Choice] = {}

    def start(self, budget_bytes: int | None) -> None:
        """Begin a new backward pass."""
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.choices = {}

    def stores(self, record: Record) -> bool:
        """Whether the per-sample gradients of ``record`` are stored (else it is kept)."""
        if not record.layer.rule.norm_is_local:
            return False
        choice = self._choice(record)
        what = choice.what
        budget = self.budget_bytes
        if budget is not None and self.held_bytes + choice.bytes[what] > budget:
            what = min(choice.bytes, key=choice.bytes.__getitem__)
        self.held_bytes += choice.bytes[what]
        self.choices[choice.layer] = choice if what == choice.what else replace(choice, what=what)
        return what == "store"

    def _choice(self, record: Record) -> Choice:
        tensors = record.tensors
        spec = record.spec
        key = (spec.name, spec.params, *[t.shape for t in tensors])
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()  # batches of ever new sizes, as Poisson sampling draws them
            known = self._known[key] = _compare(record, tensors)
        return known

    def table(self) -> str:
        """The plan of the latest backward pass, a line for each layer."""
        head = ("layer", "kind", "B", "activations, backprops", "choice", "extra ms", "held MB")
        rows = [head]
        for c in self.choices.values():
            cells = (f"{c.milliseconds[c.what]:.3f}", f"{c.bytes[c.what] / 2**20:.2f}")
            rows.append((c.layer, c.kind, str(c.batch), c.shapes, c.what, *cells))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def _compare(record: Record, tensors: list[Tensor]) -> Choice:
    spec, backprops = record.spec, tensors[-1]
    rates = rates_of(backprops.device, backprops.dtype)
    elements = spec.elements
    held = sum(t.numel() * t.element_size() for t in tensors)
    rule, use = record.layer.rule, (record.activations, record.backprops)
    stored = record.batch * elements * rule.grad_dtype(*use).itemsize
    cost = rule.norm_cost(spec, *use)
    # Where the norm comes from per-sample gradients anyway, keeping would form them twice.
    products = float(record.batch * elements) if cost is None else cost
    seconds = {
        "store": STORE_PASSES * stored / rates.bytes,
        "keep": KEEP_PASSES * held / rates.bytes + products / rates.multiply_adds,
    }
    if cost is None and stored <= held:
        seconds["store"] = 0.0
    what = min(seconds, key=seconds.__getitem__)
    shapes = ", ".join(str(list(t.shape)) for t in tensors)
    return Choice(
        layer=spec.name,
        kind=spec.kind.__name__,
        batch=record.batch,
        shapes=shapes,
        what=what,
        milliseconds={k: v * 1e3 for k, v in seconds.items()},
        bytes={"store": stored, "keep": held},
    )


def free_memory(device: torch.device) -> int | None:
    """Memory of a CUDA device that may be held during the backward pass, else ``None``."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # once: it is slow
    if stats:
        reserved, allocated = (stats[f"{k}_bytes"]["all"] for k in ("reserved", "allocated"))
        free += reserved["current"] - allocated["current"]
    return int(free * FREE_MEMORY_SHARE)
