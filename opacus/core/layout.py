"""What each mesh axis means for samples, norms, gradients and noise.

==================  =================  ====================  =====================
layout              samples on ranks   gradient sum          noise
==================  =================  ====================  =====================
``Single``          --                 --                    one draw
``DataParallel``    different          all-reduce            one draw, on rank 0
``Sharded``         different          reduce-scatter, FSDP  own stream per shard
``TensorParallel``  the same           none                  per shard; one if whole
==================  =================  ====================  =====================

Per-sample norms are complete on the rank that holds the sample in the first three:
they are never summed over ranks, whose samples are different people. Under tensor
parallelism the rule of a split layer sums its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.noise import ShardedNoise, gaussian
from opacus.core.sharded import is_dtensor, is_fsdp


class Single:
    """One process."""

    world_size = 1

    def __init__(self, generator: torch.Generator | None = None, secure_mode: bool = False) -> None:
        self.generator = generator
        self.secure_mode = secure_mode

    def noise(self, std: float, reference: Tensor) -> Tensor | None:
        """Noise of standard deviation ``std`` for one gradient, or None where none is due."""
        return gaussian(std, reference, self.generator, self.secure_mode)

    def noised(self, std: float, sums: Sequence[Tensor]) -> list[Tensor]:
        """Each sum with the noise that is due to it here; the sums may be overwritten."""
        draws = (self.noise(std, total) for total in sums)
        return [t.clone() if n is None else t + n for t, n in zip(sums, draws, strict=True)]

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the noised gradients over ranks, where that has not been done."""

    def draws_shared_noise(self) -> bool:
        """Whether this rank draws the noise of numbers that are summed over ranks."""
        return True


class DataParallel(Single):
    """Replicas of the model with different samples (DDP)."""

    def __init__(self, generator: torch.Generator | None = None, secure_mode: bool = False) -> None:
        super().__init__(generator, secure_mode)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def noise(self, std: float, reference: Tensor) -> Tensor | None:
        return super().noise(std, reference) if self.rank == 0 else None

    def draws_shared_noise(self) -> bool:
        return self.rank == 0

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


class Sharded(Single):
    """Parameters sharded by FSDP2, different samples on each rank."""

    def __init__(self, generator: torch.Generator | None = None, secure_mode: bool = False) -> None:
        super().__init__(generator, secure_mode)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.streams = ShardedNoise(generator, secure_mode)

    def draws_shared_noise(self) -> bool:
        return self.rank == 0

    def noise(self, std: float, reference: Tensor) -> Tensor | None:
        if not is_dtensor(reference):
            raise ValueError(
                "an FSDP optimizer needs sharded gradients, got a plain tensor of shape "
                f"{tuple(reference.shape)}; wrap the whole model with FSDP2Wrapper first"
            )
        return self.streams.draw(std, reference)

    def noised(self, std: float, sums: Sequence[Tensor]) -> list[Tensor]:
        if self.secure_mode or not all(is_dtensor(total) for total in sums):
            return super().noised(std, sums)
        # On the local shards: an operation on a DTensor costs more time than this noise.
        shards: list[Any] = list(sums)
        self.streams.add_to_shards(std, shards)
        return shards


class TensorParallel(Single):
    """Layers split over ranks that all hold the same samples."""

    def __init__(self, generator: torch.Generator | None = None, secure_mode: bool = False) -> None:
        super().__init__(generator, secure_mode)
        self.streams = ShardedNoise(generator, secure_mode)

    def noise(self, std: float, reference: Tensor) -> Tensor | None:
        if is_dtensor(reference):
            return self.streams.draw(std, reference)
        return self.streams.draw_equal(std, reference)


def divide(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide all tensors in place, this rank's shards of sharded ones."""
    locals_ = [t.to_local() if is_dtensor(t) else t for t in tensors]
    if locals_:
        torch._foreach_div_(locals_, divisor)


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 add gradients over ranks; DP needs the sum, and divides once, later."""
    for module in model.modules():
        if is_fsdp(module):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def gather_rows(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All ranks' ``[B_r]`` vectors in rank order; ranks may hold different numbers.

    Two collectives on every rank, whatever the sizes, empty ones included.
    """
    world = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(world)]
    own = torch.tensor([values.shape[0]], dtype=torch.int64, device=values.device)
    dist.all_gather(counts, own, group=group)
    sizes = [int(c) for c in counts]
    padded = values.new_zeros(max(max(sizes), 1))
    padded[: values.shape[0]] = values
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
