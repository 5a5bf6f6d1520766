"""Whether the rows that a layer is given are the samples', or positions shared by all."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from opacus.core.platform.torch_internals import number_of_backward
from opacus.core.platform.trees import leaves_of, tensors_of
from opacus.core.record.row_trail import SampleRows
from opacus.core.rules.spec import LayerSpec


class IndexCheck:
    """Refuses table look-ups whose rows cannot be distinguished from samples.

    Indices of shape ``[T]`` or ``[T, T]`` (relative positions) have no row for each
    sample. Where T is not the batch size that is found out by counting. Where it is, such
    a layer would be clipped by position, silently. So while the batch size equals another
    dimension of the model's inputs, the rows of a table are taken for samples only if its
    indices are an input of the model, were computed from one row by row (:class:`SampleRows`),
    or if an earlier batch showed it.

    A layer of any kind is refused if what it is given was computed from no input of the model and
    has as many rows as there are samples, or if its output is broadcast along another dimension of
    the samples' tensors. Both are found by :class:`SampleRows` in the first forward passes, until
    each layer has run, but in no more than :attr:`PASSES` (some layers never run). Not found are
    rows that operations unknown to it bring there (positions in a matrix product, say), nor any
    in a model that is compiled.

    Args:
        specs: All layers.
    """

    PASSES: ClassVar[int] = 8

    def __init__(self, specs: Iterable[LayerSpec]) -> None:
        known = list(specs)
        self._layers = {spec.name for spec in known}
        self._tables = {spec.name for spec in known if issubclass(spec.kind, nn.Embedding)}
        self._met: set[str] = set()  # layers that have run while they were followed
        self._looked_up: set[str] = set()  # tables
        self._passes = 0  # that were followed
        self.follows = False  # whether `ran` has to be told of layers now
        # Uses of tables (by their number within a forward pass) with a row for each sample.
        self._known: set[tuple[str, int]] = set()
        self._uses: dict[str, int] = {}
        self._running = False
        self._batch: int | None = None
        self._ambiguous = False
        self._inputs: set[tuple[int, int]] = set()  # see _place
        self._rows: SampleRows | None = None

    def begin(
        self, inputs: Any, batch: int | None, recorded: bool, model: nn.Module | None = None
    ) -> None:
        """A forward pass of the model starts with these inputs, maybe one that is recorded."""
        self.end()
        self._batch, self._uses, self._running = batch, {}, True
        recorded = recorded and batch is not None and batch > 1
        new = recorded and self._passes < self.PASSES and not self._layers <= self._met
        self.follows = new and not _is_compiled(model)
        if not self._tables and not self.follows:
            return
        tensors = [t for t in tensors_of(inputs) if type(t) is Tensor]
        self._ambiguous = (
            batch is not None and batch > 1 and any(batch in t.shape[1:] for t in tensors)
        )
        self._inputs = _places(tensors, batch) if self._ambiguous else set()
        unknown = recorded and self._ambiguous and not self._tables <= self._looked_up
        if batch is not None and (self.follows or unknown):
            self._passes += self.follows
            self._rows = SampleRows(tensors, batch, () if model is None else model.buffers())
            self._rows.__enter__()

    def end(self) -> None:
        """The forward pass has ended, or failed."""
        rows, self._rows, self._running, self.follows = self._rows, None, False, False
        if rows is not None:
            rows.__exit__(None, None, None)

    def ran(self, spec: LayerSpec, inputs: Any, output: Tensor) -> None:
        """A layer, with its rows in front, has turned ``inputs`` into ``output``.

        Raises:
            ValueError: Its rows are no samples; names the layer.
        """
        if self._rows is not None:
            self._met.add(spec.name)
            self._rows.note_layer(spec, tree_leaves(inputs), output)

    def look_up(self, spec: LayerSpec, indices: Tensor) -> None:
        """A layer is given ``indices``.

        Raises:
            ValueError: It is unknown whether their rows are samples; names the layer.
        """
        if self._batch is None or spec.name not in self._tables:
            return
        self._looked_up.add(spec.name)
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
        return {
            **self.__dict__,
            "_rows": None,
            "_inputs": set(),
            "_running": False,
            "follows": False,
        }


class RepeatCheck:
    """Refuses outputs that were repeated for all samples, where one row was used for all of them.

    A table looked up with positions ``[1, T]`` runs once; its output is repeated, so that each
    sample's gradient comes back in a row of its own. A model that takes the first row (``[0]``,
    ``view(-1, d)[:T]``) would have the gradients of all samples in the first sample's row. That
    shows in the backward pass: no other row has a gradient, though other layers' rows have.
    It is asked until more than one row had a gradient.
    """

    def __init__(self) -> None:
        self.open: set[str] = set()  # layers of which it is not known yet
        self._settled: set[str] = set()
        self._backward = -1
        self._others: Tensor | None = None  # [B], which rows of another layer have a gradient

    def repeated(self, spec: LayerSpec) -> None:
        """The output of a layer was repeated."""
        if spec.name not in self._settled:
            self.open.add(spec.name)

    def received(self, spec: LayerSpec, backprops: Tensor, repeated: bool) -> None:
        """A layer got ``backprops`` ``[B, ...]``; for use while :attr:`open` is not empty.

        Raises:
            ValueError: All samples' gradients came back in the first row; names the layer.
        """
        number = number_of_backward()
        if number != self._backward:
            self._backward, self._others = number, None
        if repeated:
            self._decide(spec, _nonzero_rows(backprops))
        elif self._others is None:
            self._others = _nonzero_rows(backprops)

    def explain(self, error: BaseException | None) -> None:
        """The model has failed: say so if a repeated output may be why."""
        if self.open and isinstance(error, RuntimeError):
            error.args = (
                f"{error}. The outputs of {sorted(self.open)[:5]}, which ran once for all samples, "
                "were repeated, a copy for each sample. If the model fails because of that, freeze "
                "these layers (adapters in other layers, such as LoRA, can be trained)",
            )

    def _decide(self, spec: LayerSpec, rows: Tensor) -> None:
        """Look at which of the repeated rows ``[B]`` have a gradient."""
        others, self_rows = self._others, rows.tolist()
        known = others is not None and others.shape == rows.shape
        if sum(self_rows) > 1:
            self._settled.add(spec.name)
            self.open.discard(spec.name)
        elif sum(self_rows) == 1 and not (known and int(others.sum()) < 2):  # type: ignore[union-attr]
            raise ValueError(
                f"{spec} ran once for all {len(self_rows)} samples, and then one row of its output "
                "was used for all of them ([0] or view(-1, ...), say), so their gradients cannot "
                "be told apart. Use the output as it is, along with the samples' tensors, give "
                "the layer one row for each sample (expand), or freeze it"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_others": None}


def _nonzero_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1).any(1) if tensor.numel() else tensor.new_zeros(0)


def _is_compiled(model: nn.Module | None) -> bool:
    """Whether ``torch.compile`` made parts of the model, or makes it now."""
    if torch.compiler.is_compiling():
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # imported by torch.compile
    compiled = getattr(dynamo, "OptimizedModule", ())
    modules = () if model is None else model.modules()
    return any(isinstance(m, compiled) or m._compiled_call_impl is not None for m in modules)


def _places(inputs: Iterable[Tensor], batch: int | None) -> set[tuple[int, int]]:
    """Where rows of samples may lie: in the inputs, or one row for all samples (``expand``)."""
    places = {(t.untyped_storage().data_ptr(), 0) for t in inputs}
    return places | {_place(t) for t in inputs if t.dim() and t.shape[0] == batch}


def _place(tensor: Tensor) -> tuple[int, int]:
    """Storage and stride between rows: equal for ``x`` and ``x[:, 1:]``, not for ``x[0]``."""
    return tensor.untyped_storage().data_ptr(), tensor.stride(0)


def batch_of(inputs: Any, dim: int) -> int | None:
    """Batch size of a model's inputs, where all its tensors agree on one.

    Those with one row, of no more dimensions than the others, may be the same for all samples.
    """
    leaves = leaves_of(inputs, PackedSequence)
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        return None
    dims: dict[int, int] = {}  # number of rows -> most dimensions of a tensor with so many
    for tensor in leaves:
        if isinstance(tensor, Tensor) and tensor.dim() > dim:
            rows = tensor.shape[dim]
            dims[rows] = max(dims.get(rows, 0), tensor.dim())
    if len(dims) > 1 and dims.get(1, 0) <= max(d for rows, d in dims.items() if rows != 1):
        dims.pop(1, None)
    return next(iter(dims)) if len(dims) == 1 else None


def possible_batches(inputs: Any, dim: int) -> frozenset[int]:
    """Every number of samples that a model's inputs allow; empty if unknown.

    Where tensors disagree on :func:`batch_of`, a layer may still have to have as many rows as
    one of them: what was flattened, joined along the batch or cut into windows has not.

    Args:
        inputs: Positional and keyword arguments of the model.
        dim: Dimension of tensors that counts samples.
    """
    args, kwargs = inputs
    return frozenset(n for value in (*args, *kwargs.values()) for n in _sizes(value, dim))


def _sizes(value: Any, dim: int) -> Iterator[int]:
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0]) if len(value.batch_sizes) else 0
    elif isinstance(value, Tensor):
        if value.dim() > dim and isinstance(value.shape[dim], int):
            yield value.shape[dim]
    elif isinstance(value, Mapping):
        yield from (n for v in value.values() for n in _sizes(v, dim))
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(v, Tensor) and v.dim() for v in value):
            yield len(value)  # maybe a tensor for each sample
        yield from (n for v in value for n in _sizes(v, dim))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _sizes({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, dim)
