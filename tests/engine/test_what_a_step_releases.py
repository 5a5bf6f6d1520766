"""Whatever happens between two steps: each sample counts once, clipped, under enough noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.core.sums.terms import LocalSink
from opacus.core.sums.two_pass import TwoPass
from opacus.schedulers import ExponentialGradClip
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from tests.helpers.releases import CLIP, GHOST, MODES, B, batch, build, check, private, want


def releases(optimizer: Any) -> list[tuple[float, float]]:
    """For each step to come, the noise's standard deviation and the norm of the sum."""
    seen: list[tuple[float, float]] = []
    noised = optimizer._parallelism.noised

    def spy(std: float, sums: list[Tensor], *others: Any) -> Iterable[Tensor]:
        seen.append((std, torch.cat([s.flatten() for s in sums]).norm().item()))
        return noised(std, sums, *others)  # type: ignore[no-any-return]

    optimizer._parallelism.noised = spy
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_a_clipping_norm_lowered_within_a_logical_batch(mode: str) -> None:
    inputs, targets = batch(1)
    model, optimizer, criterion, _ = private(build(), mode, noise_multiplier=1.0)
    scheduler, seen = ExponentialGradClip(optimizer, gamma=0.1), releases(optimizer)
    optimizer.signal_skip_step(True)
    criterion(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    for _ in range(2):  # an empty batch ends this step; the next one has the new norm
        criterion(model(inputs[:0]), targets[:0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] == pytest.approx((CLIP, CLIP), rel=1e-4)
    assert seen[1] == pytest.approx((0.1 * CLIP, 0.0))


@pytest.mark.parametrize("mode", MODES)
def test_a_clipping_norm_lowered_between_backward_and_step(mode: str) -> None:
    inputs, targets = batch(1)
    model, optimizer, criterion, _ = private(build(), mode, noise_multiplier=1.0)
    seen = releases(optimizer)
    criterion(model(inputs), targets).backward()
    optimizer.max_grad_norm = 0.1 * CLIP
    optimizer.step()
    std, norm = seen[0]
    assert 0 < norm <= std * (1 + 1e-5)


@pytest.mark.parametrize("mode", GHOST)
def test_adaptive_clipping_over_physical_batches(mode: str) -> None:
    model, optimizer, criterion, loader = private(
        build(), mode, PrivacyEngineAdaptiveClipping(), noise_multiplier=0.1, max_grad_norm=100.0,
        target_unclipped_quantile=0.1, min_clipbound=1e-3, clipbound_learning_rate=1.0,
    )  # fmt: skip
    seen, limits = releases(optimizer), []
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as physical:
        for inputs, targets in physical:
            criterion(model(inputs), targets).backward()
            limits.append(optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    assert limits[0] > 2 * limits[3]  # C moved within the first logical batch
    multiplier = (0.1**-2 - (2 * 0.05 * B) ** -2) ** -0.5
    assert [std for std, _ in seen] == pytest.approx(
        [multiplier * max(limits[i : i + 4]) for i in range(0, len(limits), 4)]
    )


@pytest.mark.parametrize("mode", GHOST)
def test_a_count_without_a_step_is_accounted_for(mode: str) -> None:
    """C has moved by what the batch has shown: dropped, failed or refused, it has cost privacy."""
    engine = PrivacyEngineAdaptiveClipping()
    model, optimizer, criterion, _ = private(
        build(), mode, engine, noise_multiplier=0.1, min_clipbound=1e-3
    )
    inputs, targets = batch()

    def backward() -> float:
        criterion(model(inputs), targets).backward()
        return float(optimizer.max_grad_norm)

    steps = engine.accountant.__len__
    assert backward() != CLIP and steps() == 1  # before anybody can read C
    optimizer.step()
    optimizer.zero_grad()
    assert steps() == 1
    backward()
    optimizer.zero_grad()  # dropped
    optimizer.zero_grad()
    assert steps() == 2
    backward()
    optimizer.reset_accumulation()
    assert steps() == 3
    optimizer.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model._strategy), "sum_pass", lambda *args, **how: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward()
    assert steps() == 4
    backward()
    optimizer.step()
    assert steps() == 5
    optimizer.zero_grad()
    backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "compare_with_draws", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert steps() == 6  # before zero_grad
    with pytest.raises(RuntimeError, match="no clipped gradient"):
        optimizer.step()  # nothing is left of it
    assert steps() == 6
    optimizer.zero_grad()
    saved = engine.accountant.state_dict()
    backward()
    engine.accountant.load_state_dict(saved)
    assert steps() == 6
    optimizer.step()
    assert steps() == 7
    optimizer.zero_grad()
    optimizer.signal_skip_step()
    backward()
    optimizer.step()
    optimizer.zero_grad()
    assert steps() == 8  # of a logical batch that is never finished
    for dropped in range(1, 4):
        backward()
        optimizer.zero_grad()
        assert steps() == 7 + dropped


@pytest.mark.parametrize("mode", GHOST)
def test_batches_of_one_step_are_counted_as_one_step(mode: str) -> None:
    """Each noisy count is paid for when it is released; together they are the step."""
    engine = PrivacyEngineAdaptiveClipping()
    model, optimizer, criterion, _ = private(
        build(), mode, engine, noise_multiplier=0.1, min_clipbound=1e-3
    )
    inputs, targets = batch()
    (rate,) = {counter.sample_rate for counter in optimizer._counters}
    rate = min(rate, 0.25)
    optimizer._counters[0].sample_rate = rate
    history = engine.accountant.history
    for step in range(2):
        before = [(0.1, 2 * rate, step)] if step else []
        criterion(model(inputs), targets).backward()
        assert history == [*before, (0.1, rate, 1)]
        criterion(model(inputs), targets).backward()
        assert history[-1][1] == 2 * rate and len(engine.accountant) == step + 1
        optimizer.step()
        assert sum(rate * steps for _, rate, steps in history) == 2 * rate * (step + 1)
        optimizer.zero_grad()
    criterion(model(inputs), targets).backward()
    optimizer.noise_multiplier = 0.09  # what was released had other noise
    optimizer.step()
    assert [entry[0] for entry in history[-2:]] == [0.1, 0.09]


@pytest.mark.filterwarnings("ignore:The GDP accountant approximates")
@pytest.mark.parametrize("mode", GHOST)
def test_batches_of_one_step_that_gdp_cannot_count(mode: str) -> None:
    """Refused before anything is computed of the second one; the first one is a step."""
    engine = PrivacyEngineAdaptiveClipping(accountant="gdp")
    model, optimizer, criterion, _ = private(
        build(), mode, engine, noise_multiplier=0.1, min_clipbound=1e-3
    )
    inputs, targets = batch()
    for step in range(2):
        criterion(model(inputs), targets).backward()
        limit, norms = optimizer.max_grad_norm, model.per_sample_gradient_norms
        with pytest.raises(ValueError, match=r"'gdp' needs steps of one sample rate.*each batch"):
            criterion(model(2 * inputs), targets).backward()
        assert optimizer.max_grad_norm == limit and model.per_sample_gradient_norms is norms
        optimizer.step()
        optimizer.zero_grad()
        assert len(engine.accountant) == step + 1


@pytest.mark.parametrize("mode", GHOST)
@pytest.mark.parametrize("same_loss", [True, False])
def test_samples_are_summed_once(mode: str, same_loss: bool) -> None:
    inputs, targets = batch()
    model = build()
    expected = want(model, inputs, targets)
    wrapped, optimizer, criterion, _ = private(model, mode)
    output = wrapped(inputs)
    loss = criterion(output, targets)
    other = loss if same_loss else criterion(output, targets.flip(0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="clipped and summed already"):
        other.backward(retain_graph=True)
    optimizer.step()
    check(model, expected)  # the first backward pass alone
    optimizer.zero_grad()
    loss = criterion(wrapped(inputs), targets)
    (0.25 * loss + 0.75 * loss).backward(retain_graph=True)
    optimizer.zero_grad()
    loss.backward()  # nothing of the first one is left
    optimizer.step()
    check(model, expected)


@pytest.mark.parametrize("mode", GHOST)
def test_an_error_while_summing_leaves_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = batch()
    model = build()
    expected = want(model, inputs[:3], targets[:3])
    wrapped, optimizer, criterion, _ = private(model, mode)
    owner, name = (TwoPass, "_weighted") if mode == "ghost" else (LocalSink, "put")
    original, calls = getattr(owner, name), []

    def fails_later(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no room")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_later)
        with pytest.raises(MemoryError, match="no room"):
            criterion(wrapped(inputs), targets).backward()
    assert all(p.grad is None for p in model.parameters())
    criterion(wrapped(inputs[:3]), targets[:3]).backward()
    optimizer.step()
    check(model, expected)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_kept_alive_do_not_join_batches(mode: str) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head, self.other = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.tanh(self.trunk(x))
            return self.head(x), self.other(x)

    torch.manual_seed(0)
    inputs, targets = batch()
    model = TwoHeads()
    expected = want(model, inputs, targets)
    wrapped, optimizer, criterion, _ = private(model, mode)
    outputs = []
    for rows in (slice(0, 4), slice(4, 8)):
        outputs.append(wrapped(inputs[rows]))  # the second head never gets a backward
        criterion(outputs[-1][0], targets[rows]).backward()
    optimizer.step()
    check(model, expected)


@pytest.mark.parametrize("mode", [*MODES, "functorch"])
@pytest.mark.parametrize("moment", ["before backward", "before step"])
def test_a_parameter_frozen_in_the_middle_does_not_move(mode: str, moment: str) -> None:
    inputs, targets = batch()
    model = build()
    before = model[0].weight.detach().clone()
    wrapped, optimizer, criterion, _ = private(
        model, mode, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0
    )
    loss = criterion(wrapped(inputs), targets)
    model[0].weight.requires_grad_(moment == "before step")
    loss.backward()
    model[0].weight.requires_grad_(False)
    optimizer.step()
    assert torch.equal(before, model[0].weight)
    model[0].weight.requires_grad_(True)
    optimizer.zero_grad()
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_added_behind_the_engines_back(mode: str) -> None:
    inputs, targets = batch()
    model = build()
    wrapped, optimizer, criterion, _ = private(model, mode)
    model[2] = nn.Linear(10, 3)
    optimizer.original_optimizer.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(RuntimeError, match=r"2\.weight.*nothing would clip them"):
        criterion(wrapped(inputs), targets).backward()
        optimizer.step()
