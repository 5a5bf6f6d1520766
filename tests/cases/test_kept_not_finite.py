"""A check of a batch of which nothing was finite shows nothing: a later one is checked instead."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from opacus import IsolationError, check_isolation
from opacus.core.isolation.probe import Probe
from tests.helpers.distributed import run_distributed
from tests.helpers.kept_values import B, D, Net, batch, number, plain, step, written_numbers
from tests.helpers.releases import private


def with_nan(seed: int) -> tuple[Tensor, Tensor]:
    x, y = batch(seed)
    return x.masked_fill(torch.arange(B)[:, None] == 1, math.nan), y


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("values", [1, math.inf])
def test_after_a_batch_of_which_nothing_was_compared(values: float, mode: str) -> None:
    net = Net(number).double()
    made = private(net, mode)
    for seed in range(2):
        x, y = with_nan(seed)
        step(made, x * values, y)  # the number that is kept of it makes all others NaN
    net.size = 0.0
    for seed in range(2, 4):
        with pytest.raises(IsolationError, match=r"keeps of samples in 'size'"):
            step(made, *batch(seed))


def ranks(rank: int, world_size: int, mode: str, values: tuple[float, float]) -> list[str]:
    """Only the second rank's samples differ in what is kept of them."""
    net = Net(number).double()
    made = private(fully_shard(net), mode)
    said = []
    for seed in range(4):
        x, y = batch(seed)
        x = x if rank == 1 else x[:1].expand(B, D)
        try:
            step(made, x * (values[rank] if seed < 2 else 1), y)
        except IsolationError as error:
            said.append(f"{seed}: {error}")
        net.size = 0.0 if seed else net.size
    return said


@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk"])
@pytest.mark.parametrize("values", [(1, math.nan), (math.inf, math.inf)])
def test_nothing_was_compared_on_ranks(values: tuple[float, float], mode: str) -> None:
    one, two = run_distributed(ranks, 2, mode, values)
    assert [text[0] for text in one] == [text[0] for text in two] == ["2", "3"]


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("use", [plain, written_numbers])
def test_right_models_with_samples_that_are_not_finite(
    use: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is done again only where nothing could be compared, as with loss scales at first."""
    checks: list[int] = []
    run = Probe.run
    monkeypatch.setattr(Probe, "run", lambda *given: checks.append(seed) or run(*given))
    made = private(Net(use).double(), mode)
    for seed in range(2):
        x, y = batch(seed)
        step(made, x * math.inf, y)
    for seed in range(2, 8):
        step(made, *(with_nan(seed) if seed % 2 else batch(seed)))
    assert checks == [2] or use is written_numbers  # whose list grows, which is a new setting


def test_a_loss_that_is_not_finite_is_not_called_right() -> None:
    x, _ = batch(0)
    with pytest.raises(ValueError, match="cannot be checked: it is not finite"):
        check_isolation(Net(plain).double(), x * math.inf, lambda model, one: model(one).sum(1))
