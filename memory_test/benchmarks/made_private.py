"""Makes a model that is timed private, with the limits of memory that its way has."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from memory_test.benchmarks.layouts import DataRank
from memory_test.benchmarks.ways import Way


def make_private(
    way: Way, objects: dict[str, Any], data: DataRank, batch: int, max_grad_norm: float
) -> tuple[Any, ...]:
    """What ``make_private`` makes of ``objects``: its module, optimizer and criterion.

    Args:
        way: The mode.
        objects: Arguments ``module``, ``optimizer`` and ``criterion``.
        data: Which samples this rank has.
        batch: Samples of a rank.
        max_grad_norm: Clipping norm C.
    """
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from opacus import PrivacyEngine

    samples = TensorDataset(torch.zeros(64 * batch * data.count, 1))
    sampler: Any = DistributedSampler(samples, data.count, data.rank)
    options = {"deferred_norm": True} if way.deferred else {}
    with _not_told_of_loaders():
        return PrivacyEngine().make_private(
            **objects,
            data_loader=DataLoader(samples, batch_size=batch, sampler=sampler),
            noise_multiplier=1.0,
            max_grad_norm=max_grad_norm,
            grad_sample_mode=way.mode,
            poisson_sampling=False,
            **options,
        )


def limit(model: Any, way: Way, peak: float, device: torch.device) -> None:
    """Set what the way says about memory, where the non-private step needs ``peak`` bytes."""
    if way.float8:
        model.stored_dtype = "float8"
    if way.held is not None:
        model.held_budget = way.held.bytes()
    if way.host is not None:
        model.host_budget = way.host.bytes()
    if way.budget is not None and device.type == "cuda":
        model.memory_budget = way.budget.bytes(peak)
    elif way.budget is not None:
        model.held_budget = max(0, way.budget.bytes(peak) - int(peak))


@contextlib.contextmanager
def _not_told_of_loaders() -> Iterator[None]:
    """Without warnings about data loaders: the data are random here."""
    logger = logging.getLogger("opacus.data")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
