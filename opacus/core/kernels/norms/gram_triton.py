"""What runs on the device: tiles of Gram matrices, multiplied element by element.

``gram`` launches these kernels and says what they compute.
"""

# Kernels have no annotations but Triton's own: it evaluates them when it compiles.

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from opacus.core.kernels.host.triton_host import address, number

# int64 numbers that describe an input: addresses of A and the mask; B, T, d; strides of A
# (3) and the mask (2); first backprops and how many. Backprops: address, p, strides (3).
INPUT_COLUMNS = 12
OUTPUT_COLUMNS = 5


@triton.jit  # type: ignore[untyped-decorator]
def _pair(slot, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column of the slot's tile; squares of ``GROUP`` tiles run next to each other.

    Some slots lie below the diagonal or beyond the last tile.
    """
    square = slot // (GROUP * GROUP)
    column = ((tl.sqrt(8.0 * square + 1.0) - 1.0) * 0.5).to(tl.int32)
    column = tl.where(column * (column + 1) // 2 > square, column - 1, column)
    column = tl.where((column + 1) * (column + 2) // 2 <= square, column + 1, column)
    row = square - column * (column + 1) // 2
    inside = slot % (GROUP * GROUP)
    return row * GROUP + inside % GROUP, column * GROUP + inside // GROUP


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(product, weights, stride, rows, columns, tokens):  # type: ignore[no-untyped-def]
    """Multiply by the weights of both tokens; what is masked may be NaN."""
    left = tl.load(weights + rows.to(tl.int64) * stride, mask=rows < tokens, other=0)
    right = tl.load(weights + columns.to(tl.int64) * stride, mask=columns < tokens, other=0)
    left, right = left.to(tl.float32)[:, None], right.to(tl.float32)[None, :]
    return tl.where((left != 0) & (right != 0), product * left * right, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _tma_gram(  # type: ignore[no-untyped-def]
    desc,
    sample,
    row,
    column,
    features,
    SIDE: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``[SIDE, SIDE]`` tile of a Gram matrix. What lies outside is read as zero."""
    gram = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in tl.range(0, features, K, num_stages=STAGES):
        left = desc.load([sample, row * SIDE, start]).reshape(SIDE, K)
        right = desc.load([sample, column * SIDE, start]).reshape(SIDE, K)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        gram = tl.dot(left, right.T, gram)
    return gram


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "d", "p0", "p1", "p2", "stride_b", "stride_t"]
)
def _tma_kernel(  # type: ignore[no-untyped-def]
    a_desc,
    g0_desc,
    g1_desc,
    g2_desc,
    weights,
    partial,
    tokens,
    d,
    p0,
    p1,
    p2,
    stride_b,
    stride_t,
    COUNT: tl.constexpr,
    MASK: tl.constexpr,
    SIDE: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One pair of tiles of tokens of one sample, for up to three backprops of one input."""
    slot, sample = tl.program_id(0), tl.program_id(1)
    row, column = _pair(slot, GROUP)
    tiles = tl.cdiv(tokens, SIDE)
    used = (row <= column) & (column < tiles)
    d, p0 = tl.where(used, d, 0), tl.where(used, p0, 0)
    p1, p2 = tl.where(used, p1, 0), tl.where(used, p2, 0)
    gram = _tma_gram(a_desc, sample, row, column, d, SIDE, K, STAGES, WIDEN)
    gram *= tl.where(row == column, 1.0, 2.0)
    if MASK:
        rows = row * SIDE + tl.arange(0, SIDE)
        columns = column * SIDE + tl.arange(0, SIDE)
        own = weights + sample.to(tl.int64) * stride_b
    out = partial + sample.to(tl.int64) * tl.num_programs(0) + slot
    sizes = COUNT * tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    for index in tl.static_range(COUNT):
        if index == 0:
            product = gram * _tma_gram(g0_desc, sample, row, column, p0, SIDE, K, STAGES, WIDEN)
        elif index == 1:
            product = gram * _tma_gram(g1_desc, sample, row, column, p1, SIDE, K, STAGES, WIDEN)
        else:
            product = gram * _tma_gram(g2_desc, sample, row, column, p2, SIDE, K, STAGES, WIDEN)
        if MASK:
            product = _weigh(product, own, stride_t, rows, columns, tokens)
        tl.store(out, tl.sum(tl.sum(product, 1), 0))
        tl.store(out + sizes, tl.sum(tl.sum(tl.abs(product), 1), 0))
        out += tl.num_programs(1).to(tl.int64) * tl.num_programs(0)


@triton.jit  # type: ignore[untyped-decorator]
def _table_gram(  # type: ignore[no-untyped-def]
    base, stride_t, stride_f, rows, columns, tokens, features,
    WHOLE: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """``[SIDE, SIDE]`` tile of a Gram matrix of a tensor of any strides."""
    gram = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    places = tl.arange(0, K)
    left_ptrs = base + rows.to(tl.int64)[:, None] * stride_t
    right_ptrs = base + columns.to(tl.int64)[:, None] * stride_t
    if WHOLE > 1:
        left_ptrs += places[None, :]
        right_ptrs += places[None, :]
        step = K
    else:
        left_ptrs += places[None, :] * stride_f
        right_ptrs += places[None, :] * stride_f
        step = K * stride_f
    for start in tl.range(0, features, K, num_stages=STAGES):
        inside = (places < features - start)[None, :]
        left = tl.load(left_ptrs, mask=inside & (rows < tokens)[:, None], other=0.0)
        right = tl.load(right_ptrs, mask=inside & (columns < tokens)[:, None], other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        # "ieee": fp32 is multiplied in fp32. tf32 would keep 11 bits of it.
        gram = tl.dot(left, tl.trans(right), gram, input_precision="ieee")
        left_ptrs += step
        right_ptrs += step
    return gram


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["samples", "slots", "inputs", "outputs"]
)
def _table_kernel(  # type: ignore[no-untyped-def]
    table,
    partial,
    samples,
    slots,
    inputs,
    outputs,
    TYPE: tl.constexpr,
    MASK: tl.constexpr,
    WHOLE: tl.constexpr,
    INPUT_COLUMNS: tl.constexpr,
    OUTPUT_COLUMNS: tl.constexpr,
    SIDE: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One pair of tiles of tokens of one sample of one input, for all its backprops."""
    sample = (tl.program_id(0) // slots).to(tl.int64)
    slot = tl.program_id(0) % slots
    entry = table + tl.program_id(1).to(tl.int64) * INPUT_COLUMNS
    a = address(entry, TYPE, WHOLE)
    tokens = tl.load(entry + 3).to(tl.int32)
    row, column = _pair(slot, GROUP)
    used = (sample < tl.load(entry + 2)) & (row <= column) & (column < tl.cdiv(tokens, SIDE))
    tokens = tl.where(used, tokens, 0)
    rows, columns = row * SIDE + tl.arange(0, SIDE), column * SIDE + tl.arange(0, SIDE)
    d = tl.multiple_of(tl.where(used, tl.load(entry + 4).to(tl.int32), 0), WHOLE)
    a += sample * number(entry, 5, WHOLE)
    gram = _table_gram(
        a, number(entry, 6, WHOLE), tl.load(entry + 7), rows, columns, tokens, d,
        WHOLE, SIDE, K, STAGES, WIDEN,
    )  # fmt: skip
    gram *= tl.where(row == column, 1.0, 2.0)
    first, count = tl.load(entry + 10), tl.load(entry + 11).to(tl.int32)
    for index in range(count):
        place = first + index
        output = table + inputs.to(tl.int64) * INPUT_COLUMNS + place * OUTPUT_COLUMNS
        g = address(output, TYPE, WHOLE)
        p = tl.multiple_of(tl.where(used, tl.load(output + 1).to(tl.int32), 0), WHOLE)
        g += sample * number(output, 2, WHOLE)
        product = gram * _table_gram(
            g, number(output, 3, WHOLE), tl.load(output + 4), rows, columns, tokens, p,
            WHOLE, SIDE, K, STAGES, WIDEN,
        )  # fmt: skip
        if MASK is not None:
            weights = tl.load(entry + 1).to(tl.pointer_type(MASK)) + sample * tl.load(entry + 8)
            product = _weigh(product, weights, tl.load(entry + 9), rows, columns, tokens)
        out = partial + (place * samples + sample) * slots + slot
        tl.store(out, tl.sum(tl.sum(product, 1), 0))
        out += outputs.to(tl.int64) * samples * slots
        tl.store(out, tl.sum(tl.sum(tl.abs(product), 1), 0))
