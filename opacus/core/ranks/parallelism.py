"""What each mesh axis means for samples, norms, gradients and noise.

==================  =================  ====================  =====================
parallelism         samples on ranks   gradient sum          noise
==================  =================  ====================  =====================
``Single``          --                 --                    one draw
``DataParallel``    different          all-reduce            the same on each, then
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
from itertools import chain
from operator import itemgetter
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.kernels.norms.reference import wide_dtype
from opacus.core.kernels.sums.weighted_sum import consecutive
from opacus.core.platform.profiling import REDUCTION, timed
from opacus.core.platform.sharded import is_fsdp, locals_of
from opacus.core.platform.sizes import NOISE_ELEMENTS
from opacus.core.privacy.correlated import CorrelatedNoise
from opacus.core.privacy.correlation import Correlation, Split
from opacus.core.privacy.key import APART, COUNT, NOISE, RunKey
from opacus.core.privacy.noise import add_noise

# A sum, the dtype of a new tensor for it with noise (None: it is overwritten), its parameter's
# name, and the elements of that new tensor on this rank.
Job = tuple[Tensor, torch.dtype | None, str, int]


class Single:
    """One process.

    Args:
        generator: A seeded source of the noise; see :class:`opacus.core.privacy.key.RunKey`.
        secure_mode: ChaCha20, with a key that never comes from a seed.

    Attributes:
        key: Key of the run.
        correlation: How the noise of steps is correlated; ``None`` if it is independent.
        grid: Sums with noise are rounded to this part of it; ``None``: in secure mode only.
    """

    world_size = 1
    # Whether all ranks draw with one key.
    shares_key: ClassVar[bool] = False

    def __init__(self, generator: torch.Generator | None = None, secure_mode: bool = False) -> None:
        self._generator = generator
        self.secure_mode = secure_mode
        self.key = self._new_key()
        self.correlation: Correlation | None = None
        self.grid: float | None = None

    def correlate(self, plan: CorrelatedNoise, split: Split) -> None:
        """From now on steps have correlated noise; see that class."""
        self.correlation = Correlation(plan, split)
        self.key.keeps_past = True

    @property
    def generator(self) -> torch.Generator | None:
        """The seeded source of the noise, if there is one."""
        return self._generator

    @generator.setter
    def generator(self, value: torch.Generator | None) -> None:
        self._generator = value
        old, self.key = self.key, self._new_key()
        self.key.follow(old)

    def _new_key(self) -> RunKey:
        return RunKey(self._generator, secure=self.secure_mode, shared=self.shares_key)

    @property
    def noise_growth(self) -> float:
        """Deviation of the draws relative to that of independent noise for the same privacy."""
        return 1.0 if self.correlation is None else self.correlation.plan.sensitivity

    @property
    def noise_spread(self) -> float:
        """Deviation of the latest step's noise relative to that of its own draws."""
        return 1.0 if self.correlation is None else self.correlation.spread

    def skip_noise(self) -> None:
        """A step was skipped: correlated noise counts steps to know when a sample takes part."""
        if self.correlation is not None:
            self.key.advance(NOISE)

    def check(self, sums: Iterable[Tensor]) -> None:
        """Refuse sums that do not lie on the ranks as noise is drawn for them."""

    def noise(self, std: float, reference: Tensor) -> Tensor:
        """Noise by itself, other noise in each call.

        Args:
            std: Standard deviation.
            reference: A gradient; the noise has its shape, layout and device.
        """
        self.check([reference])
        number = self.key.advance(APART)
        noise = torch.zeros_like(reference, dtype=wide_dtype(reference))
        if std:
            add_noise(std, [(noise, noise, "")], self.key, APART, self.secure_mode, number)
        return noise

    def noised(
        self,
        std: float,
        sums: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        in_place: bool = False,
        names: Sequence[str] | None = None,
        divisor: float = 1.0,
    ) -> Iterable[Tensor]:
        """Each sum with its noise, divided, a step of the key's.

        Args:
            std: Standard deviation of the noise; with a correlation, of the white draws.
            sums: Sums of clipped gradients.
            dtypes: Dtype of each result.
            in_place: Overwrite sums that have it, which saves the memory of another gradient.
            names: Names of the parameters, by which their noise differs; by default their places.
            divisor: Of sum and noise together, before they are rounded to the result's dtype.

        Returns:
            The results, formed when they are asked for.
        """
        self.check(sums)
        past = [] if self.correlation is None else self.correlation.past(self.key.step, std)
        step = self.key.advance(NOISE)
        names = [str(place) for place in range(len(sums))] if names is None else names
        jobs = []
        for total, own, dtype, name in zip(sums, locals_of(sums), dtypes, names, strict=True):
            stays = in_place and total.dtype == dtype
            jobs.append((total, None if stays else dtype, name, 0 if stays else own.numel()))
        return chain.from_iterable(self._pieces(std, jobs, step, past, divisor))

    def _pieces(
        self,
        std: float,
        jobs: list[Job],
        step: int,
        past: list[tuple[float, int]],
        divisor: float,
    ) -> Iterator[list[Tensor]]:
        for piece in consecutive(jobs, itemgetter(3), NOISE_ELEMENTS):
            todo = [
                (total, total if dtype is None else _like(total, dtype), name)
                for total, dtype, name, _ in piece
            ]
            if std > 0 and self.correlation is not None and self.correlation.buffers is not None:
                numbers = self.correlation.first, step
                self.correlation.buffers.add(
                    std, todo, self.key, numbers, self.secure_mode, self.grid, divisor
                )
            elif std > 0:
                add_noise(
                    std, todo, self.key, NOISE, self.secure_mode, step, past, self.grid, divisor
                )
            else:
                for total, target, _ in todo:
                    if target is not total:
                        target.copy_(total)
                divide([target for _, target, _ in todo], divisor)
            yield [target for _, target, _ in todo]

    def noised_count(self, std: float, count: Tensor) -> Tensor:
        """A count of this rank's samples, in place with the noise that is due to it here."""
        number = self.key.advance(COUNT)
        if not std:
            return count
        self.key.agree()  # all ranks do, also those that draw nothing
        if self.draws_shared_noise():
            add_noise(std, [(count, count, "")], self.key, COUNT, self.secure_mode, number)
        return count

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the clipped sums over ranks, where that has not been done."""

    def draws_shared_noise(self) -> bool:
        """Whether this rank draws the noise of numbers that are summed over ranks."""
        return True


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype)


class _OwnSamples(Single):
    """Each rank has samples of its own; the first draws the noise of what ranks add up."""

    shares_key = True

    def __init__(self, generator: torch.Generator | None = None, secure_mode: bool = False) -> None:
        super().__init__(generator, secure_mode)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def draws_shared_noise(self) -> bool:
        return self.rank == 0


class DataParallel(_OwnSamples):
    """Replicas of the model with different samples (DDP).

    Each adds the same noise to the sum over ranks, so what is released is rounded after that sum.
    """

    @timed(REDUCTION)
    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            total: Tensor | None = getattr(parameter, "summed_grad", None)
            # In fp32, as long as the noise is missing; a rank may lack what others have used.
            own = torch.zeros_like(parameter) if total is None else total
            parameter.summed_grad = own = own.to(wide_dtype(own))  # type: ignore[attr-defined]
            dist.all_reduce(own, op=dist.ReduceOp.SUM)


class Sharded(_OwnSamples):
    """Parameters sharded by FSDP2, different samples on each rank.

    A shard's noise is that of its elements' numbers in the whole parameter: nothing is drawn
    twice, and replicas of a shard (HSDP) draw the same.
    """

    def check(self, sums: Iterable[Tensor]) -> None:
        check_gradients_sharded(sums)


class TensorParallel(Single):
    """Layers split over ranks that all hold the same samples.

    The noise of a parameter that all ranks hold whole is the same on each.
    """

    shares_key = True


def check_gradients_sharded(tensors: Iterable[Tensor]) -> None:
    """Refuse gradients that FSDP2 has not sharded.

    Raises:
        ValueError: It names the shape.
    """
    tensors = list(tensors)
    for tensor, local in zip(tensors, locals_of(tensors), strict=True):
        if local is tensor:
            raise ValueError(
                "an FSDP optimizer needs sharded gradients, got a plain tensor of shape "
                f"{tuple(tensor.shape)}; wrap the whole model with FSDP2Wrapper first"
            )


def divide(tensors: Sequence[Tensor], divisor: float | Tensor) -> None:
    """Divide all tensors in place, this rank's shards of sharded ones."""
    if tensors and (isinstance(divisor, Tensor) or divisor != 1):
        shards = locals_of(tensors)
        if isinstance(divisor, Tensor):  # known where the sums were computed
            divisor = divisor.to(shards[0].device)
        torch._foreach_div_(shards, divisor)


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 add gradients over ranks; DP needs the sum, and divides once, later."""
    for module in model.modules():
        if is_fsdp(module):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
