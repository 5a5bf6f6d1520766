"""Blocks that run again under FSDP2, and sums that ranks add up once for several batches."""

from __future__ import annotations

from typing import Any

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


def job(rank: int, world: int, clip: float, other_clip: float) -> tuple[list[Any], Any]:
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
    return results, reduced_once.job(rank, world, other_clip)


def test_every_mixture_is_exact_on_ranks() -> None:
    clip, want = one.expected(one.build())
    found = run_distributed(job, 2, clip, reduced_once.expected(2)[0])
    reduced_once.check([physical for _, physical in found], 2)
    for rank, (results, _) in enumerate(found):
        for case, (grads, replayed) in zip(CASES, results, strict=True):
            one.close(grads, want)
            # From the second step on all ranks decide from the least of their numbers.
            least = min([b for b in case[2] if b is not None], default=None)
            # A made-up row, like a lone sample, runs without taps: there is nothing to hold.
            assert (replayed > 0) is (least is not None and case[3][rank] > 1), case


def test_sums_of_physical_batches_are_reduced_once_on_four_ranks() -> None:
    clip, _ = reduced_once.expected(4)
    reduced_once.check(run_distributed(reduced_once.job, 4, clip), 4)
