"""Correlated noise through make_private: what is released, counted, refused and resumed."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus import CorrelatedNoise, PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchMemoryManager
from tests.helpers.correlated import (
    BATCHES,
    CLIP,
    PLAN,
    ROWS,
    SIGMA,
    Run,
    clipped_sum,
    data,
    model,
    reference,
    white,
)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_a_run_is_the_reference(mode: str) -> None:
    run = Run(model(), mode)
    batches = list(run.loader)  # a look at them before the first step is nobody's part
    run.train()
    torch.testing.assert_close(run.weights(), reference(run, batches * 3), rtol=1e-9, atol=1e-11)


def test_passes_have_the_same_batches_and_each_sample_once() -> None:
    seen = Run(model(), seed=None, noise_multiplier=1e-3).train(2)
    assert [y.tolist() for y in seen[:BATCHES]] == [y.tolist() for y in seen[BATCHES:]]
    assert sum(len(y) for y in seen[:BATCHES]) == ROWS
    others = [Run(model(), seed=None).train(1) for _ in range(3)]
    for other in others:
        assert [y.tolist() for y in other] != [y.tolist() for y in seen[:BATCHES]]
    # Each item drew its part by itself: one run in 250 has parts of one size.
    assert len({len(y) for run in (seen, *others) for y in run}) > 1


def test_epsilon_is_that_of_one_gaussian_mechanism() -> None:
    run = Run(model())
    run.train(1)
    one = PrivacyEngine(accountant="pld").accountant
    one.history = [(SIGMA, 1.0, 1)]
    assert run.engine.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-9)
    run.train(2)
    assert run.engine.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-9)
    assert len(run.engine.accountant) == 12
    with pytest.raises(RuntimeError, match="all 12 steps"):
        run.train(1)


def test_noise_for_a_budget() -> None:
    engine = PrivacyEngine(accountant="pld")
    module = model()
    made = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=10), target_epsilon=3.0, target_delta=1e-5,
        epochs=3, max_grad_norm=1.0, correlated_noise=PLAN,
    )  # fmt: skip
    for x, y in made[-1]:
        made[1].zero_grad()
        nn.functional.cross_entropy(made[0](x), y).backward()
        made[1].step()
    assert 2.8 < engine.get_epsilon(1e-5) <= 3.0


def test_physical_batches_are_the_logical_ones() -> None:
    whole, split = Run(model(), "ghost"), Run(model(), "ghost")
    whole.train(2)
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=split.loader, max_physical_batch_size=3, optimizer=split.optimizer
        ) as loader:
            for x, y in loader:
                split.step(x, y)
    torch.testing.assert_close(split.weights(), whole.weights())


# --- what would make a sample take part too often ---


def test_a_pass_that_is_left_early_is_refused() -> None:
    run = Run(model())
    run.step(*next(iter(run.loader)))
    with pytest.raises(RuntimeError, match="too recently"):
        run.train(1)


def test_a_batch_without_a_step_is_refused() -> None:
    run = Run(model())
    with pytest.raises(RuntimeError, match=r"too recently|without a step"):
        for _ in range(2):
            for number, (x, y) in enumerate(run.loader):
                if number != 1:
                    run.step(x, y)


def test_batches_from_elsewhere_are_refused() -> None:
    run = Run(model())
    with pytest.raises(RuntimeError, match="iterate over that loader"):
        run.step(*data()[:10])


def test_batches_of_the_loader_that_was_given_are_refused() -> None:
    """Its split is another one: an item of its last batch may be in the first one of ours."""
    given = DPDataLoader(data(), sample_rate=1 / BATCHES, cyclic=True)
    run = Run(model(), data_loader=given)
    with pytest.raises(RuntimeError, match="iterate over that loader"):
        run.step(*next(iter(given)))


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm"])
def test_noise_that_changes_is_refused(name: str) -> None:
    run = Run(model())
    batches = iter(run.loader)
    run.step(*next(batches))
    setattr(run.optimizer, name, 2 * getattr(run.optimizer, name))
    before = copy.deepcopy(run.weights())
    with pytest.raises(RuntimeError, match="must not change"):
        run.step(*next(batches))
    torch.testing.assert_close(run.weights(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"correlated_noise": CorrelatedNoise.square_root(2, steps=9, separation=5)},
            "separation=5",
        ),
        ({"correlated_noise": 3}, "must be an opacus.CorrelatedNoise"),
        ({"poisson_sampling": False}, "needs poisson_sampling=True"),
        ({"clipping": "adaptive"}, "adaptive"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run(model(), **change)


# --- checkpoints ---


def saved(run: Run) -> io.BytesIO:
    buffer = io.BytesIO()
    run.engine.save_checkpoint(path=buffer, module=run.model, optimizer=run.optimizer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("secure", [False, True])
def test_a_resumed_run_takes_back_noise_of_before(secure: bool) -> None:
    """Its own draws come from another key; those of before from the key that made them."""
    run = Run(model(), seed=None, secure=secure)
    part = run.train(1)[0]
    file = saved(run)
    resumed = Run(model(), seed=None, secure=secure)
    resumed.engine.load_checkpoint(path=file, module=resumed.model, optimizer=resumed.optimizer)
    for number in range(BATCHES):
        torch.testing.assert_close(white(resumed, number), white(run, number), rtol=0, atol=0)
    new, old = white(resumed, BATCHES)[0], white(run, BATCHES)[0]
    assert not (new == old).any()  # unlike draws in float64 are never alike
    before = copy.deepcopy(resumed.weights())
    x, y = next(iter(resumed.loader))
    assert torch.equal(y, part)
    plain = model()
    plain.load_state_dict(dict(zip(plain.state_dict(), before, strict=True)))
    sums = clipped_sum(plain, x, y)
    resumed.step(x, y)
    drawn = [white(resumed, BATCHES - age) for age in range(3)]
    for place, (a, b) in enumerate(zip(before, resumed.weights(), strict=True)):
        noise = sum(w * d[place] for w, d in zip(PLAN.weights, drawn, strict=True))
        want = a - 0.05 * (sums[place] + SIGMA * CLIP * PLAN.sensitivity * noise)
        torch.testing.assert_close(b, want, rtol=1e-4, atol=1e-5)
    assert len(resumed.engine.accountant) == BATCHES + 1
    assert resumed.engine.get_epsilon(1e-5) == pytest.approx(run.engine.get_epsilon(1e-5))


@pytest.mark.parametrize("other", [None, CorrelatedNoise.square_root(2, steps=12, separation=4)])
def test_other_noise_does_not_go_on(other: CorrelatedNoise | None) -> None:
    run = Run(model())
    run.train(1)
    resumed = Run(model(), correlated_noise=other)
    before = copy.deepcopy(resumed.weights())
    with pytest.raises(ValueError, match="same correlated_noise"):
        resumed.engine.load_checkpoint(
            path=saved(run), module=resumed.model, optimizer=resumed.optimizer
        )
    torch.testing.assert_close(resumed.weights(), before, rtol=0, atol=0)
    assert len(resumed.engine.accountant) == 0
