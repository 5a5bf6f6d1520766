"""Warp-specialised norm kernels for compute capability 9.0, in Triton's Gluon.

One warp keeps the copy engine busy, two groups of four multiply; programs stay and take one
tile after the other, so that the next operands arrive while a tile is summed. The same two
algorithms as in ``width`` and ``gram``, for aligned half-precision tensors
without a mask. Letters: B samples, T tokens, d and p features.
"""

# Kernels have no annotations but Gluon's own: it evaluates them when it compiles.

from __future__ import annotations

import functools
import logging

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.experimental import gluon  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.experimental.gluon import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    language as gl,
)
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    TensorDescriptor,
)

from opacus.core.kernels.host import operands
from opacus.core.kernels.host.launch import Variant, describe
from opacus.core.kernels.host.operands import Tile

logger = logging.getLogger(__name__)

WIDTH_TILES = (
    Tile(128, 256, 64, warps=8, stages=4, specialised=True),
    Tile(256, 128, 64, warps=8, stages=4, specialised=True),
    Tile(128, 128, 64, warps=8, stages=6, specialised=True),
)
GRAM_TILES = (Tile(128, 128, 64, warps=8, stages=6, specialised=True),)
# Registers of a thread of the second multiplying group, and of the copying warp.
MULTIPLY_REGISTERS, COPY_REGISTERS = gl.constexpr(232), gl.constexpr(24)
# Triton 3.9 gave it a new name.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit  # type: ignore[untyped-decorator]
def _next(stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The buffer after this one; the phase of its barriers turns with each round."""
    stage += 1
    return gl.where(stage == STAGES, 0, stage), gl.where(stage == STAGES, phase ^ 1, phase)


@gluon.jit  # type: ignore[untyped-decorator]
def _buffers(desc, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Shared memory for blocks of a tensor."""
    shape: gl.constexpr = [STAGES] + desc.block_type.shape  # noqa: RUF005
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit  # type: ignore[untyped-decorator]
def _barriers(STAGES: gl.constexpr, READERS: gl.constexpr):  # type: ignore[no-untyped-def]
    """For each buffer: one that says it is filled, one that all readers are done with it."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return ready, empty


# --- width: tiles of A^T G ---


@gluon.jit  # type: ignore[untyped-decorator]
def _copy_width(  # type: ignore[no-untyped-def]
    a_desc, g_desc, upper, lower, right, ready, empty, steps, total, m_tiles, n_tiles,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Fill the buffers, in the order in which they are read."""
    stage, phase = 0, 1
    for place in range(gl.program_id(0), total, gl.num_programs(0)):
        sample, tile = place // (m_tiles * n_tiles), place % (m_tiles * n_tiles)
        # Neighbours share operands, which then stay in the cache.
        first = tile // (GROUP * n_tiles) * GROUP
        height = gl.minimum(m_tiles - first, GROUP)
        inside = tile % (GROUP * n_tiles)
        row, column = (first + inside % height) * M, inside // height * N
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            bar = ready.index(stage)
            # What lies outside of the tensor is filled with zeros.
            mbarrier.expect(bar, (M + N) * K * 2)
            _load(g_desc, [sample, step * K, column], bar, right.index(stage))
            _load(a_desc, [sample, step * K, row], bar, upper.index(stage))
            _load(a_desc, [sample, step * K, row + M // 2], bar, lower.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_width(  # type: ignore[no-untyped-def]
    partial, left, right, ready, empty, steps, total,
    HALF: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sum of squares of the upper or lower half of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    stage, phase = 0, 0
    for place in range(gl.program_id(0), total, gl.num_programs(0)):
        product = gl.zeros([M, N], gl.float32, layout)
        last = 0  # not `stage`: Triton would take one name for the other
        for step in range(steps):
            mbarrier.wait(ready.index(stage), phase)
            a = left.index(stage).reshape([K, M]).permute([1, 0])
            g = right.index(stage).reshape([K, N])
            product = warpgroup_mma(a, g, product, use_acc=step > 0, is_async=True)
            # The multiplication before this one is done with its buffer.
            product = warpgroup_mma_wait(1, deps=[product])
            mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
            last = stage
            stage, phase = _next(stage, phase, STAGES)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(last), count=1)
        gl.store(partial + place * 2 + HALF, gl.sum(gl.sum(product * product, 1), 0))


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "total", "m_tiles", "n_tiles"]
)
def _width_kernel(  # type: ignore[no-untyped-def]
    a_desc, g_desc, partial, tokens, total, m_tiles, n_tiles,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    upper = _buffers(a_desc, STAGES)
    lower = _buffers(a_desc, STAGES)
    right = _buffers(g_desc, STAGES)
    ready, empty = _barriers(STAGES, 2)
    steps = (tokens + K - 1) // K
    H: gl.constexpr = M // 2
    gl.warp_specialize(
        [
            (_multiply_width, (partial, upper, right, ready, empty, steps, total,
                               0, H, N, K, STAGES)),
            (_multiply_width, (partial, lower, right, ready, empty, steps, total,
                               1, H, N, K, STAGES)),
            (_copy_width, (a_desc, g_desc, upper, lower, right, ready, empty, steps, total,
                           m_tiles, n_tiles, M, N, K, STAGES, GROUP)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def width_norm_sq(a: Tensor, g: Tensor, tile: Tile = WIDTH_TILES[0]) -> Tensor:
    """``||A_i^T G_i||_F^2`` from tiles of the product.

    Args:
        a: ``[B, T, d]``, half precision, as :func:`operands.takes_tma` wants it; not empty.
        g: ``[B, T, p]``, likewise.
        tile: Variant of the kernel.

    Returns:
        ``[B]`` in fp32.
    """
    batch, tokens, d = a.shape
    m_tiles, n_tiles = operands.parts(d, tile.m), operands.parts(g.shape[2], tile.n)
    total = batch * m_tiles * n_tiles
    partial = operands.blank((batch, m_tiles * n_tiles * 2), a.device)
    _width_variant(tile)(
        (min(total, operands.multiprocessors(a.device)),),
        _descriptor(a, tile.k, tile.m // 2),
        _descriptor(g, tile.k, tile.n),
        partial,
        tokens,
        total,
        m_tiles,
        n_tiles,
    )
    return partial.sum(1)


@functools.cache
def _width_variant(tile: Tile) -> Variant:
    return Variant(
        _width_kernel,
        M=tile.m,
        N=tile.n,
        K=tile.k,
        STAGES=tile.stages,
        GROUP=tile.group,
        num_warps=4,
    )


# --- input_length: tiles of A A^T and G G^T ---


@gluon.jit  # type: ignore[untyped-decorator]
def _corner(pair, tiles, BAND: gl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column of a pair of tiles on or above the diagonal.

    Bands of columns follow each other; within a band all columns of a row do, so that
    neighbours share operands.
    """
    root = ((gl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(gl.int32)
    root = gl.where(root * (root + 1) // 2 > pair, root - 1, root)
    root = gl.where((root + 1) * (root + 2) // 2 <= pair, root + 1, root)
    first = root // BAND * BAND
    width = gl.minimum(tiles - first, BAND)
    inside = pair - first * (first + 1) // 2
    row, column = inside // width, inside % width
    # Below the rectangle lies a triangle.
    rest = inside - first * width
    side = ((gl.sqrt(8.0 * rest + 1.0) - 1.0) * 0.5).to(gl.int32)
    side = gl.where(side * (side + 1) // 2 > rest, side - 1, side)
    side = gl.where((side + 1) * (side + 2) // 2 <= rest, side + 1, side)
    row = gl.where(rest >= 0, first + rest - side * (side + 1) // 2, row)
    return row, first + gl.where(rest >= 0, side, column)


@gluon.jit  # type: ignore[untyped-decorator]
def _copy_rows(  # type: ignore[no-untyped-def]
    desc, sample, row, column, steps, rows, columns, ready, empty, stage, phase,
    M: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the next ``steps`` buffers with all features of two tiles of tokens."""
    for step in range(steps):
        mbarrier.wait(empty.index(stage), phase)
        bar = ready.index(stage)
        mbarrier.expect(bar, 2 * M * K * 2)
        where = step * K
        _load(desc, [sample, row * M, where], bar, rows.index(stage))
        _load(desc, [sample, column * M, where], bar, columns.index(stage))
        stage, phase = _next(stage, phase, STAGES)
    return stage, phase


@gluon.jit  # type: ignore[untyped-decorator]
def _copy_gram(  # type: ignore[no-untyped-def]
    a_desc, g_desc, rows, columns, ready, empty, a_steps, g_steps, total, pairs, tiles,
    M: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Fill the buffers: first all of A, then all of G."""
    stage, phase = 0, 1
    for place in range(gl.program_id(0), total, gl.num_programs(0)):
        sample = place // pairs
        row, column = _corner(place % pairs, tiles, GROUP)
        stage, phase = _copy_rows(
            a_desc, sample, row, column, a_steps, rows, columns, ready, empty, stage, phase,
            M, K, STAGES,
        )  # fmt: skip
        stage, phase = _copy_rows(
            g_desc, sample, row, column, g_steps, rows, columns, ready, empty, stage, phase,
            M, K, STAGES,
        )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _gram(  # type: ignore[no-untyped-def]
    rows, columns, ready, empty, stage, phase, steps,
    M: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """``[M, M]`` tile of a Gram matrix from the next ``steps`` buffers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, M, 16]
    )
    gram = gl.zeros([M, M], gl.float32, layout)
    last = 0
    for step in range(steps):
        mbarrier.wait(ready.index(stage), phase)
        left = rows.index(stage).reshape([M, K])
        right = columns.index(stage).reshape([M, K]).permute([1, 0])
        gram = warpgroup_mma(left, right, gram, use_acc=step > 0, is_async=True)
        gram = warpgroup_mma_wait(1, deps=[gram])
        mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
        last = stage
        stage, phase = _next(stage, phase, STAGES)
    gram = warpgroup_mma_wait(0, deps=[gram])
    mbarrier.arrive(empty.index(last), count=1)
    return gram, stage, phase


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_gram(  # type: ignore[no-untyped-def]
    partial, rows, columns, ready, empty, a_steps, g_steps, total, pairs, tiles,
    M: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Sum over a pair of tiles of the product of both Gram matrices."""
    stage, phase = 0, 0
    for place in range(gl.program_id(0), total, gl.num_programs(0)):
        row, column = _corner(place % pairs, tiles, GROUP)
        of_a, stage, phase = _gram(
            rows, columns, ready, empty, stage, phase, a_steps, M, K, STAGES, WARPS
        )
        of_g, stage, phase = _gram(
            rows, columns, ready, empty, stage, phase, g_steps, M, K, STAGES, WARPS
        )
        product = of_a * of_g * gl.where(row == column, 1.0, 2.0)
        gl.store(partial + place, gl.sum(gl.sum(product, 1), 0))
        gl.store(partial + total + place, gl.sum(gl.sum(gl.abs(product), 1), 0))


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["d", "p", "total", "pairs", "tiles"]
)
def _gram_kernel(  # type: ignore[no-untyped-def]
    a_desc, g_desc, partial, d, p, total, pairs, tiles,
    M: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    rows = _buffers(a_desc, STAGES)
    columns = _buffers(a_desc, STAGES)
    ready, empty = _barriers(STAGES, 1)
    a_steps, g_steps = (d + K - 1) // K, (p + K - 1) // K
    gl.warp_specialize(
        [
            (_multiply_gram, (partial, rows, columns, ready, empty, a_steps, g_steps, total,
                              pairs, tiles, M, K, STAGES, GROUP, WARPS)),
            (_copy_gram, (a_desc, g_desc, rows, columns, ready, empty, a_steps, g_steps, total,
                          pairs, tiles, M, K, STAGES, GROUP)),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip


def gram_sums(a: Tensor, g: Tensor, tile: Tile = GRAM_TILES[0]) -> Tensor:
    """``||A_i^T G_i||_F^2`` from tiles of both Gram matrices, on and above the diagonal.

    ``direct.settle`` adds the parts up, and computes again what has cancelled.

    Args:
        a: ``[B, T, d]``, half precision, as :func:`operands.takes_tma` wants it; not empty.
        g: ``[B, T, p]``, likewise.
        tile: Variant of the kernel.

    Returns:
        ``[2, B, pairs]`` in fp32: the sums over pairs of tiles, and those of absolute values.
    """
    batch, tokens, d = a.shape
    tiles = operands.parts(tokens, tile.m)
    pairs = tiles * (tiles + 1) // 2
    partial = operands.blank((2, batch, pairs), a.device)
    _gram_variant(tile)(
        (min(batch * pairs, operands.multiprocessors(a.device)),),
        _descriptor(a, tile.m, tile.k),
        _descriptor(g, tile.m, tile.k),
        partial,
        d,
        g.shape[2],
        batch * pairs,
        pairs,
        tiles,
    )
    return partial


@functools.cache
def _gram_variant(tile: Tile) -> Variant:
    return Variant(
        _gram_kernel,
        M=tile.m,
        K=tile.k,
        STAGES=tile.stages,
        GROUP=tile.group,
        WARPS=tile.warps,
        num_warps=tile.warps,
    )


def _descriptor(tensor: Tensor, tokens: int, features: int) -> TensorDescriptor:
    """For the copy engine: blocks of so many tokens and features of one sample."""
    layout = _shared_layout(tokens, features, tensor.dtype)
    return describe(TensorDescriptor, tensor, (1, tokens, features), layout)


@functools.cache
def _shared_layout(tokens: int, features: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, tokens, features], TYPES[dtype])


@functools.cache
def works(device: torch.device) -> bool:
    """Whether the kernels compile on this card and give the right norms.

    Gluon changes between versions of Triton, so a small case is tried once, with odd sizes and more
    tiles than one program. Where it fails, the kernels of ``width`` and ``gram`` are used.
    """
    if operands.interpreted() or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    draw = torch.Generator(device).manual_seed(0)
    shapes = ((3, 333, 2056), (3, 333, 2312))
    a, g = (torch.randn(s, generator=draw, device=device).bfloat16() for s in shapes)
    want = torch.bmm(a.float().mT, g.float()).square().sum((1, 2))
    try:
        for tile in WIDTH_TILES:
            torch.testing.assert_close(width_norm_sq(a, g, tile), want, rtol=1e-4, atol=0)
        for tile in GRAM_TILES:
            norms = gram_sums(a, g, tile)[0].sum(1)
            torch.testing.assert_close(norms, want, rtol=1e-4, atol=0)
    except Exception as error:  # whatever a compiler of another version raises
        logger.warning(
            "the Gluon kernels are not used with Triton %s: %s", triton.__version__, error
        )
        return False
    return True
