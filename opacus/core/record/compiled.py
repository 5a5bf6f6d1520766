"""Taps inside graphs that ``torch.compile`` makes, which cannot run Python in their middle.

Note [Taps in compiled graphs]
    Where a layer runs in a compiled region, its tap becomes two operators. ``begin_use`` runs
    in the forward graph: it notes the use of the layer and returns a number as a tensor, which
    the graph saves for its backward. ``deliver`` runs in the backward graph with the gradient of
    the layer's output, the saved input and that number, and makes the record. Both run with real
    tensors, whatever the compiler has done around them.

    The compiler may write over any tensor of its graph after its last use, without raising its
    version, and it does not know that a record holds one. Such records are *borrowed*: right
    while ``deliver`` runs, copied by whoever keeps them longer.

    A layer is identified by a tensor, not by a number in the code: equal blocks share a graph.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from opacus.core.platform.switches import switched_on
from opacus.core.record.record import ANCHOR, Use

VARIABLE = "OPACUS_COMPILED_TAPS"


class Tapped(Protocol):
    """What stands for a layer in a compiled graph: its hooks."""

    key: Tensor
    mark: Tensor

    def begin_compiled(self, output: Tensor, names: tuple[str, ...]) -> Use:
        """The layer, with these trainable parameters, has run."""


_numbers = itertools.count(1)
_hooks: weakref.WeakValueDictionary[int, Tapped] = weakref.WeakValueDictionary()
_links: weakref.WeakValueDictionary[int, _Link] = weakref.WeakValueDictionary()


def compiled_taps_from_environment() -> bool:
    """Whether ``OPACUS_COMPILED_TAPS`` lets compiled graphs contain taps (default: yes).

    Otherwise a graph ends at each layer.

    Raises:
        ValueError: The variable is neither ``0`` nor ``1``.
    """
    return switched_on(VARIABLE, default=True)


def key_of(hooks: Tapped) -> Tensor:
    """A tensor by which ``begin_use`` finds these hooks, as long as they live."""
    number = next(_numbers)
    _hooks[number] = hooks
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def new_mark() -> Tensor:
    """What a use of a layer leaves behind."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


def tap(output: Tensor, x: Tensor, hooks: Tapped, names: tuple[str, ...]) -> Tensor:
    """``output`` of a layer that was called with ``x``, tapped; for use while compiling.

    Args:
        output: Of the layer.
        x: Its input.
        hooks: Of the layer.
        names: Its parameters that are trainable now.
    """
    tapped: Tensor
    # A result that outlives the graph: else the compiler moves the operator to the backward. That
    # of the layer's last use goes in: else it merges two uses of one layer on the same input.
    result = _CompiledTap.apply(ANCHOR, output, x, hooks.key, hooks.mark, "\n".join(names))
    tapped, hooks.mark = result
    return tapped


class _Link(bytearray):
    """The memory of the number that ``begin_use`` returns: lives as long as the graph's tensor."""

    use: Use


class _CompiledTap(torch.autograd.Function):
    """See Note [Taps in compiled graphs]."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, output: Tensor, x: Tensor, key: Tensor, last: Tensor, names: str
    ) -> tuple[Tensor, Tensor]:
        number, mark = torch.ops.opacus.begin_use(output, x, key, last, names)
        ctx.save_for_backward(x, number)
        ctx.mark_non_differentiable(mark)
        # Unlike any other alias, this one may be changed in place by what follows the graph.
        return torch.ops.aten._unsafe_view(output, output.shape), mark

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, number = ctx.saved_tensors
        # The anchor's gradient is what keeps the operator in the graph.
        return torch.ops.opacus.deliver(grads[0], x, number), grads[0], None, None, None, None


def _begin_use(
    output: Tensor, x: Tensor, key: Tensor, last: Tensor, names: str
) -> tuple[Tensor, Tensor]:
    if output.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is captured, which would not note a private model's layers when it is "
            f"replayed: compile without mode='reduce-overhead', or set {ADVICE}"
        )
    hooks = _hooks.get(int(key))
    if hooks is None:
        raise RuntimeError("a compiled graph belongs to a private model that is gone: compile anew")
    link = _Link(8)
    link.use = hooks.begin_compiled(output, tuple(names.split("\n")))
    number = torch.frombuffer(link, dtype=torch.int64)  # keeps the link alive
    value = next(_numbers)
    number.fill_(value)
    _links[value] = link
    return number, new_mark()


def _deliver(grad: Tensor, x: Tensor, number: Tensor) -> Tensor:
    link = _links.get(int(number))
    if link is None:
        raise RuntimeError("a compiled graph has lost what belongs to a layer; set " + ADVICE)
    use = link.use
    use.sink.deliver(use, (x,), (grad,), borrowed=True)
    return torch.zeros((), device="cpu")


ADVICE = f"{VARIABLE}=0, which ends compiled graphs at each layer"
_library = torch.library.Library("opacus", "FRAGMENT")
# A replayed CUDA graph would not run them.
_tags = tuple(t for t in (getattr(torch.Tag, "cudagraph_unsafe", None),) if t is not None)
_library.define(
    "begin_use(Tensor output, Tensor x, Tensor key, Tensor last, str names) -> (Tensor, Tensor)",
    tags=_tags,
)
_library.define("deliver(Tensor grad, Tensor x, Tensor number) -> Tensor", tags=_tags)
# What notes an input while a graph is traced, and what finds it again; not in the finished graph,
# which has no need of their results.
_library.define("note_input(Tensor x) -> Tensor")
_library.define("find_input(Tensor x, Tensor note) -> Tensor")
_library.impl("note_input", lambda x: new_mark(), "CompositeExplicitAutograd")
_library.impl("find_input", lambda x, note: new_mark(), "CompositeExplicitAutograd")
for _kind in ("CPU", "CUDA"):
    _library.impl("begin_use", _begin_use, _kind)
    _library.impl("deliver", _deliver, _kind)


def _fake_use(
    output: Tensor, x: Tensor, key: Tensor, last: Tensor, names: str
) -> tuple[Tensor, Tensor]:
    return _fake_note(x), torch.empty((), dtype=torch.int64, device="cpu")


def _fake_zero(grad: Tensor, x: Tensor, number: Tensor) -> Tensor:
    return _fake_found(x, number)


def _fake_note(x: Tensor) -> Tensor:
    number = torch.empty(1, dtype=torch.int64, device="cpu")
    number.opacus_input = x  # type: ignore[attr-defined]
    return number


def _fake_found(x: Tensor, number: Tensor) -> Tensor:
    # While a graph is traced, with both operators in it, a tensor that was changed in place is
    # another one. Afterwards, where the operators are in graphs of their own, nothing is known.
    before = getattr(number, "opacus_input", None)
    if before is not None and before is not x:
        raise RuntimeError(
            f"in a compiled graph of a private model the input of a layer, of shape "
            f"{tuple(x.shape)}, is changed in place after the layer has run; change a copy, or set "
            f"{ADVICE}"
        )
    return torch.empty((), device="cpu")


torch.library.register_fake("opacus::begin_use", _fake_use)
torch.library.register_fake("opacus::deliver", _fake_zero)
torch.library.register_fake("opacus::note_input", _fake_note)
torch.library.register_fake("opacus::find_input", _fake_found)
