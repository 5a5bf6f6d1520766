"""Seeded runs that resume from parts of their state repeat neither noise nor batches.

Equal noise in two steps is none in their difference, and equal batches are not the independent
ones that the accountant counts.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.ranks.parallelism import Single
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Run:
    """A private run whose noise and batches come from seeds."""

    def __init__(
        self,
        mode: str = "hooks",
        make: type[PrivacyEngine] = PrivacyEngine,
        momentum: float = 0.0,
        **more: Any,
    ) -> None:
        torch.manual_seed(0)
        # Of a loss of constant gradients, so that sums do not depend on the parameters.
        module = nn.Sequential(nn.Linear(4, 3, bias=False))
        data = TensorDataset(torch.randn(16, 4), torch.arange(16.0))
        self.engine = make(accountant="rdp")
        made: Any = self.engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum),
            criterion=Sums(),
            data_loader=DataLoader(data, batch_size=4, generator=seeded(2)),
            noise_multiplier=0.5,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
            noise_generator=seeded(1),
            **more,
        )
        self.module, self.optimizer, *loss, self.loader = made
        self.loss = loss[0] if loss else Sums()

    def train(self) -> tuple[list[list[float]], list[Tensor]]:
        """One pass: the samples of each batch, and each step's gradient."""
        batches, grads = [], []
        for inputs, numbers in self.loader:
            self.optimizer.zero_grad()
            self.loss(self.module(inputs), torch.zeros(len(inputs))).backward()
            self.optimizer.step()
            batches.append(numbers.tolist())
            grads.append(self.module._module[0].weight.grad.clone())
        return batches, grads

    def one_batch(self) -> Tensor:
        """The gradient of a step on samples that are always the same."""
        self.optimizer.zero_grad()
        self.loss(self.module(torch.ones(4, 4)), torch.zeros(4)).backward()
        self.optimizer.step()
        return self.module._module[0].weight.grad.clone()

    @property
    def parts(self) -> dict[str, Any]:
        return {"module": self.module, "optimizer": self.optimizer}


class Sums(nn.Module):
    reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = outputs.sum(1) + 0 * targets
        return losses if self.reduction == "none" else losses.mean()


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_a_history_that_is_loaded_alone_starts_no_noise_again(mode: str) -> None:
    first, resumed = Run(mode), Run(mode)
    before = [first.one_batch() for _ in range(2)]
    resumed.engine.accountant.load_state_dict(first.engine.accountant.state_dict())
    after = [resumed.one_batch() for _ in range(2)]
    # The clipped sums are the same, so equal gradients have equal noise.
    assert torch.equal(Run(mode).one_batch(), before[0])
    assert not any(torch.allclose(a, b) for a in after for b in before)
    assert len(resumed.engine.accountant) == 4
    # In an engine that goes on, noise goes on, too: nothing is skipped.
    assert torch.equal(after[0], first.one_batch())


@pytest.mark.parametrize("kind", ["hooks", "ghost"])
def test_nor_does_it_start_the_noise_of_counts_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[float] = []
    plain = Single.noised_count

    def spied(self: Single, std: float, count: Tensor) -> Tensor:
        before = float(count)
        noised = plain(self, std, count)
        drawn.append((float(noised) - before) / std)
        return noised

    monkeypatch.setattr(Single, "noised_count", spied)

    def adaptive() -> Run:
        if kind == "ghost":
            return Run("ghost", PrivacyEngineAdaptiveClipping, expected_batch_size=40)
        return Run("hooks", clipping="adaptive", unclipped_num_std=2.0)

    first, resumed = adaptive(), adaptive()
    first.one_batch(), first.one_batch()
    resumed.engine.accountant.load_state_dict(first.engine.accountant.state_dict())
    resumed.one_batch(), resumed.one_batch()
    assert len({round(noise, 3) for noise in drawn}) == len(drawn) == 4


SPENT_NOTHING = "the accountant counts no step"


def test_weights_and_optimizer_without_what_they_have_spent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a loop, or Lightning, restores that does not know of the accountant."""
    first = Run(momentum=0.9)
    for _ in range(2):
        first.one_batch()
    state, spent = first.optimizer.state_dict(), first.engine.accountant.state_dict()
    for forgets in (False, True):
        resumed = Run(momentum=0.9)
        resumed.optimizer.load_state_dict(state)
        if not forgets:
            resumed.engine.accountant.load_state_dict(spent)
        resumed.one_batch(), resumed.one_batch()
        assert caplog.text.count(SPENT_NOTHING) == forgets
    fresh = Run(momentum=0.9)
    fresh.optimizer.load_state_dict(Run(momentum=0.9).optimizer.state_dict())
    fresh.one_batch()
    assert caplog.text.count(SPENT_NOTHING) == 1


def test_a_file_knows_which_batches_were_drawn(tmp_path: Path) -> None:
    first, resumed = Run(), Run()
    batches, _ = first.train()
    first.engine.save_checkpoint(path=tmp_path / "run.pt", **first.parts)
    resumed.engine.load_checkpoint(path=tmp_path / "run.pt", **resumed.parts)
    later, grads = first.train()
    again, repeated = resumed.train()
    assert again == later != batches
    torch.testing.assert_close(repeated, grads)
    assert Run().train()[0] == batches  # what the seed says without the file


def test_a_file_that_does_not_know_leads_to_other_batches(tmp_path: Path) -> None:
    """As Opacus 1.6.0 writes it."""
    first, resumed = Run(), Run()
    batches, _ = first.train()
    first.engine.save_checkpoint(path=tmp_path / "run.pt", **first.parts)
    checkpoint = torch.load(tmp_path / "run.pt")
    del checkpoint["noise_generator"]["passes"]
    torch.save(checkpoint, tmp_path / "run.pt")
    with pytest.warns(UserWarning, match="does not say which batches its run has drawn"):
        resumed.engine.load_checkpoint(path=tmp_path / "run.pt", **resumed.parts)
    assert resumed.train()[0] != batches


def test_steps_that_are_not_counted_any_more_are_said_without_an_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    run.one_batch()
    run.engine.save_checkpoint(path=tmp_path / "run.pt", **run.parts)
    run.one_batch()
    with caplog.at_level(logging.WARNING):
        run.engine.load_checkpoint(
            path=tmp_path / "run.pt", module=nn.Sequential(nn.Linear(4, 3, bias=False))
        )
    assert "2 steps have been taken or loaded before, and the checkpoint counts 1" in caplog.text


@pytest.mark.parametrize("kind", ["hooks", "ghost"])
def test_a_clipping_norm_that_training_moves_goes_on(kind: str, tmp_path: Path) -> None:
    def adaptive() -> Run:
        if kind == "ghost":
            return Run("ghost", PrivacyEngineAdaptiveClipping, expected_batch_size=40)
        return Run("hooks", clipping="adaptive", unclipped_num_std=2.0, min_clipbound=0.1)

    run, resumed = adaptive(), adaptive()
    for _ in range(3):
        run.one_batch()
    moved = run.optimizer.max_grad_norm
    assert moved != 1.0
    run.engine.save_checkpoint(path=tmp_path / "run.pt", **run.parts)
    resumed.engine.load_checkpoint(path=tmp_path / "run.pt", **resumed.parts)
    assert resumed.optimizer.max_grad_norm == moved
    assert resumed.module.max_grad_norm == moved if kind == "ghost" else True


@pytest.mark.parametrize("passes_without_steps", [0, 3])
def test_a_history_that_is_loaded_alone_starts_no_sampling_again(passes_without_steps: int) -> None:
    first, resumed = Run(), Run()
    for _ in range(passes_without_steps):
        next(iter(first.loader))
    before = first.train()[0] + first.train()[0]
    resumed.module.load_state_dict(first.module.state_dict())
    resumed.engine.accountant.load_state_dict(first.engine.accountant.state_dict())
    after = [batch for _ in range(8) for batch in resumed.train()[0]]
    assert len(before) == 8 and len(after) == 32
    passes = {str(batches[i : i + 4]) for batches in (before, after) for i in range(0, 8, 4)}
    assert len(passes) == 4
    assert not {str(b) for b in before if len(b) > 2} & {str(b) for b in after if len(b) > 2}
    again = Run()  # and it can be repeated
    again.engine.accountant.load_state_dict(first.engine.accountant.state_dict())
    assert again.train()[0] == after[:4]
