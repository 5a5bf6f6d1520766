"""Leaving units out shows each kind of broken clipping, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.auditing import leave_one_out
from opacus.core.isolation.check import Isolation
from opacus.grad_sample import _norms as ghost_norms
from opacus.grad_sample import grad_sample_module_fast_gradient_clipping as ghost_file
from opacus.optimizers import optimizer as hooks_file
from opacus.optimizers.scaled import ScaledAdamW

B, CLIP = 6, 0.05


class Run:
    """A private model in one mode, and its step."""

    def __init__(self, mode: str, **changes: Any) -> None:
        torch.manual_seed(0)
        self.batch = (torch.randn(B, 5), torch.randint(3, (B,)))
        net = changes.pop("net", nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))
        self.engine = PrivacyEngine(accountant="rdp")
        out = self.engine.make_private(
            module=net,
            optimizer=changes.pop("make", partial(torch.optim.SGD, lr=0.1))(net.parameters()),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(*self.batch), batch_size=3),
            noise_multiplier=1.0,
            max_grad_norm=CLIP,
            grad_sample_mode=mode,
            **changes,
        )
        self.model, self.optimizer, self.loader = out[0], out[1], out[-1]
        self.criterion: Any = out[2] if len(out) == 4 else nn.CrossEntropyLoss()

    def step(self, batch: Any) -> None:
        inputs, targets = batch
        self.optimizer.zero_grad()
        self.criterion(self.model(inputs), targets).backward()
        self.optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_sums_are_measured_as_they_are_scaled(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(mode, make=ScaledAdamW)
    run.optimizer.param_groups[0]["exponents"] = [4, -3, 0, 2]
    report = leave_one_out(run.step, run.optimizer, run.batch)
    report.raise_if_failed()
    assert report.scores.min() > 0.99
    monkeypatch.setattr(run.optimizer._privacy, "gradient_scales", lambda: [1.0, 1.0, 8.0, 1.0])
    with pytest.MonkeyPatch.context() as planted:  # what clips does not know of the scales
        planted.setattr(ghost_norms.Norms, "scaled", lambda norms, scales: norms.whole)
        assert mode == "hooks" or not leave_one_out(run.step, run.optimizer, run.batch).passed


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_a_true_run_passes_and_goes_on(mode: str) -> None:
    run = Run(mode)
    before = [p.detach().clone() for p in run.model.parameters()]
    report = leave_one_out(run.step, run.optimizer, run.batch)
    report.raise_if_failed()
    assert report.scores.shape == (B,)
    assert report.scores.min() > 0.99  # every gradient is longer than C, so all are at the limit
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert len(run.engine.accountant) == run.optimizer._parallelism.key.step == 0
    for batch in run.loader:
        run.step(batch)
    assert len(run.engine.accountant) == len(run.loader) == run.optimizer._parallelism.key.step
    assert not torch.equal(before[0], next(run.model.parameters()))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_units_of_an_audit_are_not_those_of_the_step_after_it(mode: str) -> None:
    run = Run(mode, privacy_unit="users", poisson_sampling=False)

    def step(batch: Any) -> None:
        run.optimizer.zero_grad()
        inputs, targets, users = batch
        run.criterion(run.model(inputs, users=users), targets).backward()
        run.optimizer.step()

    batch = (*run.batch, torch.arange(B))
    leave_one_out(step, run.optimizer, batch).raise_if_failed()
    for part in (0, 1):  # physical batches of one step; before the first nothing is cleared
        inputs, targets, users = (rows[3 * part : 3 * part + 3] for rows in batch)
        run.optimizer.signal_skip_step(part == 0)
        run.criterion(run.model(inputs, users=users), targets).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert len(run.engine.accountant) == 1


@pytest.mark.parametrize("change", [torch.ones_like, lambda f: f.roll(1)], ids=["missing", "shift"])
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_wrong_factors_are_found(
    mode: str, change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(mode)
    with torch.no_grad():  # of unequal size, so that another's factor is a wrong one
        run.batch[0][2] *= 30
    right = hooks_file.clip_flat

    def wrong(*given: Any) -> Any:
        clipped = right(*given)
        return replace(clipped, factors=change(clipped.factors))

    for file in (hooks_file, ghost_file):
        monkeypatch.setattr(file, "clip_flat", wrong)
    report = leave_one_out(run.step, run.optimizer, run.batch)
    assert report.failures == ("sensitivity",)
    assert report.scores.max() > 1.2


def test_coupled_samples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss mixes samples, and the check that would refuse it is off."""
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    monkeypatch.setattr(Isolation, "_warned", False)  # it is said once a process
    with pytest.warns(UserWarning, match="nothing checks"):
        run = Run("hooks")
        run.criterion = lambda out, y: nn.functional.cross_entropy(out - 5 * out.mean(0), y)
        report = leave_one_out(run.step, run.optimizer, run.batch)
    assert not report.passed and report.scores.max() > 1.2


def test_a_random_model_is_no_evidence() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    run = Run("hooks", net=net)
    report = leave_one_out(run.step, run.optimizer, run.batch)
    assert "random" in str(report) and not report.passed


def test_what_says_nothing_is_refused() -> None:
    run = Run("hooks")
    with pytest.raises(ValueError, match="sum of the batch is zero"):
        leave_one_out(lambda batch: None, run.optimizer, run.batch)
    with pytest.raises(ValueError, match="must be some of"):
        leave_one_out(run.step, run.optimizer, run.batch, units=[B])
    with pytest.raises(ValueError, match="first dimension"):
        leave_one_out(run.step, run.optimizer, (torch.ones(3), torch.ones(4)))
