"""Correlated noise by buffers and by banded matrices through make_private."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from opacus import CorrelatedNoise, PrivacyEngine
from opacus.core.kernels.noise.gaussian import grid_of
from opacus.utils.groups import Groups
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from tests.helpers.correlated import (
    BANDED,
    BATCHES,
    BUFFERED,
    CLIP,
    ROWS,
    SIGMA,
    Run,
    data,
    model,
    reference,
    white,
)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("plan", [BUFFERED, BANDED])
def test_a_run_is_the_reference(mode: str, plan: CorrelatedNoise) -> None:
    run = Run(model(), mode, correlated_noise=plan)
    run.train()
    torch.testing.assert_close(run.weights(), reference(run, run.seen), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("plan", [BUFFERED, BANDED])
def test_lost_buffers_are_made_again_bit_for_bit(plan: CorrelatedNoise) -> None:
    run, other = (Run(model(), correlated_noise=plan) for _ in range(2))
    buffers = other.optimizer._parallelism.correlation.buffers
    for _ in range(2):
        run.train(1)
        other.train(1)
        buffers.clear()
    run.train(1)
    other.train(1)
    assert buffers._held and all(map(torch.equal, run.weights(), other.weights()))


def test_a_frozen_parameter_takes_up_the_draws_that_it_missed() -> None:
    run, other = (Run(model(), "ghost", correlated_noise=BUFFERED) for _ in range(2))
    bias = run.optimizer.params[1]
    for (x, y), _ in zip(run.loader, other.loader, strict=True):
        bias.requires_grad_(len(run.seen) != 1)
        before = bias.detach().clone()
        run.step(x, y)
        other.step(x, y)
        assert torch.equal(before, bias) == (len(run.seen) == 2)
    bias.requires_grad_(True)
    for name, held in _held(other).items():
        assert held.end == _held(run)[name].end == BATCHES
        assert all(map(torch.equal, held.tensors, _held(run)[name].tensors))


def _held(run: Run) -> dict[str, Any]:
    return run.optimizer._parallelism.correlation.buffers._held


@pytest.mark.parametrize("secure", [False, True])
def test_a_resumed_run_takes_back_noise_of_before(secure: bool) -> None:
    """Its own draws come from another key; what it holds of those before is the same."""
    run = Run(model(), seed=None, secure=secure, correlated_noise=BUFFERED)
    run.train(1)
    file = io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
    file.seek(0)
    resumed = Run(model(), seed=None, secure=secure, correlated_noise=BUFFERED)
    resumed.engine.load_checkpoint(path=file, module=resumed.model, optimizer=resumed.optimizer)
    assert not _held(resumed)
    resumed.train(1)
    std, end = SIGMA * CLIP * BUFFERED.sensitivity, 2 * BATCHES
    drawn = [white(resumed, number) for number in range(end)]
    assert torch.equal(drawn[0][0], white(run, 0)[0])
    assert not (drawn[BATCHES][0] == white(run, BATCHES)[0]).any()  # in float64
    names = resumed.optimizer._noise_names(resumed.optimizer.params)
    for place, name in enumerate(names):
        held = _held(resumed)[name]
        assert held.end == end
        for (_, decay), got in zip(BUFFERED.buffers, held.tensors, strict=True):
            terms = (decay ** (end - 1 - number) * drawn[number][place] for number in range(end))
            torch.testing.assert_close(got, std * sum(terms), rtol=1e-4, atol=1e-5)
    assert resumed.engine.get_epsilon(1e-5) == pytest.approx(run.engine.get_epsilon(1e-5))


def test_sums_lie_on_the_grid() -> None:
    part = 2.0**-6
    run = Run(model(), correlated_noise=BUFFERED, release_grid=part, loss_reduction="sum")
    run.train(1)
    grid = grid_of(SIGMA * CLIP * BUFFERED.sensitivity, part)
    for parameter in run.optimizer.params:
        assert torch.equal((parameter.grad / grid).round() * grid, parameter.grad)


# --- cyclic Poisson sampling ---


def test_groups_take_turns_and_items_are_drawn_at_their_rate() -> None:
    size, rate, groups = 4000, 0.05, 4
    sampler = UniformWithReplacementSampler(num_samples=size, sample_rate=rate, steps=10)
    sampler.groups = Groups(groups)
    of = sampler.groups.of(size)
    counts = of.bincount(minlength=groups)
    # A binomial count is within 6 standard deviations but for a chance of 2e-9.
    assert all(abs(int(c) - size / groups) < 6 * math.sqrt(size * 0.25 * 0.75) for c in counts)
    drawn = torch.zeros(size)
    for step, batch in enumerate(b for _ in range(2) for b in sampler):  # passes of 10 batches
        assert {int(g) for g in of[batch]} == {step % groups}
        drawn[batch] += 1
        sampler.groups.latest = step % groups  # as a step says
    assert abs(float(drawn.sum()) - 20 * size * rate) < 6 * math.sqrt(20 * size * rate)
    # Five tosses of 0.2 each: 0.2627 of the items come more than once.
    assert abs(float((drawn > 1).double().mean()) - 0.26272) < 6 * math.sqrt(0.194 / size)


def test_one_step_of_each_round_is_counted_at_the_rate_of_a_group() -> None:
    run = Run(model(), correlated_noise=BANDED)
    run.train(3)
    rate = BANDED.separation / BATCHES
    assert BANDED.accounted(1 / BATCHES) == (rate, 6)
    spent = [(s, r) for s, r, n in run.engine.accountant.history for _ in range(n)]
    assert spent == [(SIGMA, rate), (SIGMA, 0.0)] * 6
    plain = PrivacyEngine(accountant="pld").accountant
    plain.history = [(SIGMA, rate, 6)]
    assert run.engine.get_epsilon(1e-5) == pytest.approx(plain.get_epsilon(1e-5), rel=1e-9)


def test_noise_for_a_budget() -> None:
    module = model()
    engine = PrivacyEngine(accountant="pld")
    made = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=ROWS // BATCHES), target_epsilon=3.0,
        target_delta=1e-5, epochs=3, max_grad_norm=1.0, correlated_noise=BANDED,
    )  # fmt: skip
    for _ in range(3):
        for x, y in made[-1]:
            made[1].zero_grad()
            torch.nn.functional.cross_entropy(made[0](x), y).backward()
            made[1].step()
    assert 2.8 < engine.get_epsilon(1e-5) <= 3.0


def test_a_batch_left_out_is_refused() -> None:
    run = Run(model(), correlated_noise=BANDED)
    with pytest.raises(RuntimeError, match=r"too recently|without a step"):
        for _ in range(2):
            for number, (x, y) in enumerate(run.loader):
                if number != 1:
                    run.step(x, y)


@pytest.mark.parametrize("secure", [False, True])
def test_groups_go_on_in_their_turn(secure: bool) -> None:
    """After a pass that is left early, and in a resumed run, whose loader is a new one."""
    plan = CorrelatedNoise((1.0,), 12, 3, strategy=(1.0, 0.6))

    def started() -> Run:
        return Run(model(), seed=None, secure=secure, correlated_noise=plan)

    run = started()
    run.train(1)  # groups 0, 1, 2, 0
    run.step(*next(iter(run.loader)))  # 1
    file = io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.model, optimizer=run.optimizer)
    file.seek(0)
    resumed = started()
    own, other = (r.loader.batch_sampler.groups for r in (run, resumed))
    assert not torch.equal(own.of(ROWS), other.of(ROWS))
    resumed.engine.load_checkpoint(path=file, module=resumed.model, optimizer=resumed.optimizer)
    assert torch.equal(own.of(ROWS), other.of(ROWS)) and own.latest == other.latest == 1
    targets = data().tensors[0]
    for each in (run, resumed):
        each.train(1)
        for place, (x, _) in enumerate(each.seen[-BATCHES:]):
            items = (x.unsqueeze(1) == targets).all(-1).nonzero()[:, 1]
            assert {int(g) for g in own.of(ROWS)[items]} <= {(2 + place) % 3}
    assert [r for _, r, n in resumed.engine.accountant.history for _ in range(n)] == (
        [0.75, 0.0, 0.0] * 3
    )


def test_more_groups_than_batches_are_refused() -> None:
    plan = CorrelatedNoise((1.0,), 12, 5, strategy=(1.0, 0.6))
    with pytest.raises(ValueError, match="at most 4 groups"):
        Run(model(), correlated_noise=plan)
