"""Gaussian noise: a function of the run's key, the step, the parameter and the element."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opacus.core.kernels.noise.draw import Draw
from opacus.core.kernels.noise.gaussian import add_gaussian
from opacus.core.kernels.noise.regions import Region, regions_of
from opacus.core.kernels.norms.reference import wide_dtype
from opacus.core.platform.host_copies import wait_for
from opacus.core.platform.sharded import compute_devices, locals_of
from opacus.core.privacy.key import APART, RunKey

# Prefixes that wrappers add to parameter names.
_WRAPPERS = ("_module.", "module.", "_orig_mod.")
_INNER_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def gaussian(
    std: float,
    reference: Tensor,
    generator: torch.Generator | None = None,
    secure_mode: bool = False,
) -> Tensor:
    """Noise of the shape and device of a plain tensor, in fp32 (fp64 for fp64), never twice.

    Args:
        std: Standard deviation; 0 gives zeros and draws nothing.
        reference: Tensor whose shape, device and width the noise takes.
        generator: A seeded source, from which a key is drawn; by default the key of each call
            comes from the operating system.
        secure_mode: ChaCha20, with a key from the operating system; see
            :func:`opacus.core.kernels.noise.gaussian.add_gaussian`. ``generator`` is not used.
    """
    zeros = torch.zeros(reference.shape, dtype=wide_dtype(reference), device=reference.device)
    if std:
        key = RunKey(generator, secure=secure_mode)
        add_noise(std, [(zeros, zeros, "")], key, APART, secure_mode)
    return zeros


def add_noise(
    std: float,
    sums: Sequence[tuple[Tensor, Tensor, str]],
    key: RunKey,
    purpose: str,
    secure: bool = False,
    number: int | None = None,
    past: Sequence[tuple[float, int]] = (),
    part: float | None = None,
    divisor: float = 1.0,
) -> None:
    """Write sums with noise to where they go; of sharded tensors, each rank its own shard.

    Args:
        std: Standard deviation, positive.
        sums: Sum, target (of the same shape and layout; may be the sum itself) and the
            parameter's name, which no two of a run share.
        key: Of the run.
        purpose: What the noise is for.
        secure: ChaCha20 instead of Philox.
        number: Of the step, from ``key.advance``; by default a new one.
        past: Weights and numbers of earlier steps whose noise is made again and added, too.
        part: Round sums to a grid of this part of the noise; see
            :func:`opacus.core.kernels.noise.gaussian.add_gaussian`.
        divisor: Of the sums with their noise.
    """
    step = key.advance(purpose) if number is None else number
    sources, targets, names = zip(*sums, strict=True) if sums else ((), (), ())
    streams = key.streams(purpose, names, [step, *(old for _, old in past)])
    draws: list[Draw] = []
    back: list[tuple[Tensor, Tensor]] = []  # tensors that are not contiguous
    computed: set[torch.device] = set()  # on which shards are that wait in host memory
    shards = locals_of([*sources, *targets])
    own, places = shards[: len(sources)], shards[len(sources) :]
    on_gpu = all([shard.is_cuda for shard in own])
    devices = [shard.device for shard in own] if on_gpu else compute_devices(sources)
    todo = zip(sources, own, places, streams, devices, strict=True)
    for source, local, place, keys, device in todo:
        if not on_gpu and device != local.device:  # one at a time: there is no room for all
            moved = local.to(device, non_blocking=True).contiguous()
            same = moved.dtype == place.dtype
            result = moved if same else torch.empty_like(moved, dtype=place.dtype)
            own_draws = _draws(source, moved, result, keys)
            add_gaussian(std, own_draws, step, secure, past, part, divisor)
            place.copy_(result, non_blocking=True)
            computed.add(device)
            continue
        if not place.is_contiguous():
            back.append(
                (place, place := torch.empty_like(place, memory_format=torch.contiguous_format))
            )
        draws += _draws(source, local, place, keys)
    if draws:
        add_gaussian(std, draws, step, secure, past, part, divisor)
    for place, result in back:
        place.copy_(result)
    for device in computed:
        wait_for(device)


def _draws(tensor: Tensor, local: Tensor, target: Tensor, streams: Sequence[bytes]) -> list[Draw]:
    source, size, (key, *past) = local.contiguous(), local.numel(), streams
    earlier = tuple(past)
    if local is tensor:  # a plain one, which is whole here
        return [Draw(source, target, Region(0, size, size, size), key, earlier)] if size else []
    regions = regions_of(tensor, source)
    if len(regions) == 1:
        return [Draw(source, target, regions[0], key, earlier)]
    sizes = [region.size for region in regions]
    parts = zip(source.view(-1).split(sizes), target.view(-1).split(sizes), regions, strict=True)
    return [Draw(*part, key, earlier) for part in (parts if regions else ())]


# --- names ---


def parameter_names(module: nn.Module) -> dict[int, str]:
    """``id`` of each parameter -> its name, the same however the model is wrapped.

    A name that would stand for two parameters without its wrappers stays as it is.
    """
    full = {id(parameter): name for name, parameter in module.named_parameters()}
    short = {place: without_wrappers(name) for place, name in full.items()}
    return short if len(set(short.values())) == len(short) else full


def without_wrappers(name: str) -> str:
    """A parameter's name in the model itself."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return without_inner_wrappers(name)


def without_inner_wrappers(name: str) -> str:
    """A parameter's name without what is put around parts of a model."""
    for wrapper in _INNER_WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# --- seeds of what is no part of the guarantee ---


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed in [0, 2^62) for another generator; from the global one of the CPU if ``None``.

    Not from the one of the default device, which may be another one.
    """
    return int(torch.randint(2**62, (1,), generator=generator, device=device_of(generator)))


def device_of(generator: torch.Generator | None) -> torch.device:
    """Where a generator draws; the global one of the CPU if ``None``, whatever the default is."""
    return torch.device("cpu") if generator is None else generator.device
