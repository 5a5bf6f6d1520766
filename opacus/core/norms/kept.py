"""What is kept of a batch for the clipped sum, and records that wait for their norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

from torch import Tensor

from opacus.core.kernels.norms.reference import sum_of_squares, sums_of_squares
from opacus.core.kernels.sums.float8 import Rounded
from opacus.core.norms.host_memory import Away, send
from opacus.core.platform.profiling import each_layer
from opacus.core.platform.sizes import SENT_ELEMENTS
from opacus.core.record.record import Record
from opacus.core.rules.base import pad_rows


class Kept:
    """Per-sample gradients that were formed, and records that are held.

    Attributes:
        formed: Per-sample gradients ``[B, *shape]`` by parameter name.
        rounded: Those of them that are stored in float8, with their scales.
        layers: Names of the layers all of whose gradients are among them.
        held: Records whose gradients are not; their tensors may be in host memory.
        away: Per-sample gradients in host memory, by parameter name.
        lone: Whether the gradients are those of a lone sample.
    """

    def __init__(self) -> None:
        self.formed: dict[str, Tensor] = {}
        self.rounded: dict[str, Rounded] = {}
        self._before_rounding: dict[str, Tensor] = {}
        self.layers: set[str] = set()
        self.held: list[Record] = []
        self.away: dict[str, Away] = {}
        self.lone = False

    @each_layer
    def form(
        self,
        record: Record,
        rounding: Callable[[str, Tensor], Rounded | None] | None = None,
        may_be_dropped: bool = False,
    ) -> None:
        """Form a layer's per-sample gradients once and keep them for the clipped sum.

        Rules that re-run the layer need its parameters, which are unsharded only now,
        and may draw other random numbers when run again: what is summed must be what
        was measured.

        Args:
            record: Of the layer; of its only use, if its gradients are rounded.
            rounding: Stores a parameter's gradients in fewer bits.
            may_be_dropped: Whether :meth:`drop` may be called for the layer.
        """
        rule = record.layer.rule
        self.layers.add(record.spec.name)
        grads = rule.per_sample_grad(record.spec, record.activations, record.backprops)
        for local, grad in record.owned(grads).items():
            owner = record.layer.owners[local]
            known = self.formed.get(owner)
            fewer = None if rounding is None or known is not None else rounding(owner, grad)
            if fewer is not None:
                if may_be_dropped:  # a replay sums what has not been rounded
                    self._before_rounding[owner] = sum_of_squares(grad)
                self.formed[owner], self.rounded[owner] = fewer.values, fewer
            else:
                self.formed[owner] = grad if known is None else add_rows(known, grad)

    def drop(self, layers: AbstractSet[str], owners: AbstractSet[str]) -> dict[str, Tensor]:
        """Keep nothing of these layers any more.

        Returns:
            Squared norms of the gradients that had been formed, by parameter name.
        """
        self.held = [r for r in self.held if r.spec.name not in layers]
        self.layers -= layers
        squares: dict[str, Tensor] = {}
        for owner in owners & self.formed.keys():
            formed, fewer = self.formed.pop(owner), self.rounded.pop(owner, None)
            exact = None if fewer is None else self._before_rounding.pop(owner)
            squares[owner] = sum_of_squares(formed) if exact is None else exact
        return squares

    def send_away(self, layers: AbstractSet[str], owners: AbstractSet[str]) -> dict[str, Tensor]:
        """Move what is kept of these layers to host memory.

        Returns:
            Squared norms of the gradients among it, by parameter name.
        """
        here = [o for o in owners if o in self.formed and self.formed[o].numel() >= SENT_ELEMENTS]
        squares = self.squares(here)
        for owner in here:
            self.away[owner] = Away(self.formed.pop(owner))
            self._before_rounding.pop(owner, None)
        for record in self.held:
            if record.spec.name in layers and record.tensors:
                send(record)
        return squares

    def add_lone(self, grads: Mapping[str, Tensor]) -> None:
        """Take the gradients ``[*shape]`` of a batch of one sample, by parameter name."""
        self.lone = True
        for owner, grad in grads.items():
            dense = (grad.to_dense() if grad.is_sparse else grad).unsqueeze(0)
            known = self.formed.get(owner)
            self.formed[owner] = dense if known is None else known + dense

    def add_formed(self, grads: Mapping[str, Tensor], layers: Iterable[str]) -> None:
        """Take per-sample gradients ``[B, *shape]`` by parameter name, of these layers."""
        self.layers.update(layers)
        for owner, grad in grads.items():
            known = self.formed.get(owner)
            self.formed[owner] = grad if known is None else add_rows(known, grad)

    def squares(self, owners: Iterable[str]) -> dict[str, Tensor]:
        """Squared norms of those of these parameters whose gradients were formed."""
        own = [o for o in owners if o in self.formed]
        plain = [o for o in own if o not in self.rounded]
        found = {o: self.rounded[o].norm_sq for o in own if o in self.rounded}
        squares = sums_of_squares([self.formed[o] for o in plain])
        return found | dict(zip(plain, squares, strict=True))

    def take_held(self) -> list[Record]:
        """The records, for the sum; they are forgotten here."""
        held, self.held = self.held, []
        return held


class Queue:
    """Records that wait for their norm, up to a number of bytes."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.records: list[Record] = []
        self._budget = budget_bytes
        self._bytes = 0

    def put(self, record: Record) -> list[Record]:
        """Let a record wait.

        Returns:
            The oldest ones that stand alone, for which there is no room any more.
        """
        record.keep()
        self.records.append(record)
        self._bytes += record.backprop_bytes
        out: list[Record] = []
        index = 0
        while self._budget is not None and self._bytes > self._budget and index < len(self.records):
            oldest = self.records[index]
            if oldest.reused or oldest.layer.shared:
                index += 1
                continue
            del self.records[index]
            self._bytes -= oldest.backprop_bytes
            oldest.check_unchanged()
            out.append(oldest)
        return out

    def empty(self) -> list[Record]:
        """All of them; none waits any more.

        Raises:
            RuntimeError: One of them has been overwritten.
        """
        records, self.records, self._bytes = self.records, [], 0
        for record in records:
            record.check_unchanged()
        return records


def add_rows(known: Tensor, grad: Tensor) -> Tensor:
    """Sum of two ``[B_k, ...]`` tensors whose rows start at the same sample."""
    if known.shape[0] == grad.shape[0]:
        return known + grad
    rows = max(known.shape[0], grad.shape[0])
    return pad_rows(known, rows) + pad_rows(grad, rows)
