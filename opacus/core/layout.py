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
parallelism the rule of a split layer sums its parts. ``Sharded`` with the same samples on
all ranks (``replicated.py``) sums the layers that each rank has measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.kernels.gaussian import add_gaussian, can_fuse
from opacus.core.kernels.weighted_sum import consecutive
from opacus.core.noise import PIECE_ELEMENTS, ShardedNoise, gaussian
from opacus.core.profiling import REDUCTION, timed
from opacus.core.sharded import is_dtensor, is_fsdp

# Elements of half-precision sums that get their noise at once.
PIECE = 1 << 24


class Single:
    """One process."""

    world_size = 1
    # Whether all noise comes from one generator, wherever it is due.
    one_draw: ClassVar[bool] = True

    def __init__(self, generator: torch.Generator | None = None, secure_mode: bool = False) -> None:
        self.generator = generator
        self.secure_mode = secure_mode

    def noise(self, std: float, reference: Tensor) -> Tensor | None:
        """Noise of standard deviation ``std`` for one gradient, or None where none is due."""
        return gaussian(std, reference, self.generator, self.secure_mode)

    def noised(
        self,
        std: float,
        sums: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        in_place: bool = False,
    ) -> Iterable[Tensor]:
        """Each sum with the noise that is due to it here; formed when it is asked for.

        Args:
            std: Standard deviation of the noise.
            sums: Sums of clipped gradients.
            dtypes: Dtype of each result.
            in_place: Overwrite sums that have it, which saves the memory of another gradient.
        """
        wanted = iter(dtypes)
        for piece in consecutive(sums, Tensor.numel, PIECE_ELEMENTS):
            own = [next(wanted) for _ in piece]
            if self._can_fuse(std, piece, own):
                yield from self._fused(std, piece, own, in_place)
            else:
                for total, dtype in zip(piece, own, strict=True):
                    yield self._with_noise(std, total, dtype, in_place)

    def _can_fuse(self, std: float, sums: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> bool:
        """Whether one kernel can draw and add the noise of these sums."""
        due = self.one_draw and std > 0 and not self.secure_mode and self.draws_shared_noise()
        return (
            due
            and len({total.device for total in sums}) == 1
            and torch.float64 not in dtypes
            and all(not is_dtensor(t) and can_fuse(t, self.generator) for t in sums)
        )

    def _fused(
        self, std: float, sums: Sequence[Tensor], dtypes: Sequence[torch.dtype], in_place: bool
    ) -> Iterator[Tensor]:
        pairs = zip(sums, dtypes, strict=True)
        results = [
            total if in_place and total.dtype == dtype else torch.empty_like(total, dtype=dtype)
            for total, dtype in pairs
        ]
        add_gaussian(std, sums, results, self.generator)
        yield from results

    def _with_noise(self, std: float, total: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
        half = dtype in (torch.float16, torch.bfloat16)
        in_place = in_place and total.dtype == dtype
        if half and total.is_contiguous() and not is_dtensor(total):
            # A piece at a time: noise is drawn in fp32, twice as wide.
            out = total if in_place else torch.empty_like(total, dtype=dtype)
            pieces = zip(total.view(-1).split(PIECE), out.view(-1).split(PIECE), strict=True)
            for piece, place in pieces:
                noise = self.noise(std, piece)
                place.copy_(piece if noise is None else noise.add_(piece))
            return out
        noise = self.noise(std, total)
        if noise is None:
            return total if in_place else total.to(dtype, copy=True)
        return total.add_(noise) if in_place else noise.add_(total).to(dtype)

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

    @timed(REDUCTION)
    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


class Sharded(Single):
    """Parameters sharded by FSDP2, different samples on each rank."""

    one_draw = False

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

    def noised(
        self,
        std: float,
        sums: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        in_place: bool = False,
    ) -> Iterable[Tensor]:
        plain = not all(is_dtensor(total) for total in sums)
        other = any(total.dtype != dtype for total, dtype in zip(sums, dtypes, strict=True))
        if self.secure_mode or plain or other or not in_place:
            return super().noised(std, sums, dtypes, in_place)
        # On the local shards: an operation on a DTensor costs more time than this noise.
        shards: list[Any] = list(sums)
        self.streams.add_to_shards(std, shards)
        return shards


class TensorParallel(Single):
    """Layers split over ranks that all hold the same samples."""

    one_draw = False

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
    if locals_ and divisor != 1:
        torch._foreach_div_(locals_, divisor)


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 add gradients over ranks; DP needs the sum, and divides once, later."""
    for module in model.modules():
        if is_fsdp(module):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
