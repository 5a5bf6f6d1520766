"""Stored shards: per-sample gradients change hands while the backward pass still runs.

A layer's per-sample gradients are formed once and cut as FSDP2 cuts the parameter. By an
asynchronous all-to-all each of the W ranks of the shard axis gets, of its own shard, those of
*all* samples of these ranks. The squared norms of a sample's shards add up to that of its
gradient, by one all-reduce; every rank then weights the shards that it holds with all ranks'
clipping factors. The result is the reduced, sharded gradient: nothing is left to reduce after
the backward pass, but over HSDP's replicas.

Note [Nothing may hang]
    All ranks start the same exchanges in the same order, in a process group of their own: the
    layers and buckets are those that ``stored_shards.py`` has agreed on, a bucket starts when
    all before it have, and what a rank's batch did not reach is sent as zeros in the end.

Note [Numbers of samples]
    Ranks may have fewer samples than the largest batch, B, none included. The rows that they
    lack are zeros: these have norm zero and add nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.clipping import excluded_or_none
from opacus.core.kernels.reference import sums_of_squares
from opacus.core.kernels.weighted_sum import weighted_sum
from opacus.core.profiling import REDUCTION, each_layer, timed
from opacus.core.recorder import Layer, Record
from opacus.core.reduction import IN_FLIGHT, SMALL_ELEMENTS, Shards, add_shard

# Elements of one sample that are exchanged together; a larger layer alone.
BUCKET_ELEMENTS = 1 << 22

# torch 2.13 renamed it; the old name warns there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Part:
    """A parameter that is exchanged.

    Attributes:
        name: Of the parameter in the model.
        local: Its name in the layer.
        layer: Qualified name of the layer.
        shards: How it lies on the ranks.
        even: Whether its shards follow each other in memory, all of the same size.
        sent: Type in which per-sample gradients travel.
        summed: Type of the weighted sum: the parameter's, or that of sums over replicas.
    """

    name: str
    local: str
    layer: str
    shards: Shards
    even: bool
    sent: torch.dtype
    summed: torch.dtype


@dataclass
class _Bucket:
    """One exchange. ``sent`` is ``[W, B, n]``: for each rank the shard of each sample.

    ``missing`` has, of each layer that has not arrived yet, its parts and where they start.
    """

    parts: list[Part]
    starts: list[int]
    size: int
    missing: dict[str, list[tuple[Part, int]]]
    sent: Tensor | None = None
    received: Tensor | None = None
    work: Any = None
    norm_sq: list[Tensor] = field(default_factory=list)


class Exchange:
    """The exchanges of one backward pass.

    Args:
        parts: What is exchanged, in the order in which the backward pass should come to it;
            the same on all ranks.
        batch: Largest number of samples B on a rank, at least 1.
        rows: Number of samples on this rank.
        group: The ranks of the shard axis, in a group that nothing else uses.
        device: Where gradients are.
        count: Called whenever something has been communicated.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        batch: int,
        rows: int,
        group: dist.ProcessGroup,
        device: torch.device,
        count: Callable[[], None],
    ) -> None:
        self.names = frozenset(part.name for part in parts)
        self.batch = batch
        self.rows = rows
        self.group = group
        self.device = device
        self.count = count
        self.world = dist.get_world_size(group)
        self._buckets = _buckets(parts)
        self._bucket_of = {p.layer: b for b in self._buckets for p in b.parts}
        self._started = 0
        self._flying: list[_Bucket] = []
        self._factors: tuple[Tensor, Any, torch.dtype] | None = None

    # --- while the backward pass runs ---

    def takes(self, layer: Layer) -> bool:
        """Whether the per-sample gradients of ``layer`` are exchanged."""
        return layer.spec.name in self._bucket_of

    @each_layer
    def put(self, record: Record) -> None:
        """Form a layer's per-sample gradients and send them as soon as their bucket is full.

        Raises:
            RuntimeError: They have been sent already.
        """
        name = record.spec.name
        bucket = self._bucket_of[name]
        if name not in bucket.missing:
            raise RuntimeError(
                f"layer '{name}' ({record.spec.kind.__name__}) got another gradient after its "
                "per-sample gradients had been exchanged: set stored_shards='off'"
            )
        grads = record.layer.rule.per_sample_grad(record.spec, record.activations, record.backprops)
        grads = record.owned(grads)
        for part, start in bucket.missing.pop(name):
            self._write(bucket, part, start, grads.get(part.local))
        self._start_full()

    def _write(self, bucket: _Bucket, part: Part, start: int, grad: Tensor | None) -> None:
        """Cut ``grad`` ``[B_r, *shape]`` into ``bucket.sent``."""
        world, size = self.world, part.shards.size
        rows = 0 if grad is None else len(grad)
        whole = part.even and rows == self.batch
        if grad is not None and whole and rows == 1 and len(bucket.parts) == 1:
            # With one sample it lies as it is to be sent.
            bucket.sent = grad.to(part.sent).reshape(world, 1, size).contiguous()
            return
        if bucket.sent is None:
            bucket.sent = self._new(bucket)
        places = bucket.sent[:, :, start : start + size]
        if not whole:
            places.zero_()
        if grad is None or not rows:
            return
        if part.even:
            places[:, :rows].copy_(grad.reshape(rows, world, size).transpose(0, 1))
            return
        for place, piece in zip(places, grad.chunk(world, part.shards.dim + 1), strict=False):
            place[:rows, : piece.shape[1:].numel()].copy_(piece.reshape(rows, -1))

    def _new(self, bucket: _Bucket) -> Tensor:
        shape = self.world, self.batch, bucket.size
        return torch.empty(shape, dtype=bucket.parts[0].sent, device=self.device)

    def _start_full(self) -> None:
        """Start the buckets that are full, in order."""
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._start(self._buckets[self._started])
            self._started += 1

    def _start(self, bucket: _Bucket) -> None:
        if len(self._flying) >= IN_FLIGHT:
            self._land(self._flying.pop(0))
        assert bucket.sent is not None
        bucket.received = torch.empty_like(bucket.sent)
        bucket.work = dist.all_to_all_single(
            bucket.received.view(-1), bucket.sent.view(-1), group=self.group, async_op=True
        )
        self._flying.append(bucket)
        self.count()

    def _land(self, bucket: _Bucket) -> None:
        """Wait for a bucket (on a GPU the stream does) and measure the shards in it."""
        bucket.work.wait()
        assert bucket.received is not None
        bucket.sent = bucket.work = None
        bucket.received = bucket.received.view(self.world * self.batch, bucket.size)
        ends = zip(bucket.starts, bucket.parts, strict=True)
        bucket.norm_sq = sums_of_squares(
            [bucket.received[:, start : start + part.shards.size] for start, part in ends]
        )

    # --- after it ---

    def finish_norms(self) -> dict[str, Tensor]:
        """Squared norms ``[B_r]`` of this rank's samples, by parameter name.

        One all-reduce of the squared norms of all shards of all samples.
        """
        for bucket in self._buckets[self._started :]:
            for layer in list(bucket.missing):  # this rank's batch did not reach it
                for part, start in bucket.missing.pop(layer):
                    self._write(bucket, part, start, None)
        self._start_full()
        while self._flying:
            self._land(self._flying.pop(0))
        norms = [value for bucket in self._buckets for value in bucket.norm_sq]
        wide = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
        parts = torch.stack([n.to(wide) for n in norms])  # [parameters, W B]
        dist.all_reduce(parts, group=self.group)
        self.count()
        first = dist.get_rank(self.group) * self.batch
        own = parts[:, first : first + self.rows].unbind()
        names = [part.name for bucket in self._buckets for part in bucket.parts]
        return dict(zip(names, own, strict=True))

    def gather_factors(self, factors: Tensor, excluded: Tensor) -> None:
        """Start to tell all ranks this rank's clipping factors.

        Args:
            factors: ``[B_r]``, of this rank's samples.
            excluded: ``[B_r]`` bool, samples that must not contribute.
        """
        own = torch.zeros(self.batch, dtype=torch.float64, device=self.device)
        own[: self.rows] = factors.masked_fill(excluded, float("nan"))
        every = own.new_empty(self.world * self.batch)
        work = _all_gather(every, own, group=self.group, async_op=True)
        self._factors = every, work, factors.dtype
        self.count()

    @timed(REDUCTION)
    def add_sums(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the weighted sum over all samples' shards held here to the parameters' ``grad``."""
        assert self._factors is not None
        every, work, dtype = self._factors
        work.wait()
        excluded = every.isnan()
        factors = every.masked_fill(excluded, 0.0).to(dtype)
        masked = excluded_or_none(excluded)
        sums = [self._weigh(bucket, factors, masked) for bucket in self._buckets]
        for bucket, (total, work) in zip(self._buckets, sums, strict=True):
            if work is not None:
                work.wait()
            for part, start in zip(bucket.parts, bucket.starts, strict=True):
                parameter = parameters[part.name]
                if parameter.requires_grad:
                    add_shard(parameter, total[start : start + part.shards.size])

    def _weigh(
        self, bucket: _Bucket, factors: Tensor, excluded: Tensor | None
    ) -> tuple[Tensor, Any]:
        """The weighted sum of a bucket, and its reduction over replicas if that is running."""
        received, bucket.received = bucket.received, None
        assert received is not None
        first = bucket.parts[0]
        total = torch.empty(bucket.size, dtype=first.summed, device=received.device)
        weighted_sum(received, factors, excluded, out=total)
        replicas = first.shards.replicas
        if replicas is None:
            return total, None
        work = dist.all_reduce(total, group=replicas, async_op=True)
        self.count()
        return total, work


def _buckets(parts: Sequence[Part]) -> list[_Bucket]:
    """Layers one after another as they fit together; small ones last, by themselves."""
    by_layer: dict[str, list[Part]] = {}
    for part in parts:
        by_layer.setdefault(part.layer, []).append(part)
    large: list[list[Part]] = []
    small: list[list[Part]] = []
    for layer in by_layer.values():
        elements = sum(part.shards.elements for part in layer)
        (small if elements <= SMALL_ELEMENTS else large).append(layer)
    small.sort(key=lambda layer: str((layer[0].sent, layer[0].summed)))
    return _filled(large) + _filled(small)


def _filled(layers: Sequence[list[Part]]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    for parts in layers:
        last = buckets[-1] if buckets else None
        size = sum(part.shards.size for part in parts)
        world = parts[0].shards.world
        if (
            last is None
            or _kind(last.parts[0]) != _kind(parts[0])
            or (last.size + size) * world > BUCKET_ELEMENTS
        ):
            last = _Bucket([], [], 0, {})
            buckets.append(last)
        for part in parts:
            last.missing.setdefault(part.layer, []).append((part, last.size))
            last.parts.append(part)
            last.starts.append(last.size)
            last.size += part.shards.size
    return buckets


def _kind(part: Part) -> tuple[Any, ...]:
    """Equal for what can be in one bucket."""
    return part.sent, part.summed, part.shards.replicas
