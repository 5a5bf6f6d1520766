"""The arguments of :mod:`opacus.core.kernels.noise.gaussian` for one tensor."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from opacus.core.kernels.noise.regions import Region


class Draw(NamedTuple):
    """Noise for one tensor.

    Attributes:
        source: The tensor that noise is added to, contiguous.
        target: Where the sum goes, contiguous, of the same size; may be the source.
        region: Numbers of the elements.
        key: 32 bytes, equal for no two parameters of a run. The kernel on the GPU needs more host
            time for bytes that it sees for the first time.
        earlier: Keys of earlier steps' noise that is added again, one for each.
    """

    source: Tensor
    target: Tensor
    region: Region
    key: bytes
    earlier: tuple[bytes, ...] = ()
