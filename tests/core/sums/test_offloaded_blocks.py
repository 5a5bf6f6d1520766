"""Records of blocks that wait in host memory: one of the ways to have them again for the sum."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch

from opacus.core.norms import kept
from opacus.core.norms.host_memory import Away
from opacus.core.sums import planner as planning
from opacus.core.sums import rounding
from opacus.core.sums.planner import Planner
from tests.helpers.replayed_blocks import batch, build, close, expected, private, step, ways

CHOICE = Planner._choice


@pytest.fixture(params=["store", "keep"])
def what(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is held of each layer; running again takes ever so long."""
    held: str = request.param
    monkeypatch.setattr(planning, "REPLAYED_FORWARDS", 1e9)
    monkeypatch.setattr(kept, "SENT_ELEMENTS", 1)
    monkeypatch.setattr(Planner, "_choice", lambda s, r: replace(CHOICE(s, r), what=held))
    return held


def test_every_mixture_of_the_ways_is_exact(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(checkpoints=True)
    clip, want = expected(model)
    made = private(model, clip)
    sent: list[Away] = []
    original = Away.__init__

    def seen(self: Away, tensor: torch.Tensor) -> None:
        original(self, tensor)
        sent.append(self)
        assert self._host.data_ptr() != tensor.data_ptr()

    monkeypatch.setattr(Away, "__init__", seen)
    mixtures = set()
    for held, host in ((None, 0), (0, 1 << 30), (40_000, 1 << 30), (40_000, 30_000), (0, 30_000)):
        made[0].held_budget, made[0].host_budget = held, host
        for _ in range(2):  # what a block holds is known the second time
            sent.clear()
            close(step(made), want)
            found = Counter(way for name, way in ways(made[0]).items() if "blocks" in name)
            planner = made[0]._strategy.planner
            assert bool(sent) is bool(planner.host_bytes) is (found["offload"] > 0)
            # What is light (norms, biases) is formed beside what the planner counts.
            assert sum(a.bytes for a in sent) <= 1.1 * planner.host_bytes
        mixtures.add(tuple(sorted(found.items())))
        if host == 1 << 30:
            assert found["replay"] == 0
        if held == 0:
            assert found["keep"] == found["store"] == 0
    assert (("offload", 12),) in mixtures
    assert any(len(mixture) == 3 for mixture in mixtures) or what == "store"
    assert any("replay" in dict(m) and "offload" in dict(m) for m in mixtures)
    assert "offload" in made[0].explain()


@pytest.mark.usefixtures("what")
def test_after_running_out_of_memory_blocks_leave() -> None:
    model = build()
    clip, want = expected(model)
    made = private(model, clip)
    made[0].held_budget, made[0].host_budget = 1 << 30, 1 << 30
    close(step(made), want)
    assert "offload" not in ways(made[0]).values()
    made[0]._strategy.limits.ran_out(held=1 << 20, block=1 << 10)
    close(step(made), want)
    assert {way for name, way in ways(made[0]).items() if "blocks" in name} == {"offload"}


@pytest.mark.usefixtures("what")
def test_units_that_are_not_finite_and_rounded_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "ROUNDED_ELEMENTS", 1)
    x, y = batch()
    x[2, 1] = torch.nan
    sums = []
    for held in (None, 20_000):  # with room for what is outside of the blocks
        made = private(build(), 0.2)
        made[0].stored_dtype = "float8"
        made[0]._strategy.planner.rounding._key.adopt(b"k" * 32)
        made[0].held_budget, made[0].host_budget = held, 1 << 30
        sums.append(step(made, (x, y)))
        assert set(ways(made[0]).values()) & {"offload"} == ({"offload"} if held else set())
    close(sums[1], sums[0])
    assert all(bool(g.isfinite().all()) for g in sums[1].values())


def test_running_again_is_preferred_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "REPLAYED_FORWARDS", 0)
    made = private(build(), 0.2)
    made[0].held_budget, made[0].host_budget = 0, 1 << 30
    step(made)
    assert "offload" not in ways(made[0]).values() and "replay" in ways(made[0]).values()


def test_only_one_pass_keeps_records() -> None:
    made = private(build(), 0.2, "ghost")
    assert made[0].host_budget == 0
    with pytest.raises(ValueError, match="only the _bk modes keep"):
        made[0].host_budget = 1


@pytest.mark.usefixtures("what")
def test_what_has_come_back_goes_once_it_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    counts: list[int] = []
    original = Away.back

    def back(self: Away) -> torch.Tensor:
        tensor = original(self)
        alive.add(tensor)
        counts.append(len(alive))
        return tensor

    monkeypatch.setattr(Away, "back", back)
    made = private(build(), 0.2)
    made[0].held_budget, made[0].host_budget = 0, 1 << 30
    step(made)
    assert len(counts) > 12 and max(counts) <= len(counts) // 3
