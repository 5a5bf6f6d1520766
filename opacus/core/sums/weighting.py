"""Records times clipping factors: the one place where a clipped sum is formed from a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from opacus.core.kernels.sums.scaled_rows import Masking, scaled_rows
from opacus.core.kernels.sums.weighted_sum import weighted_sum
from opacus.core.record.record import Record


class Weighting:
    """Forms ``sum_i factors[i] * g_i`` of one layer after the other.

    The factors meet the rows of the layer itself, in at least fp32: nothing between the loss and
    the layer has seen them, so that what is weighted is what was measured.

    Args:
        factors: ``[B]`` of all parameters, or by parameter name.
        excluded: ``[B]`` bool, samples that must not contribute even as ``0 * NaN``; ``None``:
            there are none.
    """

    def __init__(self, factors: Tensor | Mapping[str, Tensor], excluded: Tensor | None) -> None:
        self._factors = factors
        self._excluded = excluded
        self._masking = Masking()

    def of(self, owner: str) -> Tensor:
        """``[B]`` factors of one parameter of the model."""
        factors = self._factors
        return factors if isinstance(factors, Tensor) else factors[owner]

    def together(self, record: Record) -> Iterator[tuple[str, ...]]:
        """The record's parameters, those with the same factors together."""
        names = record.spec.params
        if isinstance(self._factors, Tensor):
            yield names
        else:
            yield from ((name,) for name in names)

    def sums(self, record: Record, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The clipped sums of parameters of a record that have the same factors.

        Args:
            record: The use of a layer.
            names: Local names of its parameters.

        Returns:
            Local name -> sum, of the parameter's shape, in at least fp32 where the rule can.
        """
        rows, device = record.batch, record.device
        excluded = None if self._excluded is None else self._excluded[:rows].to(device)
        factors = self.of(record.layer.owners[names[0]])[:rows].to(device)
        activations = record.activations if excluded is None else self._finite(record, excluded)
        backprops = scaled_rows_of(record.backprops, factors, excluded)
        spec = record.spec if names == record.spec.params else replace(record.spec, params=names)
        return record.layer.rule.wide_sum(spec, activations, backprops)

    def sum_of_formed(self, owner: str, formed: Tensor) -> Tensor:
        """The clipped sum of per-sample gradients ``[n, *shape]``, n <= B."""
        rows = len(formed)
        excluded = None if self._excluded is None else self._excluded[:rows]
        return weighted_sum(formed, self.of(owner)[:rows], excluded)

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
