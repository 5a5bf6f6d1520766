"""What is computed once for all samples, of which each has a gradient of its own.

Note [Shared tensors]
    A table of relative positions, a soft prompt or the embedding of positions ``[T]`` comes from no
    input: it has no row for each sample. Where it meets the samples' tensors, autograd adds up
    their gradients. So such a layer returns a :class:`Shared` tensor. What is computed from it and
    from nobody's tensors is shared, too, and computed once. Where it meets a tensor with samples
    along one dimension, which the trail says, it becomes an ordinary tensor that has them along
    that dimension as well. Behind it is, for every shared tensor that is used so, a tensor of
    *rows* ``[n, ...]``, in which all are equal, but not their gradients: the layer is tapped on
    its rows, as any layer with a row for each sample.

    A checkpoint that is not reentrant runs a part of the model again for the tensors that its graph
    had saved. There shared tensors meet what they met before, so what has the same shape has its
    samples in the same place; gradients go through the first graph alone.

    A change in place gives a new tensor: the old one, and what sees its memory, is refused from
    then on, as it would have other values than its rows.

    The trail follows the rows like all else: a mistake made here ends in its refusal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from opacus.core.platform.torch_internals import number_of_backward
from opacus.core.record.record import ANCHOR, Tap, Use
from opacus.core.rules.spec import LayerSpec


class Scope(Protocol):
    """The forward pass in which tensors are shared.

    Attributes:
        count: Number of samples n.
    """

    count: int

    def share(self, value: Tensor) -> Tensor:
        """A row for each sample ``[n, ...]``, all equal, without memory."""

    def place_of(self, tensor: Tensor) -> Place | None:
        """Where the samples of a tensor are; ``None`` for nobody's.

        Raises:
            ValueError: They are not along one dimension, in order.
        """

    def not_simple(self) -> None:
        """A shared tensor was not simply added to the samples' rows."""


@dataclass(frozen=True)
class Place:
    """Samples lie along a dimension, ``block`` entries each.

    Attributes:
        back: The dimension, counted from the last one, which is 1.
    """

    back: int
    block: int = 1


At = Callable[[Place], Tensor | None]


@dataclass
class Source:
    """How a shared tensor came to be.

    Attributes:
        rows: Makes its rows ``[n, ...]``.
        at: Makes it with samples at a place; ``None`` for what only its rows give.
        spec: The layer that it comes from.
        simple: Whether a row for each sample in front would have done as well.
    """

    rows: Callable[[], Tensor]
    at: At | None
    spec: LayerSpec
    scope: Scope
    simple: bool = False


class Shared(Tensor):
    """See Note [Shared tensors]. Its own values are those that all samples have."""

    _source: Source
    _rows: Tensor | None
    _seen: int  # its version when it was made

    @classmethod
    def of(cls, value: Tensor, source: Source) -> Shared:
        """A shared tensor of this value."""
        made: Shared = torch.Tensor._make_subclass(cls, value.detach(), True)
        made._source, made._rows = source, None
        with torch._C.DisableTorchFunctionSubclass():
            made._seen = made._version
            made.register_hook(partial(_astray, source))
        return made

    def rows(self) -> Tensor:
        """A row for each sample ``[n, ...]``, all equal, each with its own gradient."""
        if self._rows is None:
            with torch.enable_grad():
                self._rows = self._source.rows()
        return self._rows

    def at(self, place: Place) -> Tensor:
        """An ordinary tensor with samples at a place, to be combined with one that has them."""
        made = self._source.at(place) if self._source.at is not None else None
        return _along(self.rows(), place, self._source) if made is None else made

    def check_unchanged(self) -> None:
        """Refuse a tensor whose memory has been changed in place since it was made."""
        with torch._C.DisableTorchFunctionSubclass():
            changed = self._version != self._seen
        if changed:
            raise self.refusal("is changed in place, where it is used again by another name")

    @property
    def scope(self) -> Scope:
        """The forward pass that it belongs to."""
        return self._source.scope

    @property
    def simple(self) -> bool:
        """Whether a row for each sample in front would have done as well."""
        return self._source.simple

    def refusal(self, what: str) -> ValueError:
        """The error for a use that is not supported."""
        return _refusal(self._source, what)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _run(func, args, kwargs or {})


def rows_of_input(tensor: Tensor, scope: Scope) -> Tensor:
    """What a layer that gave a shared tensor was given, with a row for each sample."""
    if isinstance(tensor, Shared):
        tensor.check_unchanged()
        return tensor.rows()
    if scope.place_of(tensor) == Place(tensor.dim()):
        return tensor  # looked at for its shape, say
    return tensor.expand(scope.count, *tensor.shape)


def plain(value: Any) -> Any:
    """Shared tensors among some values as ordinary ones, which are nobody's."""
    return tree_map_only(Shared, _value, value)


def _run(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """An operation on shared tensors, and maybe others."""
    elsewhere = _elsewhere(func, args, kwargs)
    if elsewhere is not None:
        first, result = elsewhere[0][0], _run(func, *elsewhere)
        if result.data_ptr() != first.data_ptr():  # dropout may have had nothing to do
            torch.autograd.graph.increment_version(first)
        return result
    leaves, tree = tree_flatten((args, kwargs))
    shared = [leaf for leaf in leaves if isinstance(leaf, Shared)]
    source, name = shared[0]._source, getattr(func, "__name__", "")
    for leaf in shared:
        leaf.check_unchanged()
    others = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, Shared)]
    places = {place for t in others if (place := source.scope.place_of(t)) is not None}

    def call(function: Any, replace: Callable[[Shared], Tensor]) -> Any:
        values = [replace(leaf) if isinstance(leaf, Shared) else leaf for leaf in leaves]
        new_args, new_kwargs = tree_unflatten(values, tree)
        return function(*new_args, **new_kwargs)

    if isinstance(args[0] if args else None, Shared) and _in_place(name):
        return _changed(args, kwargs, name, bool(places))
    if places and name not in _LIKE:
        if len(places) > 1 or name.strip("_") not in _MEETS:
            raise _refusal(source, f"is combined with the samples' tensors by {name}")
        place = places.pop()
        if not all(_simple_at(s, place) for s in shared):
            source.scope.not_simple()
        return call(func, lambda s: s.at(place))
    value = call(func, _value)
    differentiable = [
        t for t in tree_flatten(value)[0] if isinstance(t, Tensor) and t.is_floating_point()
    ]
    if not differentiable or not torch.is_grad_enabled() or func in _ENDS:
        return value
    return _shared(func, name, call, value, shared, args)


def _changed(args: tuple[Any, ...], kwargs: Any, name: str, meets_samples: bool) -> Any:
    """What an operation that changes a shared tensor makes of it, in memory of its own."""
    first: Shared = args[0]
    short = name.strip("_")
    if name != "__setitem__" and short in _CHANGES and not meets_samples:
        changed = _run(getattr(Tensor, _CHANGES[short]), args, kwargs)
        same = changed.shape == first.shape and changed.dtype == first.dtype
        if same and isinstance(changed, Shared):
            torch.autograd.graph.increment_version(first)
            return changed
    raise first.refusal(f"is changed in place ({name})")


def _elsewhere(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Arguments of a function that is told to change its first one in place, without that."""
    if not inspect.isfunction(func) or "inplace" not in inspect.signature(func).parameters:
        return None
    given = inspect.signature(func).bind(*args, **kwargs)
    if not given.arguments.get("inplace"):
        return None
    given.arguments["inplace"] = False
    return given.args, given.kwargs


def _shared(
    func: Any, name: str, call: Any, value: Any, shared: Sequence[Shared], args: Sequence[Any]
) -> Any:
    """What is computed from shared tensors and nobody's."""
    source = shared[0]._source
    made: list[Any] = []  # the rows of all results, once they are asked for

    def mapped() -> list[Any]:
        if not made:

            def one(*rows: Tensor) -> Any:
                fresh = iter(rows)
                return call(func, lambda _: next(fresh))

            given = [s.rows() for s in shared]
            with torch.enable_grad(), _saved_as_it_is():
                out = torch.func.vmap(one, randomness="same")(*given)
            made.extend(tree_flatten(out)[0])
        return made

    leaves, tree = tree_flatten(value)
    at = _pushed(func, name, call, shared, args) if len(leaves) == 1 else None
    simple = name.strip("_") in _KEEPS and all(s._source.simple for s in shared)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            rows = partial(_item, mapped, i)
            fresh = Source(rows, at, source.spec, source.scope, simple)
            leaves[i] = Shared.of(leaf, fresh)
    return tree_unflatten(leaves, tree)


def _saved_as_it_is() -> saved_tensors_hooks:
    """What graphs save belongs to no checkpoint: rows are made once, wherever that is."""
    return saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _item(make: Callable[[], list[Any]], place: int) -> Any:
    return make()[place]


def _pushed(
    func: Any, name: str, call: Any, shared: Sequence[Shared], args: Sequence[Any]
) -> At | None:
    """How a result is had with samples at a place from operands that have them there.

    Where it is possible, this takes less memory than the result's rows: :func:`_along` of a tensor
    that already has a part for each sample makes all parts for all samples.
    """
    first, short = shared[0], name.strip("_")
    if short in _POINTWISE or (short == "to" and len(shared) == 1):
        return lambda place: call(func, lambda s: s.at(place))
    if short == "transpose" and set(args[1:]) == {-1, -2} and first.dim() > 2:
        return lambda place: call(func, lambda s: s.at(place)) if place.back > 2 else None
    if short in ("repeat", "expand"):
        return _repeated(first, short, args[1:])
    return None


def _repeated(first: Shared, name: str, sizes: Sequence[Any]) -> At | None:
    """``repeat(n, 1, ...)`` and ``expand(n, -1, ...)``: a copy for each sample, in front."""
    sizes = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
    n, dims = first._source.scope.count, first.dim()
    kept = all(
        size == 1 if name == "repeat" else size in (-1, own)
        for size, own in zip(sizes[len(sizes) - dims + 1 :], first.shape[1:], strict=True)
    )
    if not kept or len(sizes) != dims or sizes[0] != n or dims < 1:
        return None
    block = first.shape[0]
    if name == "expand" and block != 1:
        return None

    return lambda place: first.rows().flatten(0, 1) if place == Place(dims, block) else None


def _along(rows: Tensor, place: Place, source: Source) -> Tensor:
    """Rows ``[n, ...]`` with samples at a place instead of in front."""
    n, block, dims = rows.shape[0], place.block, rows.dim() - 1
    if place.back > dims:
        rows = rows.reshape(n, *[1] * (place.back - dims), *rows.shape[1:])
        dims = place.back
    at = dims - place.back
    size = rows.shape[at + 1]
    if size == 1:
        rows = rows.movedim(0, at)  # [..., n, 1, ...]
        return rows.expand(*rows.shape[: at + 1], block, *rows.shape[at + 2 :]).flatten(at, at + 1)
    if size != n * block:
        raise _refusal(source, f"has {size} entries where the samples have {n * block}")
    own = rows.unflatten(at + 1, (n, block)).diagonal(0, 0, at + 1)  # [..., block, ..., n]
    return own.movedim(-1, at).flatten(at, at + 1)


def _simple_at(shared: Shared, place: Place) -> bool:
    in_front = place == Place(shared.dim()) and shared.shape[0] == 1
    return shared._source.simple and in_front


def _value(shared: Shared) -> Tensor:
    """What all samples have, as an ordinary tensor that is nobody's."""
    return shared.detach().as_subclass(Tensor)


def _astray(source: Source, grad: Tensor) -> Tensor:
    """A gradient has come to a shared tensor itself, in which the samples' are one."""
    raise _refusal(source, "goes into a custom autograd.Function, or an operator that hides it")


def _in_place(name: str) -> bool:
    return name == "__setitem__" or (name[-1:] == "_" != name[-2:-1])


def _refusal(source: Source, what: str) -> ValueError:
    return ValueError(
        f"{source.spec} runs once for all {source.scope.count} samples, and its result {what}, so "
        "their gradients cannot be told apart. Give the layer a row for each sample (expand its "
        "input), or freeze it (adapters in other layers, such as LoRA, can be trained)"
    )


# Take dtype and device of another tensor.
_LIKE = frozenset(("to", "type_as"))
# One element of each operand, broadcast.
_POINTWISE = frozenset(
    ("add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "rtruediv", "true_divide",
     "where", "masked_fill", "maximum", "minimum")
)  # fmt: skip
# Where shared tensors may meet the samples': dimensions are counted from the last one in all.
_MEETS = _POINTWISE | frozenset(
    ("iadd", "isub", "imul", "itruediv", "cat", "concat", "matmul", "bmm", "baddbmm",
     "scaled_dot_product_attention", "expand_as")
)  # fmt: skip
# Operations in place, and what gives the same elsewhere.
_CHANGES = {
    **{name: name for name in ("add", "sub", "mul", "div", "true_divide", "masked_fill")},
    **{"iadd": "add", "isub": "sub", "imul": "mul", "idiv": "div", "itruediv": "div"},
}
# What a row for each sample in front does not change.
_KEEPS = _POINTWISE | {"to", "dropout"}
# No gradient comes back from what these give.
_ENDS = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


def tap_shared(use: Use, output: Tensor, inputs: list[Tensor], scope: Scope) -> Shared:
    """The output of a layer that runs once for all samples: tapped on rows, if it is used."""
    use.batch_dim = 0
    simple = output.shape[:1] == (1,) and all(
        t.simple if isinstance(t, Shared) else t.shape[:1] == (1,) for t in inputs
    )
    if not simple:  # also where its values alone are used, as DoRA does for its weight
        scope.not_simple()
    use.forward_pass.moved.add(use.spec.name)

    def rows() -> Tensor:
        own = output.rows() if isinstance(output, Shared) else scope.share(output)
        tensors = [rows_of_input(t, scope) for t in inputs]
        named = use.forward_pass.named
        if named is not None:
            use.units = named.of_layer(use.spec, None, own, 0)
        use.register(own.shape, counted=number_of_backward() < 0, dims=output.dim())
        with _saved_as_it_is():
            (tapped,) = Tap.apply(ANCHOR, use, 1, own, *tensors)
        return tapped

    return Shared.of(plain(output), Source(rows, None, use.spec, scope, simple))
