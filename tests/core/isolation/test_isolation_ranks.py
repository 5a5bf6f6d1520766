"""Ranks check together whether samples depend on each other, and refuse together."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import IsolationError, PrivacyEngine
from opacus.core.isolation.probe import Probe
from tests.helpers.distributed import progress, run_distributed

MODES = ("ghost_fsdp", "ghost_fsdp_bk")
# Samples of each rank; of one sample alone there is nothing to compare on a rank.
SIZES = ((4, 4), (5, 0), (1, 3), (0, 0))


class Net(nn.Module):
    """Blocks that are units of their own, dropout, a checkpoint; mixes samples if told to."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes
        self.a, self.b, self.h = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.a(x).tanh())
        x = checkpoint(self.b, x, use_reentrant=False)
        if self.mixes and len(x):
            x = x / (1 + x.detach().norm().item())  # a number, which is followed by nobody
        return self.h(x)


def train(rank: int, mode: str, sizes: tuple[int, int], mixes: bool, steps: int = 2) -> Any:
    torch.manual_seed(0)
    model = Net(mixes)
    for block in (model.a, model.b):
        fully_shard(block)
    fully_shard(model)
    made: list[int] = []
    run = Probe.run
    Probe.run = lambda *args: (made.append(1), run(*args))[1]  # type: ignore[method-assign,assignment]
    private, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=0.0, max_grad_norm=0.1,
        data_loader=DataLoader(TensorDataset(torch.arange(32)), batch_size=8),
        poisson_sampling=False, grad_sample_mode=mode,
    )  # fmt: skip
    try:
        for number in range(steps):
            torch.manual_seed(10 * rank + number)
            x = torch.randn(sizes[rank], 6) * (1 + torch.arange(sizes[rank]))[:, None]
            optimizer.zero_grad()
            criterion(private(x), torch.arange(sizes[rank]) % 3).backward()
            optimizer.step()
    except (IsolationError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Probe.run = run  # type: ignore[method-assign]
    weights = [p.full_tensor().detach().clone() for p in model.parameters()]
    return len(made), weights


def trains(rank: int, world_size: int, mixes: bool) -> list[Any]:
    results = []
    for mode in MODES:
        for sizes in SIZES:
            progress((mode, sizes))
            results.append(train(rank, mode, sizes, mixes))
    return results


def test_usual_models_train_whatever_ranks_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = run_distributed(trains, 2, False)
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    unchecked = run_distributed(trains, 2, False)
    for rank in range(2):
        cells = zip(SIZES * len(MODES), checked[rank], unchecked[rank], strict=True)
        for sizes, (made, weights), (none, expected) in cells:
            assert none == 0
            assert made == (sum(sizes) > 0)  # at the first step, on every rank
            for a, b in zip(weights, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def refusals(rank: int, world_size: int) -> list[Any]:
    results = []
    for mode in MODES:
        for sizes in SIZES[:3]:
            progress((mode, sizes))
            results.append(train(rank, mode, sizes, mixes=True))
    return results


def test_all_ranks_refuse_what_one_of_them_finds() -> None:
    """A rank of one sample, or of none, finds nothing itself."""
    results = run_distributed(refusals, 2)
    for case, (one, two) in enumerate(zip(*results, strict=True)):
        for result in (one, two):
            assert isinstance(result, str), "samples that depend on each other were released"
            assert result.startswith("IsolationError")
        assert "the gradient of sample" in one + two
        if case % 3 == 1:
            assert "another rank found" in two


def stopped(rank: int, world_size: int, failing: str) -> list[str]:
    """One rank's run of some samples, or of one alone, ends in an error; then one more step."""
    real, left = Probe._tapped, [0]

    def tapped(probe: Probe, runs: Any, places: Any) -> Any:
        found = real(probe, runs, places)
        left[0] -= 1
        kind, text = failing.split(": ")
        if rank == 0 and (left[0] == 0 or (kind == "full" and left[0] < 0)):
            raise {"full": torch.OutOfMemoryError, "odd": ValueError}[kind](text)
        return found

    Probe._tapped = tapped  # type: ignore[method-assign]
    said = []
    for mode in MODES:
        for number in (1, 2, 3):
            progress((mode, number))
            left[0] = number
            said.append(outcome(rank, mode))
    return said


def outcome(rank: int, mode: str) -> str:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            train(rank, mode, (4, 4), mixes=False, steps=1)
        except torch.OutOfMemoryError as error:
            return f"full: {error}"
    found = [str(w.message) for w in warned if "cannot be checked" in str(w.message)]
    return found[0] if found else "trained"


def test_all_ranks_stop_where_one_runs_out_of_memory() -> None:
    one, two = run_distributed(stopped, 2, "full: no room")
    assert one == ["full: no room"] * 6
    assert all(said.startswith("full: another rank ran out of memory") for said in two)


def test_all_ranks_go_on_where_the_model_does_not_run_on_one() -> None:
    one, two = run_distributed(stopped, 2, "odd: odd sizes only")
    first, alone, again = one[:3]
    assert "cannot be run on 4 samples: ValueError: odd sizes only" in first
    assert alone == again == "trained"  # it runs on one sample twice
    assert "cannot be run on another rank" in two[0] and two[1:3] == ["trained", "trained"]
    assert one[3:] == one[:3] and two[3:] == two[:3]


class Branches(Net):
    """Samples meet where one is large, a branch that a pass takes as its values say."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h * 3 if (x > 99).any() else h
        return self.h(self.b(h.tanh()))


def branches(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    model = fully_shard(Branches(False))
    private, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=0.0, max_grad_norm=0.1,
        data_loader=DataLoader(TensorDataset(torch.arange(32)), batch_size=8),
        poisson_sampling=False, grad_sample_mode="ghost_fsdp",
    )  # fmt: skip
    found = []
    # The ranks on which a sample is large: nobody's, both, the first, ...
    for number, large in enumerate(["", "", "", "01", "", "", "01", "0", "", "", "01", "", "01"]):
        progress(number)
        torch.manual_seed(10 * rank + number)
        x = torch.randn(4, 6)
        x[0, 0] = 100.0 if str(rank) in large else x[0, 0]
        optimizer.zero_grad()
        criterion(private(x), torch.arange(4) % 3).backward()
        try:
            optimizer.step()
            found.append("trained")
        except IsolationError:
            found.append("refused")
    return found


def test_a_branch_that_was_refused_is_refused_each_time() -> None:
    first, second = run_distributed(branches, 2, timeout=120)
    assert first == second
    assert [first[n] for n in (3, 6, 7, 10, 12)] == ["refused"] * 5  # the seventh: it was doubted
    assert first.count("refused") == 5
