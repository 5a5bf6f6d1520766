"""What the Triton kernels share on the host: checks, tile sizes, tables of pointers."""

from __future__ import annotations

import array
import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
SUPPORTED = (*HALF, torch.float32)
# Bytes to which the copy engine (TMA) and 16-byte loads need addresses and strides aligned.
ALIGNMENT = 16


@dataclass(frozen=True)
class Tile:
    """Sizes of one kernel variant.

    Attributes:
        m: Rows of the tile of the product (features of A, or tokens of a Gram matrix).
        n: Its columns; equal to ``m`` for a Gram matrix.
        k: How much of the summed dimension is multiplied at once.
        warps: Warps of a program.
        stages: Depth of the software pipeline.
        group: Tiles that run next to each other share operands in squares of this side.
        tma: Whether the copy engine of compute capability 9.0 loads the operands.
        specialised: Whether one warp loads and the others multiply; see ``hopper``.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    tma: bool = True
    specialised: bool = False

    def fitted(self, m: int, n: int) -> Tile:
        """No larger than needed for a product of ``m`` by ``n``."""
        rows, columns = min(self.m, power_of_two(m, 64)), min(self.n, power_of_two(n, 16))
        small = rows * columns <= 64 * 64
        return replace(self, m=rows, n=columns, warps=min(self.warps, 4) if small else self.warps)

    def __str__(self) -> str:
        way = "specialised" if self.specialised else "tma" if self.tma else "pointers"
        return f"{self.m}x{self.n}x{self.k} w{self.warps} s{self.stages} g{self.group} {way}"


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``least``."""
    return max(least, 1 << max(0, size - 1).bit_length())


def parts(size: int, part: int) -> int:
    """How many parts cover ``size``; Triton's own function takes microseconds."""
    return -(-size // part)


def blank(shape: Sequence[int], device: torch.device) -> Tensor:
    """Uninitialised fp32 memory that a kernel fills; tests put NaN there first."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def check_pair(activations: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, T, d]`` and ``[B, T, p]`` of one dtype that the kernels know.

    Raises:
        ValueError: Other shapes, or tensors on different devices.
        TypeError: Another dtype.
    """
    a, g = activations, backprops
    if not _is_pair(a.shape, g.shape):
        raise ValueError(
            "activations must be [B, T, d] and backprops [B, T, p], got "
            f"{list(a.shape)} and {list(g.shape)}"
        )
    if a.device != g.device:
        raise ValueError(f"activations are on {a.device}, backprops on {g.device}")
    if a.dtype != g.dtype:
        wide = torch.promote_types(a.dtype, g.dtype)
        a, g = a.to(wide), g.to(wide)
    check_dtype(g)
    return a, g


# Cached: a launch for hundreds of layers, most of them alike, asks this for each of them.
@functools.lru_cache(maxsize=4096)
def _is_pair(a: torch.Size, g: torch.Size) -> bool:
    return len(a) == len(g) == 3 and a[:2] == g[:2]


def check_dtype(tensor: Tensor) -> None:
    """Refuse what the kernels do not know.

    Raises:
        TypeError: Not bf16, fp16 or fp32.
    """
    if tensor.dtype not in SUPPORTED:
        raise TypeError(f"the Triton kernels take bf16, fp16 or fp32, got {tensor.dtype}")


def check_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask ``[B, T]``: bool stays (as bytes), numbers become fp32 weights.

    Raises:
        ValueError: Another shape.
    """
    if mask is None:
        return None
    if mask.shape != like.shape[:2]:
        raise ValueError(f"mask must be [B, T] = {list(like.shape[:2])}, got {list(mask.shape)}")
    if mask.device != like.device:
        raise ValueError(f"mask is on {mask.device}, backprops on {like.device}")
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask.float()


def check_group(
    pairs: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor] | None
) -> list[Tensor | None]:
    """Checked pairs of several layers that one launch is to take; their masks, checked.

    Raises:
        ValueError: Different dtypes or devices, or masks of different kinds.
    """
    first = pairs[0][1]
    if any(g.dtype != first.dtype or g.device != first.device for _, g in pairs):
        raise ValueError("all layers of one launch must have the same dtype and device")
    given: Sequence[Tensor | None] = masks or [None] * len(pairs)
    kept = [check_mask(m, g) for m, (_, g) in zip(given, pairs, strict=True)]
    if len({None if m is None else m.dtype for m in kept}) > 1:
        raise ValueError("masks must be all bool or all weights, one for each layer")
    return kept


def is_aligned(*tensors: Tensor) -> bool:
    """Whether rows are contiguous and start at multiples of 16 bytes."""
    return all(
        t.data_ptr() % ALIGNMENT == 0 and _has_aligned_rows(t.shape, t.stride(), t.dtype)
        for t in tensors
    )


@functools.lru_cache(maxsize=4096)
def _has_aligned_rows(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    *outer, inner = strides
    whole = ALIGNMENT // dtype.itemsize
    return inner == 1 and shape[-1] % whole == 0 and all(s % whole == 0 for s in outer)


def takes_tma(*tensors: Tensor) -> bool:
    """Whether the copy engine can read these tensors, and is there."""
    if any(t.dtype not in HALF or min(t.stride()) < 1 for t in tensors):
        return False
    there = interpreted() or (tensors[0].is_cuda and capability(tensors[0].device) >= 9)
    return there and is_aligned(*tensors)


@functools.cache
def capability(device: torch.device) -> int:
    """Major compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, at least."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def upload(numbers: Iterable[int], device: torch.device) -> Tensor:
    """The int64 numbers in a row on the device; nothing waits for it."""
    table = torch.frombuffer(array.array("q", numbers), dtype=torch.int64)
    if device.type != "cuda":
        return table
    return table.pin_memory().to(device, non_blocking=True)
