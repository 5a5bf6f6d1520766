"""Records times clipping factors: the one place where a clipped sum is formed from a record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from opacus.core.kernels.sums.scaled_rows import Masking, scaled_rows
from opacus.core.kernels.sums.weighted_sum import weighted_sum
from opacus.core.platform.profiling import PROFILE, layers
from opacus.core.privacy.clipping import Factors
from opacus.core.record.record import Record


class Weighting:
    """Forms ``sum_i factors[i] * g_i`` of one layer after the other.

    The factors meet the rows of the layer itself, in at least fp32: nothing between the loss and
    the layer has seen them, so that what is weighted is what was measured. Samples that are
    excluded do not contribute, not even as ``0 * NaN``.

    Args:
        clipped: Factors and excluded samples.
    """

    def __init__(self, clipped: Factors) -> None:
        self._clipped = clipped
        self._shared = clipped.shared
        self._excluded = clipped.masked
        self._masking = Masking()

    def sums(self, record: Record) -> dict[str, Tensor]:
        """The clipped sums of a record's parameters.

        Returns:
            Local name -> sum, of the parameter's shape, in at least fp32 where the rule can.
        """
        if not PROFILE.running:
            return self._of(record)
        with layers([record.spec.name]):
            return self._of(record)

    def _of(self, record: Record) -> dict[str, Tensor]:
        names, owners = record.spec.params, record.layer.owners
        if self._shared is not None:
            return self._sums(record, names, self._shared)
        found: dict[str, Tensor] = {}
        for name in names:
            found |= self._sums(record, (name,), self._clipped.of(owners[name]))
        return found

    def _sums(self, record: Record, names: tuple[str, ...], factors: Tensor) -> dict[str, Tensor]:
        """Those of parameters with the same factors."""
        rows, device = record.batch, record.device
        excluded = None if self._excluded is None else self._excluded[:rows].to(device)
        factors = factors[:rows].to(device)
        activations = record.activations if excluded is None else self._finite(record, excluded)
        backprops = scaled_rows_of(record.backprops, factors, excluded)
        spec = record.spec if names == record.spec.params else replace(record.spec, params=names)
        return record.layer.rule.wide_sum(spec, activations, backprops)

    def sum_of_formed(self, owner: str, formed: Tensor) -> Tensor:
        """The clipped sum of per-sample gradients ``[n, *shape]``, n <= B."""
        rows = len(formed)
        excluded = None if self._excluded is None else self._excluded[:rows]
        return weighted_sum(formed, self._clipped.of(owner)[:rows], excluded)

    def _finite(self, record: Record, excluded: Tensor) -> Any:
        """Activations whose excluded rows are zero."""
        if not record.layer.rule.by_rows(record.activations, record.batch):
            return record.activations
        return self._masking.without(record.activations, excluded)


def scaled_rows_of(backprops: Any, factors: Tensor, excluded: Tensor | None) -> Any:
    """:func:`scaled_rows` of one tensor, or of each of several."""
    if isinstance(backprops, tuple):
        return tuple(scaled_rows(g, factors, excluded) for g in backprops)
    return scaled_rows(backprops, factors, excluded)
