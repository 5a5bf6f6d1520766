"""Whose indices a table is looked up with: the samples', or positions shared by all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from opacus.core.spec import LayerSpec


class IndexCheck:
    """Refuses table look-ups whose rows cannot be told from samples.

    Indices of shape ``[T]`` or ``[T, T]`` (relative positions) have no row for each
    sample. Where T is not the batch size that is found out by counting. Where it is, such
    a layer would be clipped by position, silently. So while the batch size equals another
    dimension of the model's inputs, the rows of a table are taken for samples only if its
    indices are an input of the model, were computed from one row by row (:class:`SampleRows`),
    or if an earlier batch showed it.
    """

    def __init__(self, specs: Iterable[LayerSpec]) -> None:
        self._tables = {spec.name for spec in specs if issubclass(spec.kind, nn.Embedding)}
        self._met: set[str] = set()  # tables that have been looked up
        # Uses of tables (the how manieth in a forward pass) with a row for each sample.
        self._known: set[tuple[str, int]] = set()
        self._uses: dict[str, int] = {}
        self._running = False
        self._batch: int | None = None
        self._ambiguous = False
        self._inputs: set[tuple[int, int]] = set()  # see _place
        self._rows: SampleRows | None = None

    def begin(self, inputs: Any, batch: int | None, recorded: bool) -> None:
        """A forward pass of the model starts with these inputs, maybe one that is recorded."""
        self.end()
        self._batch, self._uses, self._running = batch, {}, True
        if not self._tables:
            return
        tensors = [t for t in tree_leaves(inputs) if type(t) is Tensor]
        self._ambiguous = (
            batch is not None and batch > 1 and any(batch in t.shape[1:] for t in tensors)
        )
        self._inputs = _places(tensors, batch) if self._ambiguous else set()
        if recorded and batch is not None and self._ambiguous and not self._tables <= self._met:
            self._rows = SampleRows(tensors, batch)
            self._rows.__enter__()

    def end(self) -> None:
        """The forward pass has ended, or failed."""
        rows, self._rows, self._running = self._rows, None, False
        if rows is not None:
            rows.__exit__(None, None, None)

    def look_up(self, spec: LayerSpec, indices: Tensor) -> None:
        """A layer is given ``indices``.

        Raises:
            ValueError: Whether their rows are samples cannot be told; names the layer.
        """
        if self._batch is None or spec.name not in self._tables:
            return
        self._met.add(spec.name)
        use = (spec.name, self._uses.get(spec.name, 0) if self._running else 0)
        if self._running:  # else it is a recomputation
            self._uses[spec.name] = use[1] + 1
        if indices.dim() == 0 or indices.shape[0] != self._batch or use in self._known:
            return
        if not self._ambiguous or (self._rows is not None and self._rows.has(indices)):
            self._known.add(use)
        elif _place(indices) not in self._inputs:
            raise ValueError(
                f"{spec} is looked up with indices of shape {tuple(indices.shape)} that are not an "
                f"input of the model. With {self._batch} samples, as many as another dimension of "
                "the inputs has, they cannot be told from positions that all samples share. Start "
                "with a batch of another size, pass the indices to the model (position_ids, "
                "decoder_input_ids, ...), or freeze the layer"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None, "_inputs": set(), "_running": False}


class SampleRows(TorchFunctionMode):
    """Follows which tensors have a row for each sample while the model computes.

    An input has; what is computed from such a tensor row by row has, too. Operations that it
    does not know end the trail: it may miss such tensors, but takes none for one that is not.
    ``mask.cumsum(1)`` has rows of samples, ``arange(T)`` and ``mask[0]`` have not, whatever
    their size.

    Args:
        inputs: Of the model; those whose first dimension is ``batch`` are of samples.
        batch: Number of samples.
    """

    def __init__(self, inputs: Iterable[Tensor], batch: int) -> None:
        super().__init__()
        self._batch = batch
        # Held, so that no other one gets their number; with the stride between rows.
        self._found: dict[int, tuple[Tensor, int]] = {}
        for tensor in inputs:
            self._note(tensor)

    def has(self, tensor: Tensor) -> bool:
        """Whether row i of the tensor is known to be of sample i."""
        found = self._found.get(id(tensor))
        return found is not None and found[1] == tensor.stride(0)  # not so after t_()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            self._note_assignment(*args)
        elif args and type(result) is Tensor and result.dim():
            keeps = _KEEPS.get(name.strip("_"))
            if keeps is not None and keeps(self, result, args, kwargs):
                self._note(result)
        return result

    def _note(self, tensor: Tensor) -> None:
        if tensor.dim() and tensor.shape[0] == self._batch:
            self._found[id(tensor)] = (tensor, tensor.stride(0))

    def _note_assignment(self, target: Any, index: Any, value: Any) -> None:
        """``target[:, ...] = value`` with rows of samples on the right."""
        rows = isinstance(value, Tensor) and self.has(value) and _all_rows(index)
        if rows and type(target) is Tensor and value.dim() == target.dim():
            self._note(target)

    # --- which results have rows of samples ---

    def _elementwise(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        given = tree_leaves((args, kwargs))
        return any(isinstance(t, Tensor) and self.has(t) and t.shape == result.shape for t in given)

    def _like_first(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        """The same rows in another form; other arguments give a type or a shape only."""
        return bool(args) and self.has(args[0]) and result.shape == args[0].shape

    def _regrouped(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        return bool(args) and self.has(args[0]) and result.numel() == args[0].numel()

    def _along(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Within rows, along a dimension that is not the first."""
        tensors = args[0] if isinstance(args[0], (tuple, list)) else [args[0]]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        known = [isinstance(t, Tensor) and self.has(t) for t in tensors]
        return isinstance(dim, int) and dim % result.dim() != 0 and any(known)

    def _unsqueezed(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return isinstance(dim, int) and dim % result.dim() != 0 and self.has(args[0])

    def _padded(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        pad = kwargs.get("pad", args[1] if len(args) > 1 else ())
        return self.has(args[0]) and len(pad) < 2 * args[0].dim()

    def _selected(self, result: Tensor, args: tuple[Any, ...], kwargs: Any) -> bool:
        return self.has(args[0]) and _all_rows(args[1])


def _all_rows(index: Any) -> bool:
    """Whether ``tensor[index]`` keeps every row: ``[:, ...]``, with numbers and slices."""
    parts = index if isinstance(index, tuple) else (index,)
    first = parts[0] if parts else None
    plain = all(part is None or isinstance(part, (int, slice)) for part in parts[1:])
    return isinstance(first, slice) and first == slice(None) and plain


_Keeps = Callable[[SampleRows, Tensor, tuple[Any, ...], Any], bool]

_ELEMENTWISE = (
    "add sub rsub mul rmul radd div floordiv floor_divide remainder mod fmod neg abs clamp clip "
    "clamp_min clamp_max minimum maximum where masked_fill eq ne lt le gt ge logical_and "
    "logical_or logical_not bitwise_and bitwise_or bitwise_not and or invert"
)
_LIKE_FIRST = (
    "long int short bool float half double to type type_as clone detach contiguous zeros_like "
    "ones_like full_like"
)
# Name of a function, underscores around it left out: whether its result has rows of samples.
_KEEPS: dict[str, _Keeps] = {
    **dict.fromkeys(_ELEMENTWISE.split(), SampleRows._elementwise),
    **dict.fromkeys(_LIKE_FIRST.split(), SampleRows._like_first),
    **dict.fromkeys(("view", "reshape"), SampleRows._regrouped),
    **dict.fromkeys(("cumsum", "cumprod", "cat", "concat"), SampleRows._along),
    "unsqueeze": SampleRows._unsqueezed,
    "pad": SampleRows._padded,
    "getitem": SampleRows._selected,
}


def _places(inputs: Iterable[Tensor], batch: int | None) -> set[tuple[int, int]]:
    """Where rows of samples may lie: in the inputs, or one row for all samples (``expand``)."""
    places = {(t.untyped_storage().data_ptr(), 0) for t in inputs}
    return places | {_place(t) for t in inputs if t.dim() and t.shape[0] == batch}


def _place(tensor: Tensor) -> tuple[int, int]:
    """Storage and stride between rows: equal for ``x`` and ``x[:, 1:]``, not for ``x[0]``."""
    return tensor.untyped_storage().data_ptr(), tensor.stride(0)


def batch_of(inputs: Any, dim: int) -> int | None:
    """Batch size of a model's inputs, where all its tensors agree on one."""
    leaves = tree_leaves(inputs, is_leaf=lambda v: isinstance(v, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        return None
    sizes = {t.shape[dim] for t in leaves if isinstance(t, Tensor) and t.dim() > dim}
    if len(sizes) > 1:
        sizes.discard(1)
    return sizes.pop() if len(sizes) == 1 else None
