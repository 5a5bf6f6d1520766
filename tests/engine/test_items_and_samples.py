"""Steps are made of the batches that were drawn: all of one draw, each item as one sample, once."""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.privacy.draws import MOST_WAITING, Draws
from opacus.utils.batch_memory_manager import BatchMemoryManager

MODES = ["hooks", "ghost", "ghost_bk"]
N = 24


def private(mode: str, batch_size: int = 6, poisson: bool = True, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    data = TensorDataset(torch.randn(N, 4), torch.arange(N) % 3)
    loader = DataLoader(data, batch_size=batch_size, **changes)
    engine = PrivacyEngine()
    out = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        poisson_sampling=poisson,
    )
    return engine, out[0], out[1], (out[2] if len(out) == 4 else nn.CrossEntropyLoss()), out[-1]


def step(run: Any, batch: Any) -> None:
    _, model, optimizer, criterion, _ = run
    optimizer.zero_grad()
    criterion(model(batch[0]), batch[1]).backward()
    optimizer.step()


def windows(items: list[Any]) -> tuple[Tensor, Tensor]:
    return (
        torch.cat([x[None].repeat(2, 1) for x, _ in items]),
        torch.stack([y for _, y in items]).repeat_interleave(2),
    )


@pytest.mark.parametrize("mode", MODES)
def test_several_rows_of_an_item_are_refused(mode: str) -> None:
    run = private(mode, collate_fn=windows, batch_size=N)
    batch = next(iter(run[-1]))
    with pytest.raises(RuntimeError, match=rf"drew {N} items .* the step saw {2 * N} samples"):
        step(run, batch)
    assert len(run[0].accountant) == 0


@pytest.mark.parametrize("mode", MODES)
def test_part_of_a_batch_is_refused_and_all_parts_are_fine(mode: str) -> None:
    run = private(mode, batch_size=N)
    (x, y) = next(iter(run[-1]))
    with pytest.raises(RuntimeError, match="saw 5 samples"):
        step(run, (x[:5], y[:5]))
    _, model, optimizer, criterion, _ = run
    optimizer.reset_accumulation()
    for part in (slice(0, 5), slice(5, N)):
        optimizer.signal_skip_step(part.stop < N)
        optimizer.zero_grad()
        criterion(model(x[part]), y[part]).backward()
        optimizer.step()
    assert run[0].accountant.history == [(1.0, 1.0, 1)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_usual_loops(mode: str, workers: int) -> None:
    """Batches left out, fetched ahead, looked at twice; several passes."""
    run = private(mode, num_workers=workers)
    loader, steps = run[-1], 0
    for _ in range(2):
        for k, batch in enumerate(loader):
            if k != 1:  # left out
                step(run, batch)
                steps += 1
    batches = list(loader)  # all of them fetched ahead
    for batch in batches:
        step(run, batch)
    next(iter(loader))  # a look at one
    for batch in loader:
        step(run, batch)
    assert len(run[0].accountant) == steps + 2 * len(loader)


@pytest.mark.parametrize("mode", MODES)
def test_several_draws_in_one_step_are_refused(mode: str) -> None:
    run = private(mode)
    batches = iter(run[-1])
    run[2].signal_skip_step(True)
    step(run, next(batches))
    with pytest.raises(RuntimeError, match="several batches of the Poisson loader"):
        step(run, next(batches))
    assert len(run[0].accountant) == 0
    run[2].reset_accumulation()
    step(run, next(batches))
    assert len(run[0].accountant) == 1


def test_loader_that_is_not_used_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    run = private("hooks")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            step(run, (torch.randn(6, 4), torch.zeros(6).long()))
    assert len([r for r in caplog.records if "not been iterated" in r.getMessage()]) == 1
    used = private("hooks")
    caplog.clear()
    for batch in used[-1]:
        step(used, batch)
    assert "iterated" not in caplog.text


def physical(
    run: Any, leave: Any, refusals: list[str], passes: int = 2, fail: Any = None, most: int = 5
) -> list[list[int]]:
    """The logical batches of steps, as sizes of their physical ones.

    Those with ``leave(k)`` are left, those with ``fail(k)`` refused.
    """
    _, model, optimizer, criterion, loader = run
    released: list[list[int]] = []
    parts: list[int] = []
    plain = optimizer.original_optimizer.step

    def spy() -> None:
        released.append(parts.copy())
        parts.clear()
        plain()

    optimizer.original_optimizer.step = spy
    k = 0
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=most, optimizer=optimizer
    ) as batches:
        for _ in range(passes):
            for x, y in batches:
                k += 1
                optimizer.zero_grad()
                if leave(k):
                    parts.clear()
                    continue
                parts.append(len(x))
                try:
                    if fail is not None and fail(k):
                        raise_in_step(optimizer)
                    criterion(model(x), y).backward()
                    optimizer.step()
                except RuntimeError as error:
                    refusals.append(str(error))
                    parts.clear()
    return released


def raise_in_step(optimizer: Any) -> None:
    """The next step refuses its batch."""
    plain = optimizer.take_batch

    def refuse() -> None:
        optimizer.take_batch = plain
        raise RuntimeError("this batch is refused")

    optimizer.take_batch = refuse


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_released_of_a_batch_of_which_a_part_is_missing(
    mode: str, poisson: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One sample must not decide whether others of its physical batch take part."""
    run = private(mode, N, poisson)  # the rate is 1: five parts of 24
    whole, refusals = [5, 5, 5, 5, 4], []
    assert physical(run, lambda k: False, refusals) == [whole] * 2 and not refusals
    for leave in ((2, 8), (1, 6)):
        assert physical(run, lambda k, own=leave: k in own, refusals, passes=3) == [whole]
        assert len(refusals) == 2 and all("must not depend on one" in r for r in refusals)
        refusals.clear()
    assert "nothing of its logical batch" in caplog.text
    for failing in (2, 5):
        fail = partial(operator.eq, failing)
        assert physical(run, lambda k: False, refusals, fail=fail) == [whole]
        assert refusals[0] == "this batch is refused"
        assert len(refusals) == (2 if failing == 2 else 1)  # the last part ends its batch
        refusals.clear()
    assert run[0].accountant.history == [(1.0, 1.0, 6)]
    assert physical(run, lambda k: k == 5, refusals) == [whole]  # no step() of it is to come
    assert not refusals
    assert physical(run, lambda k: False, refusals) == [whole] * 2
    assert run[0].accountant.history == [(1.0, 1.0, 9)]


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_batches_of_two_passes_are_not_added_up(mode: str, poisson: bool) -> None:
    """Logical batches of two passes at once may have samples in common."""
    run = private(mode, N, poisson)
    _, _, optimizer, _, loader = run
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=12, optimizer=optimizer
    ) as batches:
        parts = iter(batches)
        step(run, next(parts))
        other = next(iter(loader))  # a look, without a step, is fine
        with pytest.raises(RuntimeError, match="without a batch that the loader"):
            step(run, other)
        step(run, next(parts))
        assert run[0].accountant.history == [(1.0, 1.0, 1)]
        parts = iter(batches)
        step(run, next(parts))
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=12, optimizer=optimizer
        ) as others:
            newer = iter(others)
            step(run, next(newer))
            with pytest.raises(RuntimeError, match="this pass over the data loader has ended"):
                next(parts)
    step(run, other)
    assert run[0].accountant.history == [(1.0, 1.0, 2)]


@pytest.mark.parametrize("mode", MODES)
def test_a_look_at_a_part_is_no_batch(mode: str) -> None:
    """Which items are in it depends on how many others were drawn."""
    run = private(mode, N)
    _, _, optimizer, _, loader = run
    manager = BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=12, optimizer=optimizer
    )
    with manager as batches:
        part = next(iter(batches))
        with pytest.raises(RuntimeError, match="must not depend on one of them"):
            step(run, part)
        part = next(iter(batches))
    with pytest.raises(RuntimeError, match="must not depend on one of them"):
        step(run, part)
    with manager as batches:
        part = next(iter(batches))
        for other in batches:
            step(run, other)
    step(run, next(iter(loader)))
    step(run, (torch.randn(7, 4), torch.zeros(7, dtype=torch.int64)))  # from elsewhere
    assert run[0].accountant.history == [(1.0, 1.0, 3)]


@pytest.mark.parametrize("failing", [2, 4])
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_part_is_not_tried_again(mode: str, poisson: bool, failing: int) -> None:
    """A loop that catches errors: what it releases must not depend on which part has failed."""
    run, refusals = private(mode, N, poisson), []
    _, _, optimizer, _, loader = run
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=6, optimizer=optimizer
    ) as batches:
        for k, batch in enumerate(chain(batches, batches)):
            if k + 1 == failing:
                raise_in_step(optimizer)
            for _ in range(4):
                try:
                    step(run, batch)
                    break
                except RuntimeError as error:
                    refusals.append(str(error))
    assert run[0].accountant.history == [(1.0, 1.0, 1)]
    assert [text[:23] for text in refusals[:3]] == [
        "this batch is refused",
        *2 * ["step() was called witho"],
    ]


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_batches_after_a_refused_one_are_released_though_all_parts_have_one_size(
    mode: str, poisson: bool
) -> None:
    run, refusals = private(mode, N, poisson), []
    for failing in (2, 4):
        fail = partial(operator.eq, failing)
        released = physical(run, lambda k: False, refusals, 3, fail, most=6)
        assert released == [[6, 6, 6, 6]] * 2
        assert len(refusals) == (2 if failing == 2 else 1)
        refusals.clear()
    assert run[0].accountant.history == [(1.0, 1.0, 4)]


def ahead(batches: Any, number: int) -> Iterator[Any]:
    """Fetches so many batches before it gives the first, as the loaders of accelerate do."""
    waiting: deque[Any] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > number:
            yield waiting.popleft()
    yield from waiting


def epochs(
    run: Any, fetched: int, leave: Any, failing: bool, moved: bool = False
) -> list[list[int]]:
    """The items in each of the steps of three passes, of which some parts are left."""
    _, model, optimizer, criterion, loader = run
    released: list[list[int]] = []
    seen: list[Tensor] = []
    number = {tuple(x.tolist()): k for k, (x, _) in enumerate(loader.dataset)}
    plain = optimizer.original_optimizer.step

    def spy() -> None:
        released.append(sorted(number[tuple(x.tolist())] for x in torch.cat(seen)))
        seen.clear()
        plain()

    optimizer.original_optimizer.step = spy
    for _ in range(3):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=6, optimizer=optimizer
        ) as batches:
            for k, (x, y) in enumerate(ahead(batches, fetched)):
                try:
                    if leave(k) and not failing:
                        continue
                    output = model(x + 0 if moved else x)
                    if leave(k):
                        continue
                    optimizer.zero_grad()
                    criterion(output, y).backward()
                    seen.append(x)
                    optimizer.step()
                except RuntimeError:
                    seen.clear()
                optimizer.zero_grad()
    optimizer.original_optimizer.step = plain
    return released


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("fetched", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_first_parts_that_are_left_are_told_from_those_fetched_ahead(
    mode: str, fetched: int, poisson: bool
) -> None:
    """In each pass, whether or not the loop has called the model or the optimizer before."""
    size = N if poisson else N // 2
    run = private(mode, size, poisson)
    every = [[*range(start, start + size)] for start in range(0, N, size)]
    assert epochs(run, fetched, lambda k: False, False) == every * 3
    assert epochs(run, fetched, lambda k: False, False, moved=True) == every * 3
    for failing in (False, True):
        found = epochs(private(mode, size, poisson), fetched, lambda k: k == 0, failing)
        assert found == every[1:] * 3  # the second batch of each pass, if there is one


@pytest.mark.parametrize("poisson", [True, False])
def test_pass_left_after_a_refusal_does_not_spoil_the_next(poisson: bool) -> None:
    run = private("ghost_bk", N, poisson)
    for failing in (True, False):
        with BatchMemoryManager(
            data_loader=run[-1], max_physical_batch_size=6, optimizer=run[2]
        ) as batches:
            for k, batch in enumerate(batches):
                if failing and k == 1:
                    raise_in_step(run[2])
                    with pytest.raises(RuntimeError, match="this batch is refused"):
                        step(run, batch)
                    break
                step(run, batch)
    assert run[0].accountant.history == [(1.0, 1.0, 1)]


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("used", [0, 2, 3])
@pytest.mark.parametrize("most", [5, 6])
def test_pass_that_is_left_within_a_batch_does_not_spoil_the_next(
    poisson: bool, used: int, most: int
) -> None:
    run = private("ghost_bk", N, poisson)
    with BatchMemoryManager(
        data_loader=run[-1], max_physical_batch_size=most, optimizer=run[2]
    ) as batches:
        for stop in (used, N):
            for k, batch in enumerate(batches):
                if k == stop:
                    break
                run[2].zero_grad()
                step(run, batch)
    assert run[0].accountant.history == [(1.0, 1.0, 1)]


def test_sums_that_are_dropped_within_a_batch_take_the_rest_along() -> None:
    run = private("ghost_bk", N)
    _, model, optimizer, criterion, loader = run
    with (
        BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=5, optimizer=optimizer
        ) as batches,
        pytest.raises(RuntimeError, match="must not depend on one"),
    ):
        for k, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            if k == 1:
                optimizer.reset_accumulation()
    assert len(run[0].accountant) == 0


def test_draws_of_an_empty_batch_and_of_parts() -> None:
    draws = Draws()
    draws.deliver(0)
    draws.check(0, final=True)
    number = draws.deliver(3, last=False)
    assert draws.deliver(2, number=number) is None
    draws.check(3, final=False)
    draws.check(2, final=True)
    draws.deliver(3)
    with pytest.raises(RuntimeError, match="drew 3 items for this batch, but the step saw 2"):
        draws.check(2, final=True)
    draws.check(0, final=True)  # a step without samples: the batch that waits remains
    draws.check(3, final=True)
    draws.check(7, final=True)  # nothing that was drawn waits: from elsewhere


def test_losses_of_batches_of_other_sizes_are_not_added(caplog: pytest.LogCaptureFixture) -> None:
    _, model, _, criterion, _ = private("hooks")
    with pytest.raises(ValueError, match="forward passes on 3 and 5 samples"):
        sum(criterion(model(torch.randn(b, 4)), torch.zeros(b).long()) for b in (3, 5)).backward()
    _, model, _, criterion, _ = private("hooks")
    model(torch.randn(5, 4))  # dropped
    criterion(model(torch.randn(3, 4)), torch.zeros(3).long()).backward()
    assert "Losses of several forward passes" not in caplog.text
    _, model, _, criterion, _ = private("hooks")
    sum(criterion(model(torch.randn(3, 4)), torch.zeros(3).long()) for _ in range(2)).backward()
    assert "Losses of several forward passes" in caplog.text


def test_passes_without_steps_hold_no_more_memory() -> None:
    """Such as an evaluation over the private loader."""
    draws = Draws()
    for _ in range(3 * MOST_WAITING):
        draws.deliver(1)
    assert all(
        len(held) <= MOST_WAITING for held in vars(draws).values() if hasattr(held, "__len__")
    )
