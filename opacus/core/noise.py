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

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_ODD = 0x9E3779B97F4A7C15  # odd, so that its multiples differ in every power of two


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

    def draw(self, std: float, reference: DTensor) -> DTensor:
        """A DTensor like ``reference`` whose local part is this shard's noise."""
        from torch.distributed.tensor import DTensor

        local = reference.to_local()
        if self.secure_mode and replicas(reference) > 1:
            raise NotImplementedError(
                "secure_mode=True cannot draw equal noise for the replicas of a shard; "
                "use a one-dimensional mesh"
            )
        stream = None if self.secure_mode else self._stream(stream_of(reference), local.device)
        noise = gaussian(std, local, stream, self.secure_mode)
        return DTensor.from_local(
            noise,
            reference.device_mesh,
            reference.placements,
            run_check=False,
            shape=reference.shape,
            stride=reference.stride(),
        )

    def draw_shards(self, std: float, references: Sequence[DTensor]) -> list[Tensor]:
        """The local parts of noise for many sharded tensors, drawn in as few calls as possible.

        Tensors with the same stream follow each other in it. Not for ``secure_mode``.
        """
        groups: dict[Any, list[int]] = {}
        shards = [reference.to_local() for reference in references]
        for place, (reference, shard) in enumerate(zip(references, shards, strict=True)):
            wide = torch.float64 if shard.dtype == torch.float64 else torch.float32
            groups.setdefault((stream_of(reference), shard.device, wide), []).append(place)
        noises: list[Tensor | None] = [None] * len(shards)
        for (index, device, dtype), places in groups.items():
            sizes = [shards[place].numel() for place in places]
            flat = torch.zeros(sum(sizes), device=device, dtype=dtype)
            if std:
                flat.normal_(0.0, std, generator=self._stream(index, device))
            for place, part in zip(places, flat.split(sizes), strict=True):
                noises[place] = part.view(shards[place].shape)
        return [noise for noise in noises if noise is not None]

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

    def _stream(self, index: int, device: torch.device) -> torch.Generator:
        key = (str(device), index)
        if key not in self._streams:
            generator = torch.Generator(device=device)
            generator.manual_seed(fold(self._base_seed(device), key[1]))
            self._streams[key] = generator
        return self._streams[key]

    def _base_seed(self, device: torch.device) -> int:
        if self._base is None:
            source = self.generator
            seed = torch.randint(
                2**62, (1,), generator=source, device=source.device if source else "cpu"
            ).to(device)
            if dist.is_initialized():
                dist.broadcast(seed, 0)
            self._base = int(seed)
        return self._base


def fold(seed: int, stream: int) -> int:
    """A seed for a stream; distinct for nearby streams, also in its low bits."""
    return (seed + stream * _ODD) % 2**62


def stream_of(tensor: DTensor) -> int:
    """Number of the noise stream of this rank's shard.

    Equal for the replicas of a shard; different for different shards, for different
    ways of splitting, and for meshes of different ranks. 0 is a tensor that is not
    split at all.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    axes, index = 0, 0
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            assert coordinate is not None
            axes |= 1 << axis
            index = index * mesh.size(axis) + coordinate[axis]
    if not axes:
        return 0
    return (_number_of(mesh) << 40) + (axes << 32) + index + 1


@functools.lru_cache(maxsize=32)
def _number_of(mesh: DeviceMesh) -> int:
    """A number for the ranks of a mesh, equal on all of them."""
    ranks = repr(mesh.mesh.tolist()).encode()
    return int.from_bytes(hashlib.sha256(ranks).digest()[:6], "big")


def replicas(tensor: DTensor) -> int:
    """How many ranks hold the same shard."""
    axes = enumerate(tensor.placements)
    sizes = (tensor.device_mesh.size(a) for a, p in axes if not p.is_shard())
    return math.prod(sizes)


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
