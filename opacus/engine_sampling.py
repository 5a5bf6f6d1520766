"""How batches are drawn: what PrivacyEngine refuses, and what the accountant is told."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from opacus.accountants import IAccountant
from opacus.accountants.sampling import GaussianMixture, Sampling, TruncatedPoisson, UserRows
from opacus.core.privacy.correlated import CorrelatedNoise
from opacus.data.rates import sample_rate_of
from opacus.engine_settings import Settings


def facts_of_draws(settings: Settings) -> dict[str, Any]:
    """What must be equal on ranks that draw together: each is given the whole data set.

    With another number of items a rank would deal them out in another way, so that an item could
    be drawn by two ranks, and count steps at another rate.
    """
    loader = settings.data_loader
    if not settings.poisson_sampling or not hasattr(loader.dataset, "__len__"):
        return {}
    return {
        "the number of items of data_loader.dataset, which each rank needs whole": len(
            loader.dataset
        ),
        "the sample rate of data_loader": sample_rate_of(loader),
    }


def check_sampling(settings: Settings, accountant: IAccountant) -> None:
    """Check that batches are drawn as they are counted.

    Raises:
        ValueError: They are not, or the accountant cannot count them.
    """
    sampling = settings.sampling
    if settings.max_batch_size is not None:
        _check_max_batch_size(settings)
        size = len(settings.data_loader.dataset)  # type: ignore[arg-type]
        sampling = truncated_poisson(size, settings.max_batch_size)
    if sampling is None:
        return
    if not settings.poisson_sampling or settings.correlated_noise is not None:
        raise ValueError(
            f"sampling={sampling} describes Poisson sampling of rows, so poisson_sampling must be "
            "True, and correlated_noise, which has batches of its own, None"
        )
    if not isinstance(sampling, UserRows | GaussianMixture | TruncatedPoisson) or (
        isinstance(settings.sampling, TruncatedPoisson)
    ):
        raise ValueError(
            f"sampling={sampling!r} is not what the private data loader does; it must be UserRows "
            "or GaussianMixture from opacus.accountants.sampling; max_batch_size truncates batches"
        )
    if not accountant.counts_every_sampling:
        raise ValueError(
            f"the accountant {accountant.mechanism()!r} counts plain Poisson sampling only, not "
            f"{sampling}: use PrivacyEngine(accountant='pld')"
        )


def _check_max_batch_size(settings: Settings) -> None:
    most, expected = settings.max_batch_size, settings.expected_batch_size
    if isinstance(most, bool) or not isinstance(most, int) or most < max(1, expected or 1):
        raise ValueError(
            "max_batch_size must be a whole number of at least the expected batch size, of all "
            f"ranks together, got {most!r}"
        )
    if settings.privacy_unit != "unit_ids" or settings.sampling is not None:
        raise ValueError(
            "max_batch_size fills batches up by rows of nobody, which the tensor unit_ids of the "
            "batch names: pass privacy_unit='unit_ids', call the model with unit_ids=, and leave "
            f"sampling out; got privacy_unit={settings.privacy_unit!r}, "
            f"sampling={settings.sampling!r}"
        )
    if not settings.batch_first:
        raise ValueError("max_batch_size needs batch_first=True")


def truncated_poisson(size: int, most: int, ranks: int = 1) -> TruncatedPoisson:
    """The sampling of an item in batches of at most `most` items of all ranks.

    Each rank truncates its own batch, drawn from its own items, without the others.
    """
    return TruncatedPoisson(math.ceil(size / ranks), math.ceil(most / ranks))


def sampling_of(settings: Settings, data_loader: DataLoader[Any]) -> Sampling | None:
    """How the private loader draws batches, for the accountant."""
    if settings.max_batch_size is None:
        return settings.sampling
    size = len(data_loader.dataset)  # type: ignore[arg-type]
    ranks = getattr(data_loader.batch_sampler, "num_replicas", 1)
    return truncated_poisson(size, settings.max_batch_size, ranks)


def check_truncated(most: int | None, data_loader: DataLoader[Any]) -> None:
    """Check that batches of one size are truncated where that is counted.

    Raises:
        ValueError: Nearly all batches would be truncated, or ranks share samples.
    """
    if most is None:
        return
    rate, size = sample_rate_of(data_loader), len(data_loader.dataset)  # type: ignore[arg-type]
    if most < rate * size:
        raise ValueError(
            f"max_batch_size={most} is below the expected batch size, {rate * size:g}: leave room, "
            f"such as {truncation_room(size, rate)}, eight standard deviations"
        )
    ranks = getattr(data_loader.batch_sampler, "num_replicas", None)
    if ranks is not None and ranks != dist.get_world_size():
        raise ValueError(
            "max_batch_size is not supported where ranks share samples (tensor_parallel)"
        )


def truncation_room(size: int, rate: float) -> int:
    """A batch size that Poisson sampling exceeds with probability about 1e-15."""
    return min(size, math.ceil(size * rate + 8 * math.sqrt(size * rate * (1 - rate))))


def check_correlation(settings: Settings, adaptive: bool) -> None:
    """Check that correlated noise fits the other arguments.

    Raises:
        ValueError: Batches are not drawn for it, or the clipping norm moves.
    """
    plan = settings.correlated_noise
    if plan is None:
        return
    if not isinstance(plan, CorrelatedNoise):
        raise ValueError(
            "correlated_noise must be an opacus.CorrelatedNoise, such as "
            f"CorrelatedNoise.square_root(8, steps=1000), got {plan!r}"
        )
    if not settings.poisson_sampling:
        raise ValueError(
            "correlated_noise needs poisson_sampling=True, in whose place it puts batches that are "
            "the same in each pass: how often a sample takes part must be known"
        )
    if adaptive or settings.clipping == "adaptive":
        raise ValueError(
            "correlated_noise needs a clipping norm that stays, so not adaptive clipping: later "
            "steps take back noise of earlier ones"
        )


def check_correlated_noise(plan: CorrelatedNoise | None, data_loader: DataLoader[Any]) -> None:
    """Check that passes over the data are as long as the noise was planned for.

    Raises:
        ValueError: A sample would take part again too soon.
    """
    if plan is not None and plan.groups is not None:
        rate = sample_rate_of(data_loader) * plan.groups
        if rate > 1 + 1e-9:
            raise ValueError(
                f"correlated_noise draws batches from {plan.groups} groups of the data in turn, "
                f"each at {rate:g}, that many times the sample rate: use at most "
                f"{math.floor(plan.groups / rate)} groups, or smaller batches"
            )
        return
    if plan is not None and min(plan.separation, plan.steps) > len(data_loader) < plan.steps:
        raise ValueError(
            f"correlated_noise has separation={plan.separation}, but a pass over the data loader "
            f"has {len(data_loader)} batches, after which each sample takes part again: use "
            f"separation={len(data_loader)}, or steps={len(data_loader)} for a single pass"
        )
