"""Any model of moves, any units: the sum is the oracle's, and bounded, or the step is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.moves import (
    APART,
    CLIP,
    MIXING,
    B,
    Example,
    clipped_sum,
    distance,
    drawn,
    is_refusal,
    private,
    step,
)

MODES = [
    "hooks", "functorch", "ew", "ghost", "ghost-deferred", "ghost-formed", "ghost_bk", "flash",
    "flash_bk",
]  # fmt: skip
SHARDED = ["ghost_fsdp", "ghost_fsdp_bk"]


@st.composite
def examples(draw: st.DrawFn) -> Example:
    moves = draw(st.lists(st.sampled_from(APART), min_size=1, max_size=3))
    if draw(st.integers(0, 7)) == 5:
        moves[draw(st.integers(0, len(moves) - 1))] = draw(st.sampled_from(MIXING))
    named = draw(st.booleans())
    user = st.integers(0, 2)
    units = draw(st.lists(user, min_size=B, max_size=B)) if named else range(B)
    return Example(tuple(moves), draw(st.integers(0, 1000)), tuple(units), named)


def outcome(example: Example, mode: str) -> str:
    """Whether the example was computed or refused; wrong numbers are an error."""
    *_, units = example.batch()
    every = units.unique().tolist()
    made = private(example, mode, _as_it_is, len(every))
    try:
        got = step(made, example, torch.arange(B))
    except (RuntimeError, ValueError) as error:
        assert is_refusal(error), error
        return "refused"
    want = clipped_sum(example)
    assert distance(got, want) < 1e-4 * distance(want, [0 * w for w in want]), example
    for unit in every[: min(1, len(every) - 1)]:  # without a unit: at most C away
        less = step(made, example, torch.where(units != unit)[0])
        assert distance(got, less) <= CLIP * (1 + 1e-4), (example, unit)
    return "computed"


def _as_it_is(net: nn.Module) -> nn.Module:
    return net


@pytest.mark.parametrize("mode", MODES)
def test_in_one_process(mode: str) -> None:
    found: Counter[str] = Counter()

    @seed(MODES.index(mode))
    @settings(
        max_examples=4 if mode == "functorch" else 6, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(example=examples())
    def check(example: Example) -> None:
        result = outcome(example, mode)
        found[result] += 1
        assert example.mixes or result == "computed", example

    check()
    assert found["computed"] >= 0.6 * found.total(), found


# --- FSDP2 ---

# Examples by number; ranks hold whole units.
NUMBERS = {2: range(100, 108), 4: range(200, 204)}


def on_ranks(example: Example, world_size: int) -> list[torch.Tensor]:
    """The rows of each rank. Where samples are mixed, all have several units: all refuse."""
    *_, units = example.batch()
    return [torch.where(units % world_size == rank)[0] for rank in range(world_size)]


def sharded_example(number: int, world_size: int) -> Example:
    example = drawn(number, rows=2 * world_size if world_size > 2 else B)
    return replace(example, units=tuple(range(len(example.units)))) if example.mixes else example


def outcomes(rank: int, world_size: int) -> list[str]:
    return [
        sharded_outcome(rank, world_size, SHARDED[number % 2], sharded_example(number, world_size))
        for number in NUMBERS[world_size]
    ]


def sharded_outcome(rank: int, world_size: int, mode: str, example: Example) -> str:
    progress((mode, example))
    rows = on_ranks(example, world_size)
    *_, units = example.batch()
    made = private(example, mode, FSDP2Wrapper, max(1, len(units[rows[rank]].unique())))
    try:
        got = step(made, example, rows[rank])
    except (RuntimeError, ValueError) as error:
        assert is_refusal(error), error
        return "refused"
    want = clipped_sum(example)
    assert distance(got, want) < 1e-4 * distance(want, [0 * w for w in want]), example
    left = int(units[0])  # the first unit, of whichever rank
    less = step(made, example, rows[rank][units[rows[rank]] != left])
    assert distance(less, clipped_sum(example, left)) < 1e-4 * CLIP, example
    assert distance(got, less) <= CLIP * (1 + 1e-4), example
    return "computed"


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded(world_size: int) -> None:
    examples = [sharded_example(number, world_size) for number in NUMBERS[world_size]]
    mixing = ["refused" if example.mixes else "computed" for example in examples]
    assert mixing.count("computed") >= 0.6 * len(mixing)
    for found in run_distributed(outcomes, world_size):
        assert found == mixing
