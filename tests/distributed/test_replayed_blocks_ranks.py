"""Blocks that run again under FSDP2, and sums that ranks add up once for several batches."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch.distributed as dist

from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import reduced_once
from tests.helpers import replayed_blocks as one
from tests.helpers.distributed import progress, run_distributed

# mode, checkpoints, bytes that each rank may hold (None: it does not say), rows of each rank
CASES = [
    ("ghost_fsdp_bk", True, (0, 0), (3, 2)),
    ("ghost_fsdp_bk", False, (1 << 30, 12_000), (2, 3)),
    ("ghost_fsdp_bk", True, (0, 1 << 30), (0, 5)),
    ("ghost_fsdp_bk", True, (None, 12_000), (3, 2)),
    ("ghost_fsdp_bk", False, (None, None), (3, 2)),
]


def job(rank: int, world: int, clip: float, other_clip: float) -> tuple[list[Any], ...]:
    results: list[Any] = []
    for case in CASES:
        mode, checkpoints, budgets, sizes = case
        progress(case)
        made = one.private(FSDP2Wrapper(one.build(checkpoints=checkpoints)), clip, mode)
        made[0].held_budget = budgets[rank]
        start = sum(sizes[:rank])
        rows = tuple(t[start : start + sizes[rank]] for t in one.batch())
        for _ in range(2):
            grads = {n: one.full(g) for n, g in one.step(made, rows).items()}
        results.append((grads, sum(w == "replay" for w in one.ways(made[0]).values())))
    progress("foretold")
    return results, foretold(rank, clip), reduced_once.job(rank, world, other_clip)


def foretold(rank: int, clip: float) -> list[Any]:
    """Numbers of comparisons, and of replayed blocks, in steps with these budgets of this rank."""
    made = one.private(FSDP2Wrapper(one.build(checkpoints=False)), clip, "ghost_fsdp_bk")
    rows = tuple(t[2 * rank : 2 * rank + 2 + rank] for t in one.batch())
    found: list[Any] = []
    for budget in [1 << 30] * 3 + [(1 << 30, 12_000)[rank]] * 2 + [1 << 30] * 2:
        made[0].held_budget = budget
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as asked:
            grads = {n: one.full(g) for n, g in one.step(made, rows).items()}
        replayed = sum(way == "replay" for way in one.ways(made[0]).values())
        found.append((grads, asked.call_count, replayed))
    return found


def test_every_mixture_is_exact_on_ranks() -> None:
    clip, want = one.expected(one.build())
    found = run_distributed(job, 2, clip, reduced_once.expected(2)[0], timeout=150)
    reduced_once.check([physical for *_, physical in found], 2)
    for rank, (results, steps, _) in enumerate(found):
        for grads, _, _ in steps:
            one.close(grads, want)
        # Once before the backward pass; after it, too, unless both ranks were certain.
        assert [asked for _, asked, _ in steps] == [2, 1, 1, 2, 2, 2, 2]
        replayed = [number > 0 for *_, number in steps]
        # Rank 0 hears of the limit of rank 1 in the step in which it counts there, and as late of
        # its end.
        assert replayed == [False] * 3 + [rank == 1, True, True, False]
        for case, (grads, replayed) in zip(CASES, results, strict=True):
            one.close(grads, want)
            # From the second step on all ranks decide from the least of their numbers.
            least = min([b for b in case[2] if b is not None], default=None)
            # A made-up row, like a lone sample, runs without taps: there is nothing to hold.
            assert (replayed > 0) is (least is not None and case[3][rank] > 1), case


def test_sums_of_physical_batches_are_reduced_once_on_four_ranks() -> None:
    clip, _ = reduced_once.expected(4)
    reduced_once.check(run_distributed(reduced_once.job, 4, clip, timeout=150), 4)
