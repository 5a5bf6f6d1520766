"""Composition of privacy losses: a sum of independent variables, by Fourier transform."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy.fft import irfft, rfft  # type: ignore[import-untyped]

from opacus.accountants.analysis.prv.prvs import DiscretePRV


def compose_heterogeneous(
    dprvs: Iterable[DiscretePRV], num_self_compositions: Iterable[int]
) -> DiscretePRV:
    """Returns the privacy loss of using each mechanism the given number of times.

    All factors are multiplied in Fourier space, so each distinct one costs one transform, however
    often it is used, and only one is held in memory if `dprvs` is a generator.

    Args:
        dprvs: losses on one grid, which may differ in `shifts`.
        num_self_compositions: how often each is used, each at least 1.

    Returns:
        The loss of the composition, on the same grid moved by the sum of the shifts.

    Raises:
        ValueError: if the lengths differ, nothing is given, or the grids differ.
    """
    spectrum, base, shift, total = None, None, 0.0, 0
    for dprv, count in zip(dprvs, num_self_compositions, strict=True):
        if count < 1:
            raise ValueError(f"num_self_compositions must be at least 1, got {count!r}")
        aligned = dprv.domain.shift_right(-dprv.domain.shifts)
        if base is None:
            base = aligned
        elif aligned.size != base.size or not np.isclose(aligned.t_min, base.t_min, rtol=1e-9):
            raise ValueError(f"all losses must share one grid, got {aligned} and {base}")
        factor = _power(rfft(dprv.pmf), count)
        spectrum = factor if spectrum is None else np.multiply(spectrum, factor, out=spectrum)
        shift += count * dprv.domain.shifts
        total += count
    if base is None or spectrum is None:
        raise ValueError("dprvs must hold at least one privacy loss")
    # Index i stands for (i - zero) dt, so a sum of `total` indices is (total - 1) zero too far.
    zero = round(-base.t_min / base.dt)
    pmf = np.roll(irfft(spectrum, base.size), -((total - 1) * zero) % base.size)
    return DiscretePRV(pmf, base.shift_right(shift))


def _power(values: np.ndarray, exponent: int) -> np.ndarray:
    """Returns `values` to a whole power of at least 1, by squaring; overwrites `values`."""
    result = None
    while True:
        if exponent % 2 == 1:
            result = values.copy() if result is None else np.multiply(result, values, out=result)
        exponent //= 2
        if exponent == 0:
            assert result is not None
            return result
        np.multiply(values, values, out=values)
