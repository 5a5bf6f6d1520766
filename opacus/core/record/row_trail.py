"""Tracks which tensors have one row per sample while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from opacus.core.rules.spec import LayerSpec


class SampleRows(TorchFunctionMode):
    """Follows three kinds of tensors from operation to operation.

    *Rows of samples*: an input has them; what is computed from such a tensor row by row has, too.
    ``mask.cumsum(1)`` has rows of samples, ``arange(T)`` and ``mask[0]`` have not, whatever
    their size. The output of a layer is taken to have them, which is what clipping relies on.

    *Fixed*: computed from nothing but parameters, buffers and ``arange``, so that the number of
    rows has nothing to do with that of the samples. ``expand``, ``repeat`` and all that is not
    known end this trail: a learned query that was expanded to the batch is not fixed.

    *Moved*: the output of a layer with new dimensions in front, such as ``positions[None]``.

    Unknown operations end a trail: false negatives are possible, false positives are not. Tensors
    are not kept alive.

    Args:
        inputs: Of the model; those whose first dimension is ``batch`` are of samples.
        batch: Number of samples.
        fixed: Buffers of the model.
    """

    def __init__(self, inputs: Iterable[Tensor], batch: int, fixed: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._batch = batch
        # Stride between rows, and the layer that the rows have come through, if there is one.
        self._found: dict[Tensor, tuple[int, LayerSpec | None]] = _weak()
        self._fixed: dict[Tensor, bool] = _weak()
        self._moved: dict[Tensor, LayerSpec] = _weak()
        for tensor in fixed:
            self._fixed[tensor] = True
        for tensor in inputs:
            self._fixed.pop(tensor, None)
            self._note(tensor)

    # --- what is known ---

    def has(self, tensor: Tensor) -> bool:
        """Whether row i of the tensor is known to be of sample i."""
        found = self._found.get(tensor)
        return found is not None and found[0] == tensor.stride(0)  # not so after t_()

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether neither the tensor nor its size depends on an input of the model."""
        return isinstance(tensor, nn.Parameter) or tensor in self._fixed

    def note_layer(self, spec: LayerSpec, inputs: Iterable[Any], output: Tensor) -> None:
        """A layer that is clipped row by row has run.

        Raises:
            ValueError: Its rows are no samples; names the layer.
        """
        given = [t for t in inputs if isinstance(t, Tensor)]
        rows = any(t.dim() and t.shape[0] == self._batch for t in given)
        if rows and all(self.is_fixed(t) for t in given):
            shapes = ", ".join(str(tuple(t.shape)) for t in given)
            raise ValueError(
                f"{spec} is given {shapes}, computed from no input of the model. With "
                f"{self._batch} samples, as many as it has rows, it would be clipped by row "
                "instead of by sample: give it one row for all samples (unsqueeze(0)) or one for "
                "each (expand), or freeze it"
            )
        self._note(output, spec)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.compiler.is_compiling():  # else what is compiled now would be this, too
            return result
        written = getattr(func, "__name__", "")
        if written == "__get__":
            return result
        name = written.strip("_")
        if written == "__setitem__":
            self._note_assignment(*args)
        elif type(result) is Tensor and result.dim():
            if not args or not any(isinstance(a, (Tensor, tuple, list)) for a in args):
                if name in _FIXED_SIZE:
                    self._fixed[result] = True
                return result
            self._follow(name, result, args, kwargs)
        in_place = written == "__setitem__" or (written[-1:] == "_" and written[:2] != "__")
        if in_place or isinstance(kwargs.get("out"), Tensor):
            self._forget_written(args, kwargs)
        return result

    # --- trails ---

    def _follow(self, name: str, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> None:
        keeps, first = _KEEPS.get(name), args[0]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in _COMBINES:
            self._refuse_mixed(result, tensors)
        if keeps is not None and keeps(self, result, args, kwargs):
            self._note(result, self._layer_of(tensors))
        elif isinstance(first, Tensor):
            self._follow_moved(name, result, first, args[1:])
        if name in _KEEPS or name in _FIXED_TOO:
            self._follow_fixed(name, result, tensors)

    def _note(self, tensor: Tensor, spec: LayerSpec | None = None) -> None:
        if tensor.dim() and tensor.shape[0] == self._batch:
            self._found[tensor] = (tensor.stride(0), spec)

    def _note_assignment(self, target: Any, index: Any, value: Any) -> None:
        """``target[:, ...] = value`` with rows of samples on the right."""
        rows = isinstance(value, Tensor) and self.has(value) and _all_rows(index)
        if rows and type(target) is Tensor and value.dim() == target.dim():
            self._note(target, self._layer_of([value]))

    def _layer_of(self, tensors: Iterable[Tensor]) -> LayerSpec | None:
        found = (self._found.get(t) for t in tensors)
        return next((f[1] for f in found if f is not None and f[1] is not None), None)

    def _follow_fixed(self, name: str, result: Tensor, tensors: list[Tensor]) -> None:
        if name in _TYPE_OF_SECOND:
            tensors = tensors[:1]
        if not all(t.dim() == 0 or self.is_fixed(t) for t in tensors):
            return
        rows = {t.shape[0] for t in tensors if t.dim() == result.dim()}
        if name not in _SAME_ROWS or result.shape[0] in rows:
            self._fixed[result] = True

    def _forget_written(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """What was changed in place with values that are not fixed is not fixed any more."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if all(self.is_fixed(t) for t in tensors[1:]):
            return
        target = kwargs.get("out", tensors[0])
        place = target.untyped_storage().data_ptr()
        for tensor in list(self._fixed):
            if tensor is target or tensor.untyped_storage().data_ptr() == place:
                self._fixed.pop(tensor, None)

    def _follow_moved(
        self, name: str, result: Tensor, first: Tensor, others: tuple[Any, ...]
    ) -> None:
        spec = self._moved.get(first)
        if spec is not None and result.shape == first.shape:
            self._moved[result] = spec
            return
        found = self._found.get(first)
        if found is None or found[1] is None or name not in _IN_FRONT:
            return
        new = result.dim() - first.dim()
        if new <= 0 or result.shape[new:] != first.shape:
            return
        if name != "getitem" or tree_leaves(others)[0] is None:  # else rows were picked
            self._moved[result] = found[1]

    def _refuse_mixed(self, result: Tensor, tensors: list[Tensor]) -> None:
        """Rows that are broadcast along another dimension of samples' rows are no samples."""
        if not result.requires_grad or result.dim() < 2:
            return
        if not any(t.dim() == result.dim() and self.has(t) for t in tensors):
            return
        for tensor in tensors:
            spec, rows = self._moved.get(tensor), self._found.get(tensor)
            if spec is None and rows is not None and tensor.dim() < result.dim():
                spec = rows[1]
            if spec is not None:
                raise ValueError(
                    f"what comes from {spec}, {tuple(tensor.shape)}, is combined with a tensor "
                    f"{tuple(result.shape)} of the {self._batch} samples, along another dimension "
                    "than that of the samples: its rows are no samples, and it would be clipped "
                    "by row. Give the layer one row for all samples (unsqueeze(0)) or one for "
                    "each (expand), or freeze it"
                )

    # --- which results have rows of samples ---

    def _elementwise(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        given = tree_leaves((args, kwargs))
        return any(isinstance(t, Tensor) and self.has(t) and t.shape == result.shape for t in given)

    def _like_first(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        """The same rows in another form; other arguments give a type or a shape only."""
        return self._has_first(args) and result.shape == args[0].shape

    def _row_by_row(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        """A function of each row of the first argument."""
        return self._has_first(args) and args[0].dim() > 1

    def _looked_up(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        return self._has_first(args)

    def _flattened(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0)
        return self._has_first(args) and isinstance(start, int) and start % args[0].dim() != 0

    def _regrouped(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        return self._has_first(args) and result.numel() == args[0].numel()

    def _turned(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        """``transpose`` of two dimensions none of which is the first."""
        dims = (*args[1:], *kwargs.values())
        plain = len(dims) == 2 and all(isinstance(d, int) for d in dims)
        return self._has_first(args) and plain and all(d % result.dim() for d in dims)

    def _permuted(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        dims = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
        leads = isinstance(dims, (tuple, list)) and len(dims) > 0 and dims[0] == 0
        return self._has_first(args) and leads

    def _along(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Within rows, along a dimension that is not the first."""
        tensors = args[0] if isinstance(args[0], (tuple, list)) else [args[0]]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        known = [isinstance(t, Tensor) and self.has(t) for t in tensors]
        return isinstance(dim, int) and dim % result.dim() != 0 and any(known)

    def _unsqueezed(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return isinstance(dim, int) and dim % result.dim() != 0 and self._has_first(args)

    def _padded(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        pad = kwargs.get("pad", args[1] if len(args) > 1 else ())
        return self._has_first(args) and len(pad) < 2 * args[0].dim()

    def _selected(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        return self._has_first(args) and _all_rows(args[1])

    def _has_first(self, args: tuple[Any, ...]) -> bool:
        return bool(args) and isinstance(args[0], Tensor) and self.has(args[0])


def _weak() -> Any:
    return WeakTensorKeyDictionary()


def _all_rows(index: Any) -> bool:
    """Whether ``tensor[index]`` keeps every row: ``[:, ...]``, with numbers and slices."""
    parts = index if isinstance(index, tuple) else (index,)
    first = parts[0] if parts else None
    plain = all(part is None or isinstance(part, (int, slice)) for part in parts[1:])
    return isinstance(first, slice) and first == slice(None) and plain


# --- names of functions, underscores around them left out ---

_Keeps = Callable[[SampleRows, Tensor, tuple[Any, ...], Any], bool]

_ELEMENTWISE = (
    "add sub rsub mul rmul radd iadd isub imul div truediv floordiv floor_divide remainder mod "
    "fmod neg abs clamp clip clamp_min clamp_max minimum maximum where masked_fill eq ne lt le gt "
    "ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not and or invert"
)
_LIKE_FIRST = (
    "long int short bool float half bfloat16 double to type type_as clone detach contiguous "
    "zeros_like ones_like full_like dropout relu gelu silu tanh sigmoid sin cos exp"
)
# Whether a result has rows of samples.
_KEEPS: dict[str, _Keeps] = {
    **dict.fromkeys(_ELEMENTWISE.split(), SampleRows._elementwise),
    **dict.fromkeys(_LIKE_FIRST.split(), SampleRows._like_first),
    **dict.fromkeys(("view", "reshape"), SampleRows._regrouped),
    **dict.fromkeys(("cumsum", "cumprod", "cat", "concat"), SampleRows._along),
    **dict.fromkeys(("linear", "layer_norm"), SampleRows._row_by_row),
    "transpose": SampleRows._turned,
    "permute": SampleRows._permuted,
    "unsqueeze": SampleRows._unsqueezed,
    "pad": SampleRows._padded,
    "getitem": SampleRows._selected,
    "embedding": SampleRows._looked_up,
    "flatten": SampleRows._flattened,
}
# Results of these, without a tensor among the arguments, are fixed.
_FIXED_SIZE = frozenset(("arange", "linspace", "tril_indices", "triu_indices"))
# Results of these, and of those above, are fixed if all tensors that they get are.
_FIXED_TOO = ("narrow", "select", "squeeze", "t", "matmul", "outer", "sqrt", "pow", "rpow", "log")
_COMBINES = frozenset(_ELEMENTWISE.split())
_SAME_ROWS = _COMBINES | {"cat", "concat", "matmul"}  # as one of them has
_TYPE_OF_SECOND = ("type_as", "to")
# With these an output of a layer may get new dimensions in front.
_IN_FRONT = ("unsqueeze", "getitem", "expand", "repeat", "tile", "view", "reshape", "broadcast_to")
