"""The noise that a privacy budget asks for, before anything becomes private."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from opacus.accountants import IAccountant
from opacus.accountants.sampling import Sampling
from opacus.accountants.utils import get_noise_multiplier
from opacus.data.rates import matching_sample_rate, own_rate, sample_rate_of
from opacus.engine_checks import check_public_numbers, is_distributed, warn_of_another_dataset
from opacus.engine_sampling import truncated_poisson

# Further arguments of make_private_with_epsilon that the search for the noise takes.
_OF_THE_SEARCH = frozenset({"epsilon_tolerance", "alphas", "eps_error", "delta_error"})


def noise_for_budget(
    accountant: IAccountant,
    dataset: Dataset[Any] | None,
    module: nn.Module,
    data_loader: DataLoader[Any],
    *,
    target_epsilon: float,
    target_delta: float,
    epochs: int,
    poisson_sampling: bool,
    sample_rate: float | None,
    further: dict[str, Any],
) -> float:
    """The noise multiplier for ``make_private_with_epsilon``, whose other arguments these are.

    Args:
        accountant: Of the engine.
        dataset: What the engine has accounted for before.
        further: Arguments for ``make_private``; those of the search are taken out.

    Raises:
        TypeError: The noise is given already.
        ValueError: No noise meets the budget.
    """
    if len(accountant) > 0:
        warnings.warn(
            "this PrivacyEngine has spent privacy already; target_epsilon is for the coming "
            "epochs alone, so the total will be larger",
            stacklevel=3,
        )
    if "noise_multiplier" in further:
        raise TypeError(
            "make_private_with_epsilon finds noise_multiplier for target_epsilon: leave it "
            "out, or call make_private"
        )
    of_the_search = {name: further.pop(name) for name in _OF_THE_SEARCH & further.keys()}
    warn_of_another_dataset(dataset, data_loader)
    check_public_numbers(data_loader, further.get("expected_batch_size"), sample_rate)
    rate = sample_rate
    if rate is None:
        rate = (matching_sample_rate if poisson_sampling else sample_rate_of)(data_loader)
    length: dict[str, float] = {"epochs": epochs}
    if sample_rate is None and own_rate(data_loader) is not None:  # an epoch is not 1 / rate
        length = {"steps": math.ceil(epochs * len(data_loader))}
    if (noise := further.get("correlated_noise")) is not None:
        rate, steps = noise.accounted(rate)
        length = {"steps": steps}
    noise_multiplier = get_noise_multiplier(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=rate,
        **length,
        accountant=accountant.mechanism(),
        sampling=_sampling_to_plan(module, data_loader, further),
        **of_the_search,
    )
    _warn_of_delta(target_delta, data_loader)
    return noise_multiplier


def _warn_of_delta(delta: float, data_loader: DataLoader[Any]) -> None:
    """Warn of a delta that allows a sample to be published."""
    try:
        size = len(data_loader.dataset)  # type: ignore[arg-type]
    except TypeError:  # a stream
        return
    if size and delta >= 1 / size:
        warnings.warn(
            f"target_delta={delta:g} protects nobody among the {size} items of the data set: to "
            f"publish one of them, chosen at random, has a delta of 1/{size} = {1 / size:.3g}. "
            "Choose one well below",
            stacklevel=4,
        )


def _sampling_to_plan(
    module: nn.Module, data_loader: DataLoader[Any], further: Mapping[str, Any]
) -> Sampling | None:
    """How ``make_private`` will draw batches, as far as the noise for a budget depends on it."""
    most, sampling = further.get("max_batch_size"), further.get("sampling")
    if most is None:
        return sampling
    deals = is_distributed(module) and further.get("data_layout", "auto") != "replicated"
    ranks = dist.get_world_size() if deals else 1
    return truncated_poisson(len(data_loader.dataset), most, ranks)  # type: ignore[arg-type]
