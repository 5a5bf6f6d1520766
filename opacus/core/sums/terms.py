"""The terms of a clipped sum, and where the sums of one process go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import torch
from torch import Tensor, nn

from opacus.core.kernels.sums.float8 import scaled_factors
from opacus.core.kernels.sums.weighted_sum import scale_in_place, weighted_sum_each
from opacus.core.norms.host_memory import bring_back, fetch
from opacus.core.norms.kept import Kept
from opacus.core.platform.sizes import BUCKET_ELEMENTS
from opacus.core.privacy.clipping import Factors
from opacus.core.record.record import Record
from opacus.core.sums.unreduced import Unreduced
from opacus.core.sums.weighting import Weighting, sum_of_formed


class GradientSink(Protocol):
    """Where the clipped sums go: to a parameter, or through a reduction over ranks."""

    def put(self, name: str, terms: Terms) -> None:
        """Take the terms whose sum is the gradient of parameter ``name``."""

    def finish(self) -> None:
        """All parameters have been put: set their ``grad``."""

    unreduced: Unreduced | None  # sums that wait for later ones

    @property
    def shared(self) -> bool:
        """Whether several processes share the sums."""

    @property
    def bytes_needed(self) -> int:
        """Memory that is in use for a while as sums are formed."""

    @property
    def bytes_of_element(self) -> float:
        """Memory that a parameter's sum takes for good, an element of the whole parameter."""

    def abandon(self) -> None:
        """Drop what has been put since the latest :meth:`finish`, after an error."""


class WaitingSink(GradientSink, Protocol):
    """One in which the sums of physical batches may wait for those of later ones.

    Attributes:
        holding: Whether what is put now waits; settled by :meth:`hear`, on all ranks alike.
    """

    holding: bool
    unreduced: Unreduced

    def ask(self, replays: bool, numbers: Sequence[int]) -> None:
        """Ask all processes that share the sums, as the backward pass begins.

        Args:
            replays: Whether this one may want blocks to run again.
            numbers: Any.
        """

    def hear(self) -> tuple[bool, list[int]]:
        """After :meth:`ask`: whether any may, and the least of each number."""

    def agree(self, blocks: Sequence[AbstractSet[str]], wanted: Sequence[bool]) -> list[bool]:
        """Which blocks run again, on all processes alike.

        Args:
            blocks: Parameters of each.
            wanted: Whether this process wants to run it.
        """

    def hold(self, name: str, total: Tensor) -> None:
        """Add a term of a sum to those that wait."""


class Terms:
    """The terms of one parameter's clipped sum, evaluated when there is room for it.

    Args:
        stored: ``[B, *shape]`` per-sample gradients, or ``None``.
        later: Each gives one further term, of the parameter's shape, when called.
        factors: ``[B]`` clipping factors of this parameter.
        excluded: ``[B]`` bool, ``None`` if there are none.
        first: Writes the first of ``later`` to where it is told, ``[W, n]``, and says whether it
            could.
    """

    __slots__ = ("excluded", "factors", "first", "later", "stored")

    def __init__(
        self,
        stored: Tensor | None,
        later: Sequence[Callable[[], Tensor]],
        factors: Tensor,
        excluded: Tensor | None,
        first: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self.first = first
        self.stored = stored
        self.later = later
        self.factors = factors
        self.excluded = excluded

    def write(self, out: Tensor) -> None:
        """Write the sum to ``out``, whose elements are in the order of the parameter's."""
        first, later = self.stored is None, self.later
        if self.stored is not None:
            # A sampler may return a transpose.
            stored = self.stored.reshape(len(self.stored), *out.shape)
            sum_of_formed(stored, self.factors, self.excluded, out)
        elif not later:
            out.zero_()
        elif self.first is not None and self.first(out):
            first, later = False, later[1:]
        for term in later:
            value = term().reshape(out.shape)
            out = out.copy_(value) if first else out.add_(value)
            first = False

    def value(self) -> Tensor | None:
        """The sum as a tensor of its own."""
        total = None
        if self.stored is not None:
            total = sum_of_formed(self.stored, self.factors, self.excluded)
        for term in self.later:
            total = term() if total is None else total + term()
        return total


class Bucket:
    """Terms of parameters whose sums are formed together, up to a number of elements.

    Attributes:
        terms: By parameter name, in the order in which they came.
    """

    def __init__(self) -> None:
        self.terms: dict[str, Terms] = {}
        self._elements = 0
        self._kind: Hashable = None

    def put(self, name: str, terms: Terms, elements: int, kind: Hashable = None) -> bool:
        """Take the terms of a parameter, if they belong into it; a large one has one for itself.

        Args:
            name: Of the parameter.
            terms: Of its sum.
            elements: Of the parameter.
            kind: Equal for parameters that can be handled together.

        Returns:
            Whether they were taken.
        """
        room = self._elements + elements <= BUCKET_ELEMENTS and kind == self._kind
        if self.terms and not room:
            return False
        self.terms[name] = terms
        self._elements += elements
        self._kind = kind
        return True


class KeptSums:
    """The terms of each parameter's sum, of what a backward pass has left.

    Args:
        kept: Gradients and records; the records are forgotten there.
        weighting: With the clipping factors.

    Attributes:
        some_are_away: Whether any of it is in host memory.
    """

    def __init__(self, kept: Kept, weighting: Weighting) -> None:
        self.kept = kept
        self.weighting = weighting
        self._by_owner: dict[str, list[Record]] = {}
        self._grads: dict[int, dict[str, Tensor]] = {}
        self._excluded = weighting.masked
        self.some_are_away = bool(kept.away)
        for record in kept.take_held():
            if not record.tensors:
                self.some_are_away = True
            for owner in {record.layer.owners[n] for n in record.spec.params}:
                self._by_owner.setdefault(owner, []).append(record)

    def fetch(self, owner: str) -> None:
        """Begin to copy back what waits in host memory for a parameter's sum."""
        if owner in self.kept.away:
            self.kept.away[owner].fetch()
        for record in self._by_owner.get(owner, ()):
            fetch(record)

    def terms_of(self, owner: str, more: Sequence[Callable[[], Tensor]] = ()) -> Terms:
        """The terms of a parameter, each evaluated when it is asked for.

        Args:
            owner: Its name.
            more: Further ones.
        """
        kept, excluded, factors = self.kept, self._excluded, self.weighting.shared
        if factors is None:
            factors = self.weighting.clipped.of(owner)
        if not (more or self._by_owner or kept.rounded or kept.away):  # there may be hundreds
            return Terms(kept.formed.pop(owner, None), (), factors, excluded)
        if owner in kept.rounded:
            factors = scaled_factors(factors, kept.rounded.pop(owner).scales, excluded)
        records = self._by_owner.pop(owner, ())
        first = functools.partial(self._write, records[0]) if records else None
        later: list[Callable[[], Tensor]] = [
            functools.partial(self._weighted, record, owner) for record in records
        ]
        away = kept.away.pop(owner, None)
        if away is not None:  # it need not wait on the device for others
            later.append(lambda: sum_of_formed(away.back(), factors, excluded))
        return Terms(kept.formed.pop(owner, None), [*later, *more], factors, excluded, first)

    def _write(self, record: Record, out: Tensor) -> bool:
        """See :class:`Terms`."""
        if not record.tensors:
            bring_back(record)
        record.check_unchanged()
        return self.weighting.write(record, out)

    def _weighted(self, record: Record, owner: str) -> Tensor:
        owners = record.layer.owners
        names = [n for n in record.spec.params if owners[n] == owner]
        if id(record) not in self._grads:
            if not record.tensors:
                bring_back(record)
            record.check_unchanged()
            self._grads[id(record)] = self.weighting.sums(record)
        grads = self._grads[id(record)]
        first, *rest = [grads.pop(name) for name in names]
        for more in rest:
            first = first + more
        return first


class LocalSink:
    """Adds each sum to the parameter's ``grad`` on this process."""

    unreduced = None

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._bucket = Bucket()
        sizes = [p.numel() for p in parameters.values()]
        self._largest, self._all = max(sizes, default=0), sum(sizes)

    def put(self, name: str, terms: Terms) -> None:
        if terms.stored is not None and not terms.later:
            elements = self.parameters[name].numel()
            if not self._bucket.put(name, terms, elements):
                self.finish()
                self._bucket.put(name, terms, elements)
            return
        total = terms.value()
        if total is not None:
            parameter = self.parameters[name]
            add_to_grad(parameter, total.to(parameter.dtype))

    def finish(self) -> None:
        """Form the sums that wait."""
        waiting, self._bucket = self._bucket.terms, Bucket()
        if not waiting:
            return
        sums = weighted_sum_each(
            [terms.stored for terms in waiting.values() if terms.stored is not None],
            [terms.factors for terms in waiting.values()],
            next(iter(waiting.values())).excluded,
            [self.parameters[name].dtype for name in waiting],
        )
        for name, total in zip(waiting, sums, strict=True):
            add_to_grad(self.parameters[name], total)

    @property
    def shared(self) -> bool:
        """See :class:`GradientSink`."""
        return False

    @property
    def bytes_needed(self) -> int:
        """See :class:`GradientSink`: a parameter in fp32, or those that are formed together."""
        return 4 * max(self._largest, min(self._all, BUCKET_ELEMENTS))

    @property
    def bytes_of_element(self) -> float:
        """See :class:`GradientSink`: gradients have their parameters' dtypes."""
        return sum(p.nbytes for p in self.parameters.values()) / max(1, self._all)

    def abandon(self) -> None:
        """See :class:`GradientSink`."""
        self._bucket = Bucket()


@torch.no_grad()
def add_lone(
    formed: dict[str, Tensor], clipped: Factors, parameters: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """Add the weighted gradient of a lone sample: there is nothing to run again, or to add up.

    Args:
        formed: ``[1, *shape]`` by parameter name; emptied on the way, and overwritten where it can.
        clipped: Factors.
        parameters: With their names.
    """
    used = [(name, parameter) for name, parameter in parameters if name in formed]
    grads = [formed.pop(name) for name, _ in used]
    own = [clipped.of(name) for name, _ in used]
    dtypes = [parameter.dtype for _, parameter in used]
    if [g.dtype for g in grads] == dtypes and scale_in_place(grads, own, clipped.masked):
        sums = [grad[0] for grad in grads]
    else:
        sums = weighted_sum_each(grads, own, clipped.masked, dtypes)
    for (_, parameter), total in zip(used, sums, strict=True):
        add_to_grad(parameter, total)


def add_to_grad(parameter: nn.Parameter, total: Tensor) -> None:
    """``p.grad += total``, as a new tensor: nobody else's sum is written over."""
    parameter.grad = total if parameter.grad is None else parameter.grad + total
