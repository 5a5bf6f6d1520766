"""Records times clipping factors: the one place where a clipped sum is formed from a record."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from opacus.core.kernels.sums.scaled_rows import Inputs, scaled_rows
from opacus.core.kernels.sums.weighted_sum import weighted_sum
from opacus.core.platform.profiling import PROFILE, layers
from opacus.core.privacy.clipping import Factors, read_excluded
from opacus.core.record.record import Record
from opacus.core.rules.spec import LayerSpec


class Weighting:
    """Forms ``sum_i factors[i] * g_i`` of one layer after the other.

    The factors meet the rows of the layer itself (of its backprops, or of its input where that is
    smaller), in at least fp32: nothing between the loss and the layer has seen them, so that what
    is weighted is what was measured. Samples that are excluded do not contribute, not even as
    ``0 * NaN``.

    Args:
        clipped: Factors and excluded samples.

    Attributes:
        shared: ``[B]`` factors that all parameters have; ``None`` if each has its own.
    """

    def __init__(self, clipped: Factors) -> None:
        self.clipped = clipped
        self.shared = clipped.shared
        self._inputs = Inputs()

    @cached_property
    def _excluded(self) -> Tensor | None:
        """The excluded samples; read once, as most batches have none and need no masking."""
        return read_excluded(self.clipped.excluded)

    @cached_property
    def masked(self) -> Tensor | None:
        """The excluded samples; on a GPU also if there are none, as nothing waits for it."""
        return self.clipped.masked

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
        if self.shared is not None:
            return self._sums(record, names, self.shared)
        found: dict[str, Tensor] = {}
        for name in names:
            found |= self._sums(record, (name,), self.clipped.of(owners[name]))
        return found

    def write(self, record: Record, out: Tensor) -> bool:
        """Write the clipped sum of a record's one parameter, where it has one and its rule can.

        Args:
            record: With its tensors.
            out: ``[W, n]``: the parts of W ranks one after another.

        Returns:
            Whether that was done; else nothing was.
        """
        names, rule = record.spec.params, record.layer.rule
        use = record.activations, record.backprops
        if not rule.can_write(record.spec, *use, out):
            return False
        owner, factors = record.layer.owners[names[0]], self.shared
        factors = self.clipped.of(owner) if factors is None else factors
        with layers([record.spec.name]):
            rule.write_sum(*self._weighted(record, names, factors), out)
        return True

    def _sums(self, record: Record, names: tuple[str, ...], factors: Tensor) -> dict[str, Tensor]:
        """Those of parameters with the same factors."""
        return record.layer.rule.wide_sum(*self._weighted(record, names, factors))

    def _weighted(
        self, record: Record, names: tuple[str, ...], factors: Tensor
    ) -> tuple[LayerSpec, Any, Any]:
        """The record of some parameters, with the factors in its activations or backprops."""
        rows, device = record.batch, record.device
        excluded = None if self._excluded is None else self._excluded[:rows].to(device)
        factors = factors[:rows].to(device)
        activations, backprops = record.activations, record.backprops
        # A compiled graph writes over what it has lent, and counts no version.
        inputs = Inputs() if record.borrowed else self._inputs
        if excluded is None and _takes_factors(record, names):
            activations = inputs.scaled(activations, factors, None)
        else:
            by_rows = record.layer.rule.by_rows(activations, record.batch)
            if excluded is not None and by_rows:
                activations = inputs.scaled(activations, None, excluded)
            backprops = scaled_rows_of(backprops, factors, excluded)
        spec = record.spec if names == record.spec.params else replace(record.spec, params=names)
        return spec, activations, backprops

    def sum_of_formed(self, owner: str, formed: Tensor) -> Tensor:
        """The clipped sum of per-sample gradients ``[n, *shape]``, n <= B."""
        return sum_of_formed(formed, self.clipped.of(owner), self.masked)


def sum_of_formed(
    formed: Tensor, factors: Tensor, excluded: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """The clipped sum of per-sample gradients ``[n, *shape]``, n <= B.

    Args:
        formed: The gradients.
        factors: ``[B]``.
        excluded: ``[B]`` bool, ``None`` if there are none.
        out: Where to write the sum.
    """
    rows = len(formed)
    own = None if excluded is None else excluded[:rows]
    return weighted_sum(formed, factors[:rows], own, out=out)


def _takes_factors(record: Record, names: tuple[str, ...]) -> bool:
    """Whether factors may scale the layer's input, and that is the smaller of its tensors."""
    if not set(names) <= set(record.layer.rule.bilinear):
        return False
    (x,), g = record.activations, record.backprops
    if not type(x) is type(g) is Tensor or x.dtype != g.dtype or not x.is_contiguous():
        return False
    if x.shape[:1] != (record.batch,):
        return False
    # In fp16 an input may be near the largest number, and a factor near the smallest.
    return x.numel() <= g.numel() and x.dtype != torch.float16


def scaled_rows_of(backprops: Any, factors: Tensor, excluded: Tensor | None) -> Any:
    """:func:`scaled_rows` of one tensor, or of each of several."""
    if isinstance(backprops, tuple):
        return tuple(scaled_rows(g, factors, excluded) for g in backprops)
    return scaled_rows(backprops, factors, excluded)
