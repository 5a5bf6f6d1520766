"""Gaussian noise: one independent stream per shard, none twice."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from opacus.core.kernels.gaussian import add_gaussian, can_fuse
from opacus.core.kernels.weighted_sum import consecutive
from opacus.core.torch_internals import as_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# Elements of noise that are drawn at once.
PIECE_ELEMENTS = 1 << 26


def gaussian(
    std: float,
    reference: Tensor,
    generator: torch.Generator | None = None,
    secure_mode: bool = False,
) -> Tensor:
    """Noise of the shape and device of a plain tensor, drawn in fp32 (fp64 for fp64).

    Args:
        std: Standard deviation; 0 gives zeros and draws nothing.
        reference: Tensor whose shape, device and width the noise takes.
        generator: Source of randomness; the global one of the device if ``None``.
        secure_mode: Draw from the operating system's entropy and combine four
            variates, so that floating-point artefacts of one draw reveal nothing
            (Holohan and Braghin, arXiv:2107.10138). ``generator`` is not used.
    """
    dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
    if std == 0:
        return torch.zeros(reference.shape, dtype=dtype, device=reference.device)
    if secure_mode:
        draws = sum(_system_normal(reference.shape) for _ in range(4))
        assert isinstance(draws, Tensor)
        return (draws * (std / 2)).to(device=reference.device, dtype=dtype)
    return torch.normal(
        mean=0.0,
        std=std,
        size=reference.shape,
        dtype=dtype,
        device=reference.device,
        generator=generator,
    )


class ShardedNoise:
    """Noise for sharded parameters: each rank draws its own shard and nothing more.

    The stream of a shard is seeded from one base seed, agreed on by all ranks, with
    the shard's coordinate folded in. Equal seeds on all ranks therefore never give
    equal noise, while replicas of a shard (HSDP) draw the same.

    Args:
        generator: Where the base seed is taken from on rank 0; the global generator
            if ``None``.
        secure_mode: See :func:`gaussian`.
    """

    def __init__(self, generator: torch.Generator | None, secure_mode: bool) -> None:
        self.generator = generator
        self.secure_mode = secure_mode
        self._base: int | None = None
        self._streams: dict[tuple[str, int], torch.Generator] = {}
        self._meshes: list[DeviceMesh] = []
        self._numbers: dict[Any, int] = {}

    def know(self, references: Iterable[Tensor]) -> None:
        """Learn on which meshes the parameters of a model lie.

        A parameter on a part of the mesh of another one (under FSDP2 with tensor
        parallelism) is held whole along the axes that it lacks: the noise there is equal.
        """
        from torch.distributed.tensor import DTensor

        meshes = {t.device_mesh for t in references if isinstance(t, DTensor)}
        self._meshes = sorted(meshes, key=lambda mesh: -mesh.ndim)
        self._numbers = {}

    def draw(self, std: float, reference: DTensor) -> DTensor:
        """A DTensor like ``reference`` whose local part is this shard's noise."""
        local = reference.to_local()
        if self.secure_mode and replicas(reference, self._meshes) > 1:
            raise NotImplementedError(
                "secure_mode=True cannot draw equal noise for the replicas of a shard; "
                "use a one-dimensional mesh"
            )
        index = stream_of(reference, self._meshes)
        stream = None if self.secure_mode else self._stream(index, local.device)
        noise = gaussian(std, local, stream, self.secure_mode)
        return as_sharded(noise, reference)

    def add_to_shards(self, std: float, tensors: Sequence[DTensor]) -> None:
        """Add noise to the local parts of many sharded tensors, in place and in few calls.

        Tensors with the same stream follow each other in it; it is drawn a piece at a time,
        so that the noise takes little memory. Not for ``secure_mode``.
        """
        if not std:
            return
        groups: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            shard = tensor.to_local()
            key = (self._number_of(tensor), shard.device, shard.dtype)
            groups.setdefault(key, []).append(shard)
        for (index, device, _), shards in groups.items():
            stream = self._stream(index, device)
            for piece in consecutive(shards, Tensor.numel, PIECE_ELEMENTS):
                _add_noise(std, piece, stream)

    def draw_equal(self, std: float, reference: Tensor) -> Tensor:
        """Noise for a plain tensor that every rank holds: the same on all of them."""
        if self.secure_mode:
            raise NotImplementedError(
                "secure_mode=True cannot draw equal noise for a parameter that every rank holds"
            )
        return gaussian(std, reference, self._stream(0, reference.device))

    def state_dict(self) -> dict[str, Tensor]:
        """State of the streams of this rank."""
        return {f"{d}:{i}": g.get_state() for (d, i), g in self._streams.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue the streams where :meth:`state_dict` found them."""
        for key, value in state.items():
            device, index = key.rsplit(":", 1)
            generator = torch.Generator(device=device)
            generator.set_state(value)
            self._streams[(device, int(index))] = generator

    def _number_of(self, tensor: DTensor) -> int:
        """:func:`stream_of`, remembered for each way of lying on the ranks."""
        key = (tensor.device_mesh, tensor.placements)
        if key not in self._numbers:
            self._numbers[key] = stream_of(tensor, self._meshes)
        return self._numbers[key]

    def renew(self, label: str, device: torch.device) -> None:
        """Start new streams, others for each ``label``; all ranks must call this."""
        text = f"{self._base_seed(device)}: {label}".encode()
        self.forget(int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 2)

    def forget(self, base: int) -> None:
        """Start new streams from another base seed, equal on all ranks."""
        self._base = base
        self._streams.clear()

    def _stream(self, index: int, device: torch.device) -> torch.Generator:
        key = (str(device), index)
        if key not in self._streams:
            generator = torch.Generator(device=device)
            generator.manual_seed(fold(self._base_seed(device), key[1]))
            self._streams[key] = generator
        return self._streams[key]

    def _base_seed(self, device: torch.device) -> int:
        if self._base is None:
            seed = torch.tensor([draw_seed(self.generator)], device=device)
            if dist.is_initialized():
                dist.broadcast(seed, 0)
            self._base = int(seed)
        return self._base


def _add_noise(std: float, shards: list[Tensor], stream: torch.Generator) -> None:
    """Add one draw from ``stream`` to the shards, drawn in fp32 (fp64 for fp64)."""
    if all(can_fuse(shard, stream) for shard in shards):
        return add_gaussian(std, shards, shards, stream)
    dtype = torch.float64 if shards[0].dtype == torch.float64 else torch.float32
    sizes = [shard.numel() for shard in shards]
    noise = torch.empty(sum(sizes), device=shards[0].device, dtype=dtype)
    parts = noise.normal_(0.0, std, generator=stream).split(sizes)
    views = [part.view(shard.shape) for part, shard in zip(parts, shards, strict=True)]
    torch._foreach_add_(shards, views)


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed in [0, 2^62) for another generator; from the global one of the CPU if ``None``.

    Not from the one of the default device, which may be another one.
    """
    return int(torch.randint(2**62, (1,), generator=generator, device=device_of(generator)))


def device_of(generator: torch.Generator | None) -> torch.device:
    """Where a generator draws; the global one of the CPU if ``None``, whatever the default is."""
    return torch.device("cpu") if generator is None else generator.device


def fold(seed: int, stream: int) -> int:
    """A seed for a stream, in [0, 2^62).

    Every bit of it depends on every bit of both: a generator on the CPU uses the low 32 alone.
    """
    digest = hashlib.sha256(f"{seed} {stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def stream_of(tensor: DTensor, meshes: Sequence[DeviceMesh] = ()) -> int:
    """Number of the noise stream of this rank's shard.

    Equal for the replicas of a shard; different for different shards, for different
    ways of splitting, and for meshes of different ranks. 0 is a tensor that is not
    split at all.

    Args:
        tensor: The sharded tensor.
        meshes: Meshes of the model's other parameters, those with most axes first.
    """
    mesh, places = _within(tensor.device_mesh, meshes)
    coordinate = mesh.get_coordinate()
    axes, index = 0, 0
    for axis, placement in zip(places, tensor.placements, strict=True):
        if not placement.is_replicate():  # is_shard() does not know strided shards
            assert coordinate is not None
            axes |= 1 << axis
            index = index * mesh.size(axis) + coordinate[axis]
    if not axes:
        return 0
    return (_number_of(mesh) << 40) + (axes << 32) + index + 1


def _within(mesh: DeviceMesh, meshes: Sequence[DeviceMesh]) -> tuple[DeviceMesh, Sequence[int]]:
    """The widest mesh that ``mesh`` is a part of, itself if none, and its axes there."""
    for wide in meshes:
        axes = _axes_in(mesh, wide)
        if axes is not None:
            return wide, axes
    return mesh, range(mesh.ndim)


@functools.lru_cache(maxsize=256)
def _axes_in(mesh: DeviceMesh, wide: DeviceMesh) -> tuple[int, ...] | None:
    """The axes of ``wide`` that ``mesh`` has, if it is a part of it at this rank."""
    names, known = mesh.mesh_dim_names or (), wide.mesh_dim_names or ()
    own = wide.get_coordinate()
    if mesh.ndim >= wide.ndim or not names or not set(names) <= set(known) or own is None:
        return None
    axes = tuple(known.index(name) for name in names)
    part = wide.mesh[tuple(slice(None) if a in axes else own[a] for a in range(wide.ndim))]
    return axes if list(axes) == sorted(axes) and torch.equal(part, mesh.mesh) else None


@functools.lru_cache(maxsize=32)
def _number_of(mesh: DeviceMesh) -> int:
    """A number for the ranks of a mesh, equal on all of them."""
    ranks = repr(mesh.mesh.tolist()).encode()
    return int.from_bytes(hashlib.sha256(ranks).digest()[:6], "big")


def replicas(tensor: DTensor, meshes: Sequence[DeviceMesh] = ()) -> int:
    """How many ranks hold the same shard; see :func:`stream_of` for the arguments."""
    mesh, axes = _within(tensor.device_mesh, meshes)
    split = {a for a, p in zip(axes, tensor.placements, strict=True) if not p.is_replicate()}
    return math.prod(mesh.size(axis) for axis in range(mesh.ndim) if axis not in split)


def _system_normal(shape: Iterable[int]) -> Tensor:
    """Standard normal variates by Box-Muller from ``os.urandom``."""
    shape = tuple(shape)
    count = math.prod(shape)
    raw = torch.frombuffer(bytearray(os.urandom(16 * max(count, 1))), dtype=torch.int64)
    # 53 random bits, in (0, 1]: the logarithm stays finite.
    uniform = ((raw.bitwise_and(2**53 - 1)).double() + 1) / 2**53
    radius = (-2 * uniform[:count].log()).sqrt()
    angle = 2 * math.pi * uniform[max(count, 1) : max(count, 1) + count]
    return (radius * angle.cos()).reshape(shape)
