"""Compares the ways to hold a layer's record: its per-sample gradients, or itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from opacus.core.platform.sizes import ROUNDED_ELEMENTS
from opacus.core.record.record import Record
from opacus.core.sums.rates import rates_of

# Passes over the stored per-sample gradients: written, read for the norm, read for the sum.
STORE_PASSES = 3
# Passes over kept tensors: read and written once more, with the clipping factors.
KEEP_PASSES = 2


@dataclass(frozen=True)
class Choice:
    """What was decided for a layer, and why.

    Attributes:
        layer: Qualified name.
        kind: Class of the layer.
        batch: Number of samples B.
        shapes: Of activations and backprops.
        what: ``"store"``, ``"keep"``, ``"offload"`` (either, in host memory) or ``"replay"``.
        milliseconds: Estimated time beyond non-private training, of each choice.
        bytes: Memory held until the sum, of each choice.
    """

    layer: str
    kind: str
    batch: int
    shapes: tuple[tuple[int, ...], ...]
    what: str
    milliseconds: dict[str, float]
    bytes: dict[str, int]

    def of(self, batch: int) -> Choice:
        """The same choice for another number of samples, to which all numbers are in proportion."""
        if batch == self.batch or not self.batch:
            return self
        share = batch / self.batch
        return replace(
            self,
            batch=batch,
            shapes=tuple([(batch, *s[1:]) if s[:1] == (self.batch,) else s for s in self.shapes]),
            milliseconds={way: ms * share for way, ms in self.milliseconds.items()},
            bytes={way: round(size * share) for way, size in self.bytes.items()},
        )


def compare(record: Record, rounds: bool) -> Choice:
    """Which of storing and keeping is faster.

    Args:
        record: Of the layer.
        rounds: Whether gradients are stored in float8.
    """
    tensors = record.tensors
    spec, elements = record.spec, record.spec.elements
    held = sum(t.numel() * t.element_size() for t in tensors)
    rule, use = record.layer.rule, (record.activations, record.backprops)
    dtype = rule.grad_dtype(*use)  # also of the products: a loss that is given has wider backprops
    rates = rates_of(tensors[-1].device, dtype)
    formed = record.batch * elements * dtype.itemsize
    stored = record.batch * elements if rounds and elements >= ROUNDED_ELEMENTS else formed
    cost = rule.norm_cost(spec, *use)
    # Where the norm comes from per-sample gradients anyway, keeping would form them twice.
    products = float(record.batch * elements) if cost is None else cost
    seconds = {
        "store": (STORE_PASSES * formed + (stored < formed) * 2 * stored) / rates.bytes,
        "keep": KEEP_PASSES * held / rates.bytes + products / rates.multiply_adds,
    }
    if cost is None and stored <= held:
        seconds["store"] = 0.0
    what = min(seconds, key=seconds.__getitem__)
    return Choice(
        layer=spec.name,
        kind=spec.kind.__name__,
        batch=record.batch,
        shapes=tuple([tuple(t.shape) for t in tensors]),
        what=what,
        milliseconds={k: v * 1e3 for k, v in seconds.items()},
        bytes={"store": stored, "keep": held},
    )
