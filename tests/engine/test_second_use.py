"""A batch of the private loader is for one step: a second one is refused, or told."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.privacy.delivered import Delivered
from opacus.utils.batch_memory_manager import BatchMemoryManager
from tests.helpers.distributed import run_distributed

MODES = ["hooks", "functorch", "ghost", "ghost_bk"]
N = 24
USED = "used in a step before"
NOT_ASKED = "was not asked for another batch"


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(N, 4), torch.arange(N) % 3)


def private(mode: str, loader: Any = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    engine = PrivacyEngine()
    made = engine.make_private(
        module=nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data(), batch_size=8) if loader is None else loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        **changes,
    )
    return (
        engine,
        made[0],
        made[1],
        (made[2] if len(made) == 4 else nn.CrossEntropyLoss()),
        made[-1],
    )


def step(run: Any, batch: Any) -> None:
    _, model, optimizer, criterion, _ = run
    loss = criterion(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def cycled(run: Any, passes: int = 2) -> int:
    batches, steps = itertools.cycle(run[-1]), passes * len(run[-1])
    for batch in itertools.islice(batches, steps):
        step(run, batch)
    return steps


@pytest.mark.parametrize("mode", MODES)
def test_pass_that_is_kept_is_used_once(mode: str) -> None:
    run = private(mode)
    with pytest.raises(RuntimeError, match=USED):
        cycled(run)
    assert len(run[0].accountant) == len(run[-1])
    run = private(mode)
    batches = list(run[-1])
    for batch in batches:
        step(run, batch)
    with pytest.raises(RuntimeError, match=USED):
        step(run, batches[0])
    for batch in run[-1]:  # the next pass is a fresh one
        step(run, batch)
    assert len(run[0].accountant) == 2 * len(run[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_batch_is_known_in_another_dtype_and_shape(dtype: torch.dtype) -> None:
    made, x = Delivered(), torch.randn(6, 4)
    made.add((x, torch.zeros(6)))
    assert made.hold(x.to(dtype).view(3, 8))
    assert not made.hold(x + 1) and not made.hold(torch.zeros(6)) and not made.hold(())


def test_numbers_that_all_batches_have_tell_nothing() -> None:
    made, places = Delivered(), torch.arange(16)
    made.add((torch.randn(4, 4), places))
    made.add((torch.randn(4, 4), places))
    assert not made.hold((places,))
    assert not made.hold((torch.randn(4, 4), places))


@pytest.mark.parametrize("mode", MODES)
def test_generated_samples_are_told_once(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """As of a discriminator: a step of the batch, and one of what a generator made."""
    run = private(mode)
    with caplog.at_level(logging.WARNING):
        for batch in run[-1]:
            step(run, batch)
            step(run, (torch.randn(8, 4), torch.zeros(8).long()))
    assert len([r for r in caplog.records if NOT_ASKED in r.getMessage()]) == 1
    assert len(run[0].accountant) == 2 * len(run[-1])


@pytest.mark.parametrize("mode", MODES)
def test_changed_samples_are_told(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    run = private(mode)
    x, y = next(iter(run[-1]))
    step(run, (x, y))
    assert NOT_ASKED not in caplog.text
    step(run, (x + 0.1 * torch.randn_like(x), y))
    assert NOT_ASKED in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_physical_batches_are_used_once(mode: str) -> None:
    run = private(mode)
    _, _, optimizer, _, loader = run
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as physical:
        kept = []
        for batch in physical:
            step(run, batch)
            kept.append(batch)
    full = [batch for batch in kept if len(batch[0]) > 2]
    with pytest.raises(RuntimeError, match=USED):
        step(run, full[0])
    assert len(run[0].accountant) == len(loader)


@pytest.mark.parametrize("mode", MODES)
def test_usual_loops_are_not_told(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    run = private(mode)
    for _ in range(10):
        step(run, next(iter(run[-1])))
    for batch in list(run[-1]):
        step(run, batch)
    model = run[1]
    for batch in run[-1]:
        step(run, batch)
        model(batch[0])  # looked at once more
    assert NOT_ASKED not in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_two_models_step_on_each_batch(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    first = private(mode)
    second = private(mode, loader=first[-1])
    for batch in second[-1]:
        step(first, batch)
        step(second, batch)
    assert NOT_ASKED not in caplog.text
    assert len(first[0].accountant) == len(second[0].accountant) == len(second[-1])


@pytest.mark.parametrize("mode", MODES)
def test_refused_batch_may_be_used_again(mode: str) -> None:
    run = private(mode)
    batches = iter(run[-1])
    step(run, next(batches))
    batch, plain = next(batches), run[2].add_noise

    def failing() -> None:
        raise OSError("no noise")

    run[2].add_noise = failing
    with pytest.raises(OSError, match="no noise"):
        step(run, batch)
    run[2].add_noise = plain
    step(run, batch)
    assert len(run[0].accountant) == 2


def _cycled_on_ranks(rank: int, world_size: int) -> tuple[str, int]:
    run = private("ghost")
    try:
        cycled(run)
    except RuntimeError as error:
        return str(error), len(run[0].accountant)
    return "", len(run[0].accountant)


def test_ranks_refuse_together() -> None:
    for said, steps in run_distributed(_cycled_on_ranks, 2):
        assert "before" in said and steps == 3
