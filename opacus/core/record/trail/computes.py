"""Operations that compute elements from others, which have to be of one unit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from opacus.core.record.trail.labels import Labels, Lost, State, agree, lifted, reduced
from opacus.core.record.trail.op import EndedError, Handler, Op, is_number, of_main, together


def _reduce(op: Op, labels: Labels) -> Labels:
    """Sums, means, largest values, ... along some dimensions."""
    return reduced(labels, op.dims()) if op.get("keepdim") else _summed(labels, op.dims())


def _summed(labels: Labels, dims: Sequence[int]) -> Labels:
    labels = reduced(labels, dims)
    kept = [n for d, n in enumerate(labels.ids.shape) if d not in dims]
    return labels.with_ids(labels.ids.reshape(kept))


def _scan(op: Op, labels: Labels) -> Labels:
    """Results along a dimension that depend on all along it."""
    return reduced(labels, op.dims())


def _row(last: int) -> Handler:
    """Results that depend on all of the last dimensions, with others in their place."""

    def handle(op: Op, labels: Labels) -> Labels:
        first = op.main.dim() - last
        ids = reduced(labels, range(first, op.main.dim())).ids
        sizes = [*ids.shape[:first], *[1] * (op.out.dim() - first)]
        return labels.with_ids(ids.reshape(sizes))

    return of_main(handle)


def _renorm(op: Op, labels: Labels) -> Labels:
    return reduced(labels, [d for d in range(op.main.dim()) if d != op.dim()])


def _layer_norm(op: Op, labels: Labels) -> Labels:
    dims = op.main.dim()
    return reduced(labels, range(dims - len(op["normalized_shape"]), dims))


def _per_sample(op: Op) -> State | Sequence[State]:
    """Each entry of the first dimension by itself (convolutions, group norms)."""
    _refuse_parameters(op)
    labels = op.known(op.main)
    if labels is None:
        return None
    ids = reduced(labels, range(1, op.main.dim())).ids
    return [labels.with_ids(ids.reshape(-1, *[1] * (op.out.dim() - 1)))]


def _batch_norm(op: Op) -> State | Sequence[State]:
    """Channels over all else, unless their statistics are known already."""
    _refuse_parameters(op)
    labels = op.known(op.main)
    training = op.arguments.get("training", op.arguments.get("train"))
    fixed = op.name.endswith("no_training") or op.name.endswith("no_update")
    if labels is None or fixed or training is False:
        return labels if labels is None else [labels]
    return [reduced(labels, [d for d in range(op.main.dim()) if d != 1])]


def _each_entry(op: Op) -> Sequence[State]:
    """Each entry of the first dimension of all operands by itself."""
    operands = [a for a in op.arguments.values() if isinstance(a, Tensor)]
    return [_agreed([_inner(op, t, range(1, t.dim())) for t in operands], op.out.dim())]


def _refuse_parameters(op: Op) -> None:
    others = [a for a in op.arguments.values() if isinstance(a, Tensor) and a is not op.main]
    others = [a for a in others if is_number(a)]  # integers choose among the others' rows
    if any(op.state(t) is not None for t in others):
        raise EndedError(Lost(f"{op.name} with parameters that depend on samples"))


# --- products ---


def _inner(op: Op, tensor: Tensor, dims: Sequence[int]) -> Labels | None:
    """An operand of a product, all of whose elements along some dimensions are added up."""
    labels = op.known(tensor)
    return None if labels is None else reduced(labels, [d % tensor.dim() for d in dims])


def _agreed(parts: Sequence[Labels | None], dims: int) -> State:
    known = [part for part in parts if part is not None]
    if not known:
        return None
    labels = agree([part.with_ids(lifted(part.ids, dims)) for part in known])
    return labels.with_ids(lifted(labels.ids, dims))


def _matmul(left: str, right: str) -> Handler:
    """``[.., M, K]`` times ``[.., K, N]``, plus ``self`` in some variants."""

    def handle(op: Op) -> State:
        parts = [_inner(op, op[left], [-1]), _inner(op, op[right], [-2])]
        if left != "self":
            parts.append(op.known(op["self"]))
        return _agreed(parts, op.out.dim())

    return handle


def _linear(op: Op) -> State:
    _refuse_parameters(op)
    return _inner(op, op["input"], [-1])


def _head_loss(op: Op) -> Sequence[State]:
    """Losses ``[B, T]`` of hidden states ``[B, T, d]`` and targets ``[B, T]``."""
    hidden = _inner(op, op["hidden"], [-1])
    hidden = None if hidden is None else hidden.with_ids(hidden.ids.squeeze(-1))
    parts = [hidden, op.known(op["targets"])]
    return [_agreed(parts, 2)] * 2


def _mv(op: Op) -> State:
    vector = _inner(op, op["vec"], [0])
    rows = _inner(op, op["self"], [-1])
    rows = rows if rows is None else rows.with_ids(rows.ids.squeeze(-1))
    return _agreed([rows, vector], 1)


def _dot(op: Op) -> State:
    parts = [_inner(op, t, [0]) for t in op.arguments.values() if isinstance(t, Tensor)]
    return _agreed([p if p is None else p.with_ids(p.ids.reshape(())) for p in parts], 0)


def _cdist(op: Op) -> State:
    rows, columns = _inner(op, op["x1"], [-1]), _inner(op, op["x2"], [-1])
    turned = columns if columns is None else columns.with_ids(columns.ids.transpose(-1, -2))
    return _agreed([rows, turned], op.out.dim())


def _matrices(op: Op) -> Sequence[State]:
    """Each matrix of a stack by itself: inverses, decompositions, solutions."""
    operands = [a for a in op.arguments.values() if isinstance(a, Tensor)]
    known, stacked = [], 0
    for tensor in operands:
        # ``linalg.solve`` takes vectors too, and knows them by their shape.
        vectors = op.name == "_linalg_solve_ex" and tensor.shape == op.main.shape[:-1]
        first = tensor.dim() - (1 if vectors else 2)
        stacked = max(stacked, first)
        part = _inner(op, tensor, range(first, tensor.dim()))
        if part is not None:
            known.append(part.with_ids(part.ids.reshape(part.ids.shape[:first])))
    if not known:
        return [None] * len(op.results)
    labels = agree(known)
    stack = lifted(labels.ids, stacked).shape
    # Of two operands that are broadcast, only the solution is known to have their whole stack.
    results = op.results[: 1 if len(operands) > 1 else None]
    sizes = [[*stack, *[1] * (result.dim() - stacked)] for result in results]
    return [labels.with_ids(labels.ids.reshape(size)) for size in sizes]


def _trilinear(op: Op) -> State:
    """Products of elements of three operands, with further dimensions, along some added up."""
    parts = []
    for tensor, further in ((op[f"i{n}"], op[f"expand{n}"]) for n in (1, 2, 3)):
        labels = op.known(tensor)
        if labels is not None:
            ids = labels.ids
            for dim in further:
                ids = ids.unsqueeze(dim)
            parts.append(labels.with_ids(ids))
    return _summed(agree(parts), op["sumdim"]) if parts else None


def _cross(op: Op) -> State:
    state = together(op, [op["self"], op["other"]])
    return reduced(state, [op.dim()]) if isinstance(state, Labels) else state


def _grouped_matmul(op: Op) -> State:
    """Rows of the first by one matrix for each group of them; offsets say which are a group."""
    if op["mat2"].dim() != 3 or op.state(op["mat2"]) is not None:
        raise EndedError(Lost(f"{op.name} with matrices that depend on samples"))
    return _inner(op, op.main, [-1])


def _attention(op: Op) -> Sequence[State]:
    """Query, key, value ``[B, H, T, d]`` and a mask that is added to scores."""
    query, key, value = (op.arguments[n] for n in ("query", "key", "value"))
    parts = [
        _inner(op, query, [-1]),
        _inner(op, key, [-1, -2]),
        _inner(op, value, [-1, -2]),
    ]
    bias = op.get("attn_mask")
    bias = op.get("attn_bias") if bias is None else bias
    if isinstance(bias, Tensor) and bias.is_floating_point():
        parts.append(_inner(op, bias, [-1]))
    return [_agreed(parts, op.out.dim())]


def _solved(op: Op) -> State | Sequence[State]:
    """``[.., n, n]`` and ``[.., n, k]``: each column of the second is solved by itself."""
    matrix, columns = (a for a in op.arguments.values() if isinstance(a, Tensor))
    if op.get("left") is False or columns.shape == matrix.shape[:-1]:  # or vectors
        return _matrices(op)
    return _agreed([_inner(op, matrix, [-1, -2]), _inner(op, columns, [-2])], op.out.dim())


def _among(op: Op) -> State:
    """Where values lie among boundaries that are the same for all."""
    boundaries = op.get("boundaries") if op.name == "bucketize" else op.get("sorted_sequence")
    if boundaries is None or op.known(boundaries) is not None:
        return Lost(f"{op.name} with boundaries that depend on samples")
    return op.known(op["self"]) if isinstance(op["self"], Tensor) else None


def pointwise(op: Op) -> State:
    """One element of each operand, broadcast."""
    operands = [a for a in op.arguments.values() if isinstance(a, Tensor)]
    for value in op.arguments.values():
        if isinstance(value, (list, tuple)):
            operands += [v for v in value if isinstance(v, Tensor)]
    return together(op, operands)


def _constant(op: Op) -> State:
    return None


def _fill(op: Op) -> State:
    value = op["value"]
    labels = op.known(value) if isinstance(value, Tensor) else None
    return labels and labels.with_ids(lifted(labels.ids, op["self"].dim()))


def _drawn(op: Op) -> State:
    """Random numbers: whose the chances or means are that are given as tensors."""
    names = ("p", "mean", "std") if op.name != "bernoulli" or "p" in op.arguments else ("self",)
    return together(op, [t for t in map(op.get, names) if isinstance(t, Tensor)])


_REDUCE = (
    "sum nansum mean nanmean amax amin any all prod var std var_mean std_mean logsumexp max min "
    "linalg_vector_norm norm argmax argmin count_nonzero median nanmedian mode kthvalue aminmax"
)
_SCAN = (
    "_fft_r2c _fft_c2r _fft_c2c cumsum cumprod cummax cummin logcumsumexp _softmax _log_softmax "
    "_safe_softmax softmax log_softmax glu"
)
_PER_SAMPLE = (
    "convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution "
    "native_group_norm im2col col2im channel_shuffle native_channel_shuffle affine_grid_generator"
)
_BATCH_NORM = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "_batch_norm_with_update _batch_norm_no_update cudnn_batch_norm miopen_batch_norm"
)
_MATRICES = (
    "triangular_solve cholesky_solve linalg_inv_ex linalg_pinv linalg_cholesky_ex cholesky "
    "cholesky_inverse linalg_lu_factor_ex _linalg_slogdet _linalg_det _linalg_svd linalg_qr "
    "_linalg_eigh linalg_eig linalg_matrix_exp"
)
_EACH_ENTRY = "grid_sampler_2d grid_sampler_3d _thnn_fused_lstm_cell _thnn_fused_gru_cell"
_PLANE = (
    "max_pool{n}d_with_indices avg_pool{n}d adaptive_max_pool{n}d _adaptive_avg_pool{n}d "
    "adaptive_avg_pool{n}d reflection_pad{n}d replication_pad{n}d"
)
_SCALED = "upsample_nearest{n}d _upsample_nearest_exact{n}d"
# Elementwise, though torch does not say so.
_POINTWISE = "floor_divide complex polar angle _prelu_kernel isin"
_OF_EACH = "native_dropout _fused_dropout log_sigmoid_forward rrelu_with_noise poisson"
_CONSTANT = (
    "zeros ones full arange linspace logspace eye rand randn randint randperm scalar_tensor "
    "zero uniform exponential random tril_indices triu_indices"
)
# Constants in the shape, or of the type, of a tensor, whatever its values.
OF_SHAPES = frozenset(
    {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
    | {"new_zeros", "new_ones", "new_full", "empty_like", "new_empty", "new_empty_strided"}
)
COMPUTES: dict[str, Handler] = {
    **{name: of_main(_reduce) for name in _REDUCE.split()},
    **{name: of_main(_scan) for name in _SCAN.split()},
    "linalg_solve_triangular": _solved,
    "_linalg_solve_ex": _solved,
    "bucketize": _among,
    "searchsorted": _among,
    **{name: _per_sample for name in _PER_SAMPLE.split()},
    **{name: _batch_norm for name in _BATCH_NORM.split()},
    **{name.format(n=n): _row(n) for name in _PLANE.split() for n in (1, 2, 3)},
    **{name.format(n=n): _row(n) for name in _SCALED.split() for n in (1, 2, 3)},
    **{name: _matrices for name in _MATRICES.split()},
    **{name: _each_entry for name in _EACH_ENTRY.split()},
    **{name: _constant for name in (*_CONSTANT.split(), *OF_SHAPES)},
    "fill": _fill,
    **{name: pointwise for name in _POINTWISE.split()},
    **{name: of_main(lambda op, labels: labels) for name in _OF_EACH.split()},
    "bernoulli": _drawn,
    "normal": _drawn,
    "multinomial": _row(1),
    "renorm": of_main(_renorm),
    "linalg_cross": _cross,
    "_trilinear": _trilinear,
    "upsample_linear1d": _row(1),
    "upsample_bilinear2d": _row(2),
    "upsample_bicubic2d": _row(2),
    "_upsample_bilinear2d_aa": _row(2),
    "_upsample_bicubic2d_aa": _row(2),
    "max_unpool2d": _row(2),
    "fractional_max_pool2d": _row(2),
    "upsample_trilinear3d": _row(3),
    "pixel_shuffle": _row(3),
    "pixel_unshuffle": _row(3),
    "native_layer_norm": of_main(_layer_norm),
    "_fused_rms_norm": of_main(_layer_norm),
    "linear": _linear,
    "opacus::head_loss": _head_loss,
    "mm": _matmul("self", "mat2"),
    "bmm": _matmul("self", "mat2"),
    "addmm": _matmul("mat1", "mat2"),
    "baddbmm": _matmul("batch1", "batch2"),
    "mv": _mv,
    "dot": _dot,
    "vdot": _dot,
    "_cdist_forward": _cdist,
    "_grouped_mm": _grouped_matmul,
    **{
        f"_scaled_dot_product_{kind}": _attention
        for kind in (
            "flash_attention", "efficient_attention", "cudnn_attention", "attention_math",
            "fused_attention_overrideable", "flash_attention_for_cpu",
        )
    },
}  # fmt: skip
