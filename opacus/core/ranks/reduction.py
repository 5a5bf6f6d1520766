"""Sums clipped gradients over ranks into the shards of FSDP2's parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.kernels.sums.weighted_sum import can_batch, weighted_sums
from opacus.core.platform.host_copies import to_host
from opacus.core.platform.memory import most_in_use
from opacus.core.platform.profiling import REDUCTION, each_layer, timed
from opacus.core.platform.sharded import compute_device, local_of
from opacus.core.platform.sizes import BUCKET_ELEMENTS, BUCKETS_IN_FLIGHT, LAST_BUCKET_ELEMENTS
from opacus.core.ranks.asked import Asked
from opacus.core.ranks.shards import Shards, add_shards, shards_of
from opacus.core.sums.terms import Bucket, Terms
from opacus.core.sums.unreduced import Unreduced


@dataclass
class _Reduction:
    """A bucket that is reduced: the parameters in it, where each starts, and its buffers."""

    names: list[str]
    starts: list[int] = field(default_factory=list)
    whole: Tensor | None = None
    shard: Tensor | None = None
    work: Any = None


# torch 2.13 renamed it; the old name warns there.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


OTHER_NUMBERS = (
    "ranks take different numbers of physical batches, so that one would release a step to which "
    "another still adds: signal_skip_step() as often on each rank, with empty batches where there "
    "are no more, as BatchMemoryManager does"
)


class _Layout(dict[str, Shards]):
    """How each parameter lies on the ranks, found out when it is first asked for."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        super().__init__()
        self._parameters, self._dtypes = parameters, dtypes

    def __missing__(self, name: str) -> Shards:
        dtype = self._dtypes.get(name, torch.float32)
        self[name] = found = shards_of(name, self._parameters[name], dtype)
        return found


class ShardedSink:
    """Reduce-scatters clipped sums, a bucket at a time, while the next bucket is filled.

    Every rank reduces all trainable parameters in the same order, also those that took
    no part in its own batch: an unused branch or an empty batch cannot make ranks wait
    for each other.

    Args:
        parameters: Trainable and frozen parameters by name, sharded by FSDP2.
        reduce_dtypes: Type in which the gradient of each is summed.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], reduce_dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self.parameters = parameters
        self.reduce_dtypes = reduce_dtypes
        self._shards = _Layout(parameters, reduce_dtypes)
        self._bucket = Bucket()
        self._small: dict[str, Terms] = {}
        self._flying: list[_Reduction] = []
        # Shards on their way to host memory, and the event at which they are there.
        self._leaving: list[tuple[list[str], Tensor, Any]] = []
        self.reductions = self.questions = 0  # started so far, the same numbers on all ranks
        self.unreduced = Unreduced()
        self.holding = False  # whether the sums that are put now wait for later ones
        self._asked: Asked | None = None

    def put(self, name: str, terms: Terms) -> None:
        """Take one parameter; starts a reduction when a bucket is full."""
        if self._shards[name].elements <= LAST_BUCKET_ELEMENTS:
            self._small[name] = terms  # together, after the others
        else:
            self._take(name, terms)

    def hold(self, name: str, total: Tensor) -> None:
        """See :class:`~opacus.core.sums.terms.GradientSink`."""
        shards = self._shards[name]
        part = torch.empty(shards.world, shards.size, dtype=shards.dtype, device=total.device)
        _fill(part, Terms(None, [lambda: total], total, None), shards)
        self.unreduced.add(name, part)

    def _take(self, name: str, terms: Terms) -> None:
        shards = self._shards[name]
        if not self._bucket.put(name, terms, shards.elements, shards.reduction):
            self._launch()
            self._bucket.put(name, terms, shards.elements, shards.reduction)

    def finish(self) -> None:
        """Reduce what is left and set every parameter's ``grad``, unless sums wait for later."""
        small, self._small = self._small, {}
        for name, terms in small.items():
            self._take(name, terms)
        if self._bucket.terms:
            self._launch()
        if self.holding:
            self.unreduced.fresh = self.unreduced.waiting = True
            return
        self.unreduced.drop()  # of parameters that are frozen now
        while self._flying:
            self._land(self._flying.pop(0))
        leaving, self._leaving = self._leaving, []
        for names, values, arrived in leaving:
            if arrived is not None:
                arrived.synchronize()
            self._add(names, values)

    @property
    def shared(self) -> bool:
        """Whether any parameter is sharded over several ranks."""
        return any(dist.get_world_size(group) > 1 for group in self._groups)

    @functools.cached_property
    def bytes_needed(self) -> int:
        """See :class:`~opacus.core.sums.terms.GradientSink`: what is filled and what flies."""
        sizes = [p.numel() for p in self.parameters.values()]
        largest, every = max(sizes, default=0), sum(sizes)
        filled = 4 * max(BUCKET_ELEMENTS, largest)
        own = int(self.bytes_of_element * largest)  # a shard, while its terms are still there
        flying = 4 * BUCKETS_IN_FLIGHT * BUCKET_ELEMENTS
        return min(filled + max(flying, own), 4 * every + own)

    @functools.cached_property
    def bytes_of_element(self) -> float:
        """See :class:`~opacus.core.sums.terms.GradientSink`: none of what host memory holds."""
        here = [
            local_of(p).nbytes
            for p in self.parameters.values()
            if compute_device(p).type == p.device.type
        ]
        return sum(here) / max(1, sum(p.numel() for p in self.parameters.values()))

    def ask(self, replays: bool, numbers: Sequence[int]) -> None:
        """See :class:`~opacus.core.sums.terms.GradientSink`; also whether sums may wait."""
        wanted = int(self.unreduced.wanted)
        waits = wanted and self._has_room()
        several = [g for g in self._groups if dist.get_world_size(g) > 1]
        device = next(iter(self._groups.values()))
        own = [wanted, -wanted, int(waits), int(not replays), *numbers]
        self._asked = Asked(own, several, device)
        self.questions += bool(several)

    def hear(self) -> tuple[bool, list[int]]:
        """See :class:`~opacus.core.sums.terms.GradientSink`.

        Raises:
            RuntimeError: On all ranks: for some the batch is the last one of its step.
        """
        assert self._asked is not None
        least, most, waits, none_replays, *numbers = self._asked.least()
        self._asked = None
        if least != -most:
            raise RuntimeError(f"{OTHER_NUMBERS}. Nothing of the step was added to the model")
        self.holding = bool(waits)
        return not none_replays, numbers

    def agree(self, blocks: Sequence[AbstractSet[str]], wanted: Sequence[bool]) -> list[bool]:
        """A block is replayed if any rank that has a shard of it wants to: all gather it."""
        result = list(wanted)
        groups: dict[Any, list[int]] = {}
        for place, owners in enumerate(blocks):
            groups.setdefault(self._shards[min(owners)].group, []).append(place)
        for group, places in groups.items():
            if dist.get_world_size(group) == 1:
                continue
            said = [int(result[p]) for p in places]
            heard = torch.tensor(said, dtype=torch.int64, device=self._groups[group])
            dist.all_reduce(heard, dist.ReduceOp.MAX, group=group)
            for place, flag in zip(places, heard.tolist(), strict=True):
                result[place] = bool(flag)
        return result

    def _has_room(self) -> bool:
        """Whether all sums can lie on this rank as a whole, for as long as batches come."""
        if self.unreduced:
            return True
        trained = [(n, p) for n, p in self.parameters.items() if p.requires_grad]
        device = compute_device(trained[0][1])
        if device.type != "cuda":
            return True
        if not self.reductions:
            return False  # the peak of a step is not known yet
        needed = sum(p.numel() * self._shards[n].dtype.itemsize for n, p in trained)
        peak = torch.cuda.max_memory_allocated(device)
        return needed < most_in_use(device) - peak

    @functools.cached_property
    def _groups(self) -> dict[Any, torch.device]:
        """The groups that shard parameters, then those of replicas, in the same order on all."""
        trained = [(n, p) for n, p in self.parameters.items() if p.requires_grad]
        shards = [(self._shards[n], compute_device(p)) for n, p in trained]
        replicas = {s.replicas: device for s, device in shards if s.replicas is not None}
        return {**{s.group: device for s, device in shards}, **replicas}

    def abandon(self) -> None:
        """See :class:`~opacus.core.sums.terms.GradientSink`."""
        self.unreduced.drop(warn=True)
        self._bucket, self._small, self._flying = Bucket(), {}, []
        self._leaving, self._asked = [], None

    def _launch(self) -> None:
        """Form the sums of a bucket, with those that waited; reduce them, or let them wait."""
        waiting, self._bucket = self._bucket.terms, Bucket()
        bucket = _Reduction(list(waiting))
        first = self._shards[bucket.names[0]]
        if len(self._flying) >= BUCKETS_IN_FLIGHT:
            self._land(self._flying.pop(0))
        sizes = [self._shards[name].size for name in bucket.names]
        *bucket.starts, total = itertools.accumulate(sizes, initial=0)
        device = next(iter(waiting.values())).factors.device
        bucket.whole = torch.empty(first.world, total, dtype=first.dtype, device=device)
        self._fill(bucket, bucket.whole, waiting)
        some_wait = self.holding or bool(self.unreduced)
        places = zip(bucket.names, bucket.starts, sizes, strict=True)
        for name, start, size in places if some_wait else ():
            part = bucket.whole[:, start : start + size]
            earlier = self.unreduced.pop(name)
            if earlier is not None:
                part += earlier
            if self.holding:
                self.unreduced.add(name, part)
        if self.holding:
            return
        bucket.shard = torch.empty(total, dtype=first.dtype, device=device)
        bucket.work = _reduce_scatter(
            bucket.shard, bucket.whole.view(-1), group=first.group, async_op=True
        )
        self._flying.append(bucket)
        self.reductions += 1

    def _fill(self, bucket: _Reduction, whole: Tensor, waiting: dict[str, Terms]) -> None:
        """Evaluate the sums into ``whole`` ``[W, n]``, stored gradients in one launch."""
        batched: list[tuple[Terms, int, int]] = []
        for name, start in zip(bucket.names, bucket.starts, strict=True):
            shards, terms = self._shards[name], waiting.pop(name)
            stored = terms.stored
            alone = stored is not None and stored.shape[0] and not terms.later and shards.even
            if alone and can_batch(stored, terms.factors):  # type: ignore[arg-type]
                batched.append((terms, start, shards.size))
            else:
                _fill(whole[:, start : start + shards.size], terms, shards)
        if batched:
            weighted_sums(
                [t.stored for t, _, _ in batched if t.stored is not None],
                [t.factors for t, _, _ in batched],
                batched[0][0].excluded,
                whole,
                [start for _, start, _ in batched],
                [size for _, _, size in batched],
            )

    @timed(REDUCTION)
    @each_layer
    def _land(self, bucket: _Reduction) -> None:
        bucket.work.wait()
        bucket.whole = bucket.work = None
        assert bucket.shard is not None
        first = self._shards[bucket.names[0]]
        if first.replicas is not None:
            dist.all_reduce(bucket.shard, group=first.replicas)
        if first.home == bucket.shard.device.type:
            self._add(bucket.names, bucket.shard)
        else:  # beside the sums of the buckets to come
            self._leaving.append((bucket.names, *to_host(bucket.shard)))

    def _add(self, names: Sequence[str], shard: Tensor) -> None:
        """Add a bucket's shards to the gradients of its parameters."""
        sizes = [self._shards[name].size for name in names]
        add_shards([self.parameters[name] for name in names], shard, sizes)

    def __getstate__(self) -> dict[str, Any]:
        transient: dict[str, Any] = {
            "_shards": _Layout(self.parameters, self.reduce_dtypes),
            "_bucket": Bucket(),
            "_small": {},
            "_flying": [],
            "_leaving": [],
        }
        return {**self.__dict__, **transient, "holding": False, "_asked": None}


def _fill(part: Tensor, terms: Terms, shards: Shards) -> None:
    """Write a gradient into ``part`` ``[W, size]``, row r the shard of rank r."""
    if shards.even:
        terms.write(part)
        return
    part.zero_()
    whole = terms.value()
    if whole is not None:
        for row, piece in zip(part, whole.chunk(shards.world, dim=shards.dim), strict=False):
            row[: piece.numel()].copy_(piece.reshape(-1))
