"""Host code shared by the Triton kernels: checks, tile sizes, tables of pointers."""

from __future__ import annotations

import array
import functools
import importlib.util
import itertools
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
SUPPORTED = (*HALF, torch.float32)
# What gradients may be stored in, its largest number, and from which compute capability on a card
# converts it itself.
FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
_CONVERTS_FLOAT8 = (8, 9)
# Bytes to which the copy engine (TMA) and 16-byte loads need addresses and strides aligned.
ALIGNMENT = 16
# Features of a normalisation layer that one program holds.
MOST_FEATURES = 16384
# Strides of a missing mask.
NO_STRIDES = (0, 0)


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
        return _fitted(self, power_of_two(m, 64), power_of_two(n, 16))

    def _fit(self, m: int, n: int) -> Tile:
        rows, columns = min(self.m, m), min(self.n, n)
        small = rows * columns <= 64 * 64
        return replace(self, m=rows, n=columns, warps=min(self.warps, 4) if small else self.warps)

    def __str__(self) -> str:
        way = "specialised" if self.specialised else "tma" if self.tma else "pointers"
        return f"{self.m}x{self.n}x{self.k} w{self.warps} s{self.stages} g{self.group} {way}"


@functools.lru_cache(maxsize=1024)
def _fitted(tile: Tile, m: int, n: int) -> Tile:
    return tile._fit(m, n)


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``least``."""
    return max(least, 1 << max(0, size - 1).bit_length())


def parts(size: int, part: int) -> int:
    """Number of parts that cover ``size``; Triton's own function takes microseconds."""
    return -(-size // part)


def blank(shape: Sequence[int], device: torch.device) -> Tensor:
    """Uninitialised fp32 memory that a kernel fills; tests put NaN there first."""
    return torch.empty(shape, dtype=torch.float32, device=device)


@functools.cache
def triton_is_installed() -> bool:
    """Whether the package is there; it is not imported."""
    return importlib.util.find_spec("triton") is not None


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
        raise _not_a_pair(a.shape, g.shape)
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


def _not_a_pair(a: torch.Size, g: torch.Size) -> ValueError:
    return ValueError(
        f"activations must be [B, T, d] and backprops [B, T, p], got {list(a)} and {list(g)}"
    )


def check_dtype(tensor: Tensor) -> None:
    """Refuse dtypes that the kernels do not support.

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


_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")


class Group(NamedTuple):
    """Layers that one launch takes: of one dtype, on one device.

    Attributes:
        tensors: Activations and backprops of each layer in turn.
        masks: A checked mask for each layer, of one kind.
        shapes: Of each tensor; checked by the kernels' plans, which know those of the last step.
        strides: Of each tensor.
        mask_strides: Of each mask, one pair for all where there are none.
    """

    tensors: list[Tensor]
    masks: list[Tensor] | None
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    mask_strides: tuple[tuple[int, ...], ...]

    @property
    def mask_dtype(self) -> torch.dtype | None:
        """uint8 for bool masks, fp32 for weights, ``None`` without masks."""
        return self.masks[0].dtype if self.masks else None


def group_of(
    pairs: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor] | None
) -> Group | None:
    """Pairs ``[B, T, d]`` and ``[B, T, p]`` as a group, ``None`` where dtypes or devices differ.

    Raises:
        ValueError: Masks of different kinds.
    """
    # No loop of its own for each tensor: this is done for hundreds of layers in each step.
    tensors = list(itertools.chain.from_iterable(pairs))
    if len(set(map(_DTYPE, tensors))) > 1 or len(set(map(Tensor.get_device, tensors))) > 1:
        return None
    shapes, strides = tuple(map(_SHAPE, tensors)), tuple(map(Tensor.stride, tensors))
    if not masks:
        return Group(tensors, None, shapes, strides, (NO_STRIDES,))
    checked = [check_mask(m, g) for m, (_, g) in zip(masks, pairs, strict=True)]
    kept = [mask for mask in checked if mask is not None]
    if len(set(map(_DTYPE, kept))) != 1 or len(kept) < len(checked):
        raise ValueError("masks must be all bool or all weights, one for each layer")
    return Group(tensors, kept, shapes, strides, tuple(map(Tensor.stride, kept)))


def checked_group(pairs: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor] | None) -> Group:
    """:func:`group_of`; both tensors of a pair get the wider dtype of theirs.

    Raises:
        ValueError: Layers of different dtypes or devices, or masks of different kinds.
        TypeError: A dtype that the kernels do not know.
    """
    group = group_of(pairs, masks)
    if group is None:
        group = group_of([check_pair(a, g) for a, g in pairs], masks)
    if group is None:
        raise ValueError("all layers of one launch must have the same dtype and device")
    check_dtype(group.tensors[0])
    return group


def check_shapes(shapes: Sequence[torch.Size]) -> None:
    """Refuse pairs that are not ``[B, T, d]`` and ``[B, T, p]``.

    Raises:
        ValueError: Names the shapes.
    """
    for a, g in zip(shapes[::2], shapes[1::2], strict=True):
        if not _is_pair(a, g):
            raise _not_a_pair(a, g)


def whole_of(
    shapes: Sequence[torch.Size], strides: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> int:
    """A divisor of sizes and strides, if they are multiples of 16 bytes; else 1.

    Then rows are contiguous and all lie at multiples of 16 bytes if the first one does.
    """
    pairs = zip(shapes, strides, strict=True)
    aligned = all(_has_aligned_rows(shape, own, dtype) for shape, own in pairs)
    return ALIGNMENT // dtype.itemsize if aligned else 1


def addresses(tensors: Iterable[Tensor]) -> array.array[int]:
    """Addresses of the tensors."""
    return array.array("q", map(Tensor.data_ptr, tensors))


def all_aligned(places: Iterable[int]) -> bool:
    """Whether all addresses are multiples of 16 bytes."""
    return functools.reduce(operator.or_, places, 0) % ALIGNMENT == 0


@functools.lru_cache(maxsize=4096)
def _has_aligned_rows(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    *outer, inner = strides
    whole = ALIGNMENT // dtype.itemsize
    return inner == 1 and shape[-1] % whole == 0 and all(s % whole == 0 for s in outer)


def takes_tma(*tensors: Tensor) -> bool:
    """Whether the copy engine can read these tensors, and is there."""
    first = tensors[0]
    there = capability(first.device) >= 9 if first.is_cuda else interpreted()
    return there and all(_takes_tma(t) for t in tensors)


def _takes_tma(tensor: Tensor) -> bool:
    strides = tensor.stride()
    return (
        tensor.dtype in HALF
        and tensor.data_ptr() % ALIGNMENT == 0
        and _has_aligned_rows(tensor.shape, strides, tensor.dtype)
        and min(strides) >= 1
    )


@functools.cache
def capability(device: torch.device) -> int:
    """Major compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Smallest number of programs that run at once."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def upload(numbers: Iterable[int], device: torch.device) -> Tensor:
    """The int64 numbers in a row on the device; nothing waits for it."""
    if not isinstance(numbers, array.array):
        numbers = array.array("q", numbers)
    table = torch.frombuffer(numbers, dtype=torch.int64)
    if device.type != "cuda":
        return table
    return table.pin_memory().to(device, non_blocking=True)


@functools.cache
def converts_float8(device: int) -> bool:
    """Whether Triton's kernels can read and write :data:`FLOAT8` on a GPU."""
    return torch.cuda.get_device_capability(device) >= _CONVERTS_FLOAT8
