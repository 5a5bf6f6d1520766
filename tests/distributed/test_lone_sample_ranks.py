"""FSDP2: a rank with one sample runs without taps, whatever the others have: the oracle's sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.helpers import oracle
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.lone_sample import C, private
from tests.helpers.problems import PROBLEMS, build, clipped_sum, criterion, per_sample
from tests.helpers.sharded import wrap

CASES = [
    *[(n, "ghost_fsdp_bk", "fsdp") for n in ("checkpoint", "checkpoint_reentrant", "frozen")],
    *[(n, "ghost_fsdp_bk", "fsdp_leaves") for n in ("mlp", "reused", "language")],
    *[(n, "flash_fsdp_bk", "fsdp_root") for n in ("checkpoint", "reused", "language_tied")],
]
# Rows of each rank in the steps that follow one with several rows.
STEPS = {1: [(1,), (1,)], 2: [(1, 1), (1, 3), (0, 1)]}


def rows_of(sizes: tuple[int, ...], rank: int) -> slice:
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def whole(gradient: Any) -> Tensor:
    full: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.double().cpu()


def note_rows(recorder: Any, tapped: list[int]) -> None:
    """From now on note the number of rows of each record."""
    sink = recorder.sink

    def noting(record: Any) -> None:
        tapped.append(record.rows)
        sink(record)

    recorder.sink = noting


def forward_of(module: Any, loss: Any, inputs: Tensor, targets: Tensor) -> Any:
    return loss(module(inputs), targets)


def fail_first(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Backward passes: one that fails when some units have had theirs, and one that does not."""
    failed: list[bool] = []

    def fail(grad: Tensor) -> None:
        if not failed:
            failed.append(True)
            raise RuntimeError("planted")

    first = next(m for m in model.modules() if isinstance(m, nn.Linear))
    handle = first.register_forward_hook(
        lambda m, args, output: output.register_hook(fail) and None
    )
    loss = forward()
    handle.remove()
    with pytest.raises(RuntimeError, match="planted"):
        loss.backward(retain_graph=True)
    loss.backward()


def run_all(rank: int, world_size: int, cases: list[tuple[str, str, str]]) -> list[Any]:
    """Worst error of each case's sums, how many layers were tapped with one sample, least norm."""
    found = []
    for case in cases:
        name, mode, how = case
        progress(str(case))
        problem, double = PROBLEMS[name], build(name, dtype=torch.float64)
        device = torch.get_default_device()
        model = wrap(build(name).to(device), how)
        module, optimizer, loss = private(
            model, mode, criterion(name, "sum"), problem.batch(8), loss_reduction="sum"
        )
        tapped: list[int] = []
        error, shortest = 0.0, float("inf")
        for number, sizes in enumerate([(3,) * world_size, *STEPS[world_size]]):
            inputs, targets = problem.batch(sum(sizes), seed=number)
            grads = per_sample(name, double, inputs, targets)
            wanted, norms = clipped_sum(grads, C)
            shortest = min(shortest, float(norms.min()))
            own = rows_of(sizes, rank)
            if number == 1:
                note_rows(module._recorder, tapped)
            part = inputs[own].to(device), targets[own].to(device)
            if number == 1 and world_size == 1 and name == "mlp":
                fail_first(model, partial(forward_of, module, loss, *part))
            else:
                forward_of(module, loss, *part).backward()
            held = [p for p in model.parameters() if p.requires_grad]
            for parameter, want in zip(held, wanted, strict=True):
                error = max(error, oracle.relative_error(whole(parameter.grad), want.cpu()))
            optimizer.step()
            optimizer.zero_grad()
        found.append((case, error, tapped.count(1), shortest))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_sum_is_the_oracles(world_size: int) -> None:
    for rank in run_distributed(run_all, world_size, CASES):
        for case, error, tapped, shortest in rank:
            assert shortest > 2 * C, case  # else nothing would be clipped
            assert error < 2e-5, case
            assert bool(tapped) == ("checkpoint_reentrant" in case), case
