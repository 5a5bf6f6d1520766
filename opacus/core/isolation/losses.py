"""Whether losses are the samples' own; see :mod:`opacus.core.isolation.check`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from opacus.core.isolation.incomparable import RUN_ERRORS
from opacus.core.isolation.squares import STATES, TOLERANCES
from opacus.core.isolation.undisturbed import same_state
from opacus.core.platform.sharded import is_fsdp
from opacus.core.platform.torch_internals import roots_of_backward

# Losses [B] of these arguments of a criterion, for so many samples.
Criterion = Callable[[Any, Any, int], Tensor]
CHOSEN = 4  # samples that are looked at
MOST_WAYS = 16  # of cutting arguments into samples
_MEAN = 1  # the number of reduction="mean" in torch's own losses


def coupled_loss(
    criterion: Criterion,
    args: Any,
    kwargs: Any,
    losses: Tensor,
    rows: int | None,
    ids: Tensor | None = None,
    keeper: object = None,
) -> str | None:
    """Whether a criterion gives a sample another loss alone than in its batch, or after others.

    Args:
        criterion: Computes losses.
        args: What it was called with.
        kwargs: The same.
        losses: ``[B]``, what it returned.
        rows: Rows of its arguments, B or a multiple of it.
        ids: The sample of each row, or of each token, where the user names them.
        keeper: What may keep something from one call of the criterion to the next, if it is a
            module; it is afterwards as before.

    Returns:
        What differs, ``None`` if nothing does, or if the criterion takes no single samples, or is
        given a module that FSDP2 gathers, which all ranks would have to run.
    """
    count = len(losses)
    if count < 2 or not rows or (ids is None and rows % count) or type(losses) is not Tensor:
        return None
    leaves, tree = tree_flatten((args, kwargs))
    if any(is_fsdp(part) for m in leaves if isinstance(m, nn.Module) for part in m.modules()):
        return None
    together = losses.detach().double()
    tolerance = TOLERANCES.get(losses.dtype, max(TOLERANCES.values()))
    finite = torch.isfinite(together)
    if not finite.any():
        return None
    allowed = tolerance * (together.abs() + 0.1 * together[finite].abs().mean())
    named = None if ids is None else _NamedSamples(leaves, tree, ids.to(losses.device))
    order = [i for i in together.argsort().tolist() if finite[i]]
    order = order if named is None else [i for i in order if named.is_in_one_piece(i)]
    if not order:
        return None
    places = {order[i * (len(order) - 1) // (CHOSEN - 1)] for i in range(CHOSEN)}
    ways = _cuts(leaves, tree, rows, count) if named is None else iter([named])
    own = keeper if isinstance(keeper, nn.Module) else nn.Module()
    found: str | None = None

    def again(args: Any, kwargs: Any, samples: int) -> Tensor:
        with same_state(own):
            return criterion(args, kwargs, samples)

    for samples in ways:
        kept = _kept(criterion, samples, own, allowed, places)
        outcome = kept or _compare(again, samples, together, allowed, places)
        if kept or outcome == "":
            return kept
        found = found or outcome
    return found


def _cuts(leaves: list[Any], tree: TreeSpec, rows: int, count: int) -> Iterator[_Samples]:
    """Ways of cutting arguments with so many rows into samples."""
    for dims in itertools.islice(itertools.product(*map(_ways(rows), leaves)), MOST_WAYS):
        yield _Samples(leaves, tree, dims, rows // count)


def _ways(rows: int) -> Callable[[Any], list[int | None]]:
    """Dimensions in which an argument may have the samples' rows; ``None``: it is all samples'."""

    def ways(leaf: Any) -> list[int | None]:
        if not isinstance(leaf, Tensor):
            return [None]
        dims: list[int | None] = [d for d in range(min(leaf.dim(), 2)) if leaf.shape[d] == rows]
        return dims if 0 in dims else [*dims, None]

    return ways


@dataclass(frozen=True)
class _Samples:
    """A criterion's arguments, which can be cut into samples."""

    leaves: list[Any]
    tree: TreeSpec
    dims: Sequence[int | None]
    each: int  # rows

    def one(self, place: int) -> Any:
        own = [
            _rows(leaf, dim, place * self.each, self.each) if isinstance(leaf, Tensor) else leaf
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return tree_unflatten(own, self.tree)


@dataclass(frozen=True)
class _NamedSamples:
    """The same where ``ids`` says whose each row ``[R]``, or each token ``[R, T]``, is."""

    leaves: list[Any]
    tree: TreeSpec
    ids: Tensor

    def one(self, place: int) -> Any:
        own = [self._own(x, place) if isinstance(x, Tensor) else x for x in self.leaves]
        return tree_unflatten(own, self.tree)

    def is_in_one_piece(self, place: int) -> bool:
        """Whether its tokens follow each other in one row, alone as in the batch."""
        if self.ids.dim() == 1:
            return True
        rows, tokens = (self.ids == place).nonzero(as_tuple=True)
        return bool((rows == rows[0]).all()) and int(tokens[-1] - tokens[0]) == len(tokens) - 1

    def _own(self, tensor: Tensor, place: int) -> Tensor:
        """What a tensor has of a sample; all of it, if it has no rows or tokens."""
        tensor, ids = tensor.detach(), self.ids
        if ids.dim() == 2 and tensor.dim():
            shape, without_last = tuple(ids.shape), ids[:, :-1]
            for own in (ids, without_last.where(without_last == ids[:, 1:], -1)):
                if tensor.shape[:2] == own.shape:
                    return tensor.flatten(0, 1)[own.reshape(-1) == place][None]
                if tensor.dim() == 3 and tensor.shape[::2] == own.shape:  # [R, classes, T]
                    return tensor.mT.flatten(0, 1)[own.reshape(-1) == place][None].mT
                if len(tensor) == own.numel() != shape[0]:
                    return tensor[own.reshape(-1) == place]
            return tensor
        return tensor[ids == place] if tensor.shape[:1] == ids.shape else tensor


def _rows(tensor: Tensor, dim: int | None, start: int, length: int) -> Tensor:
    return tensor.detach() if dim is None else tensor.detach().narrow(dim, start, length)


def _compare(
    criterion: Criterion,
    samples: _Samples | _NamedSamples,
    together: Tensor,
    allowed: Tensor,
    places: set[int],
) -> str | None:
    """Empty if all losses agree, ``None`` if the criterion cannot be called like this."""
    for place in sorted(places):
        try:
            args, kwargs = samples.one(place)
            losses = [criterion(args, kwargs, 1) for _ in range(2)]
            alone, again = (loss.detach().double().reshape(()) for loss in losses)
        except RUN_ERRORS:
            return None
        if abs(alone - again) > allowed[place]:
            return None  # random numbers
        if not abs(alone - together[place]) <= allowed[place]:
            return (
                f"the loss of sample {place} is {float(together[place]):.6g} in a batch of "
                f"{len(together)} and {float(alone):.6g} alone"
            )
    return ""


def _kept(
    criterion: Criterion,
    samples: _Samples | _NamedSamples,
    keeper: nn.Module,
    allowed: Tensor,
    places: set[int],
) -> str | None:
    """Whether the loss of a sample depends on which one the criterion was called with before."""
    place, other = min(places), max(places)

    def after(before: int) -> float:
        earlier, (args, kwargs) = samples.one(before), samples.one(place)
        with same_state(keeper):
            criterion(earlier[0], earlier[1], 1)
            return float(criterion(args, kwargs, 1).detach().double())

    try:
        one, two, again = after(place), after(other), after(place)
    except RUN_ERRORS:
        return None
    strict = STATES * float(allowed[place])
    if abs(one - again) > strict or not abs(one - two) > strict:
        return None
    return (
        f"the loss of sample {place} is {two:.6g} after a call on sample {other} and {one:.6g} "
        f"after one on itself, so it keeps something of samples (an average, a queue)"
    )


def batch_mean(grad: Tensor, end: type) -> str | None:
    """In a running backward pass: whether the loss is a mean over more than samples.

    The normaliser of such a mean is a sum over the batch (of tokens that count, of class
    weights), so that each sample's gradient depends on the others. A mean over samples, or
    over positions of which each sample has as many, is fine.

    Args:
        grad: The gradient ``[B, ...]`` that an output of the model got.
        end: The nodes at which the model ends.

    Returns:
        What was found, ``None`` if nothing.
    """
    for node in _nodes(end):
        name = type(node).__name__.removesuffix("0").removesuffix("Backward")
        if not name.startswith("NllLoss") or getattr(node, "_saved_reduction", None) != _MEAN:
            continue
        if _has_weight(node):
            return "a mean over class weights (CrossEntropyLoss(weight=...), NLLLoss(weight=...))"
        if _uneven(grad):
            return "a mean over the tokens of the batch, of which samples have different numbers"
    return None


def _nodes(end: type) -> Iterator[Any]:
    """The nodes of the backward pass that is running, up to those of ``end``."""
    waiting = [root.grad_fn for root in roots_of_backward()]
    seen: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen or isinstance(node, end):
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]


def _has_weight(node: Any) -> bool:
    try:
        return node._saved_weight is not None
    except RuntimeError:  # it had one, which is freed when the node has run
        return True
    except AttributeError:
        return False


def _uneven(grad: Tensor) -> bool:
    """Whether samples ``[B, T, ...]`` have different numbers of positions with a gradient."""
    if grad.dim() < 3 or not len(grad):
        return False
    used = (grad != 0).flatten(2).any(2).sum(1)
    return bool((used != used[0]).any())
