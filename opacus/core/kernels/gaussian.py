"""Gaussian noise added to many tensors in one pass over them.

On a GPU the noise is made where it is added (Philox and Box-Muller, as PyTorch's own), so it
takes no memory; elsewhere PyTorch draws it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.core.kernels.choice import is_usable
from opacus.core.kernels.weighted_sum import triton_works


def can_fuse(tensor: Tensor, generator: torch.Generator | None) -> bool:
    """Whether :func:`add_gaussian` takes this tensor, with this source of randomness."""
    return (
        tensor.is_cuda
        and tensor.is_contiguous()
        and (generator is None or _draws_on(generator.device, tensor.device))
        and is_usable(tensor)
        and triton_works()
    )


def _draws_on(source: torch.device, device: torch.device) -> bool:
    """Whether a generator of ``source`` draws on ``device``; it may not say which GPU it is of."""
    return source.type == device.type and source.index in (None, device.index)


def add_gaussian(
    std: float,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    generator: torch.Generator | None = None,
) -> None:
    """Write ``source + N(0, std^2)`` to each target; noise and sum are fp32.

    No two elements share a random number, and neither do two calls: each call draws a key of
    its own from ``generator``, so that equal states of it give equal noise.

    Args:
        std: Standard deviation.
        sources: Tensors on one GPU for which :func:`can_fuse` holds.
        targets: Where the results go: contiguous, of the sources' sizes, bf16, fp16 or fp32;
            may be the sources themselves.
        generator: Source of randomness; the device's own if ``None``.
    """
    from opacus.core.kernels import gaussian_triton as gpu

    together: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for place, (source, target) in enumerate(zip(sources, targets, strict=True)):
        together.setdefault((source.dtype, target.dtype), []).append(place)
    for places in together.values():
        key = torch.empty(1, dtype=torch.int64, device=sources[0].device)
        key.random_(generator=generator)
        gpu.launch(std, [sources[p] for p in places], [targets[p] for p in places], key)
