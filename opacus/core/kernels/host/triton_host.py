"""What several Triton kernels and their launches share; imports Triton, unlike ``operands``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    TensorDescriptor,
)

from opacus.core.kernels.host.launch import describe

TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.uint8: tl.uint8,
    torch.float8_e4m3fn: tl.float8e4nv,
}


@triton.jit  # type: ignore[untyped-decorator]
def row_of(  # type: ignore[no-untyped-def]  # noqa: ANN201
    program, table, count, COUNT: tl.constexpr, COLUMNS: tl.constexpr
):
    """The row of the table that a program works for: the last that starts at or before it."""
    lanes = tl.arange(0, COUNT)
    starts = tl.load(table + lanes * COLUMNS, mask=lanes < count, other=1 << 62)
    return table + (tl.sum((starts <= program).to(tl.int64)) - 1) * COLUMNS


@triton.jit  # type: ignore[untyped-decorator]
def number(row, column: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """An int64 of the table, known to be a multiple of ``WHOLE``."""
    return tl.multiple_of(tl.load(row + column), WHOLE)


@triton.jit  # type: ignore[untyped-decorator]
def address(place, TYPE: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """A pointer from the table, known to be aligned to 16 bytes if ``WHOLE > 1``."""
    pointer = tl.load(place).to(tl.pointer_type(TYPE))
    if WHOLE > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


def descriptor(tensor: Tensor, tokens: int, features: int) -> Any:
    """For the copy engine: blocks of so many tokens and features of one sample."""
    return describe(TensorDescriptor, tensor, (1, tokens, features))


def own_rows(norms: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """``[layers, most samples]`` to one ``[B]`` for each layer, B from ``sizes``."""
    most = norms.shape[1]
    rows = zip(norms.unbind(0), sizes, strict=True)
    return [row if size == most else row[:size] for row, size in rows]
