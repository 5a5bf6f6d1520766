"""What a single backward pass keeps of each layer, chosen as the planner does.

Per linear layer, B samples of T tokens, d inputs, p outputs: ``store`` holds the per-sample
gradients, ``B d p`` elements; ``keep`` holds activations and backprops, ``B T (d + p)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from memory_test.scale.rates import Rates
from memory_test.scale.run import Run
from memory_test.scale.shapes import linears
from opacus.core.platform.sizes import FREE_MEMORY_SHARE
from opacus.core.sums.choice import KEEP_PASSES, STORE_PASSES


@dataclass(frozen=True)
class Held:
    """What is held at the end of the backward pass.

    Attributes:
        blocks: Bytes of all blocks.
        head: Bytes of the head.
        seconds: Time that storing, or keeping and taking norms, costs over non-private.
    """

    blocks: float
    head: float
    seconds: float

    @property
    def total(self) -> float:
        """Bytes of all layers."""
        return self.blocks + self.head


def held_bytes(run: Run, rates: Rates) -> Held:
    """The fastest choice for each layer; the smallest where that exceeds the free memory."""
    state = run.parameter_bytes * run.shape.parameters / run.sharded_over
    budget = FREE_MEMORY_SHARE * (rates.memory_bytes - state)
    fastest = _held(run, rates, by_size=False)
    if run.held_blocks is not None:
        return fastest
    return fastest if fastest.total <= budget else _held(run, rates, by_size=True)


def _held(run: Run, rates: Rates, *, by_size: bool) -> Held:
    shape = run.shape
    block = [_choose(run, rates, d, p, by_size) for d, p in linears(shape)]
    head = _choose(run, rates, shape.hidden, shape.vocab, by_size)
    seconds = shape.layers * sum(s for _, s in block) + head[1]
    blocks = shape.layers if run.held_blocks is None else run.held_blocks
    return Held(blocks * sum(b for b, _ in block), head[0], seconds)


def _choose(run: Run, rates: Rates, d: int, p: int, by_size: bool) -> tuple[float, float]:
    """Bytes and seconds of one layer."""
    formed = 2.0 * run.batch * d * p
    stored = 1.0 * run.stored * run.batch * d * p
    kept = 2.0 * run.tokens_here * (d + p)
    rounded = 2 * stored if stored < formed else 0.0  # written and read once more
    store = (stored, (STORE_PASSES * formed + rounded) / rates.stored_bytes)
    keep_seconds = KEEP_PASSES * kept / rates.stored_bytes + norm_seconds(run, rates, d, p)
    return min(store, (kept, keep_seconds), key=lambda choice: choice[0 if by_size else 1])


def norm_seconds(run: Run, rates: Rates, d: int, p: int) -> float:
    """Norms of one layer without its per-sample gradients: by Gram matrices or by width."""
    width = 2.0 * run.tokens_here * d * p
    gram = 2.0 * run.tokens_here * run.tokens * (d + p)
    return min(width, gram) / rates.norm_flops
