"""The losses that DPTrainer reports are means over the steps that drew examples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.integrations.steps import FIXED, HUGE
from tests.integrations.tiny import Texts, arguments, collate, llama

transformers = pytest.importorskip("transformers")

from opacus.integrations.transformers import DPArguments, DPTrainer  # noqa: E402
from opacus.integrations.transformers.batches import LogicalBatch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours


class Drawn(DPTrainer):
    """Draws nothing in some steps, and keeps the losses of the others."""

    empty: frozenset[int] = frozenset()

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
        step = self.state.global_step
        if step in self.empty:
            return super().training_step(model, LogicalBatch([], []), *args)
        loss = super().training_step(model, inputs, *args)
        self.__dict__.setdefault("seen", {})[step] = float(loss)
        return loss


def run(folder: Path, empty: set[int], steps: int) -> tuple[Drawn, Any]:
    changes = {**FIXED, "max_steps": steps, "logging_steps": 2}
    trainer = Drawn(
        llama(), arguments(folder, **changes), train_dataset=Texts(), data_collator=collate,
        privacy=DPArguments(**HUGE),
    )  # fmt: skip
    trainer.empty = frozenset(empty)
    return trainer, trainer.train()


def test_empty_draws_are_left_out_of_mean_losses(tmp_path: Path) -> None:
    trainer, output = run(tmp_path, {0, 1, 3, 6}, steps=7)
    seen, history = trainer.seen, trainer.state.log_history
    assert sorted(seen) == [2, 4, 5] and min(seen.values()) > 1.0
    logged = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    # Steps 1 and 2 drew nothing: they have no loss.
    assert logged == pytest.approx({4: seen[2], 6: (seen[4] + seen[5]) / 2})
    assert [entry["step"] for entry in history if "epsilon" in entry] == [2, 4, 6, 7]
    mean = sum(seen.values()) / 3
    assert output.training_loss == output.metrics["train_loss"] == pytest.approx(mean)
    trainer.empty = frozenset()
    seen.clear()
    again = trainer.train()  # counts anew
    assert len(seen) == 7 and again.training_loss == pytest.approx(sum(seen.values()) / 7)


def test_a_run_without_examples_has_no_loss(tmp_path: Path) -> None:
    trainer, output = run(tmp_path, {0, 1}, steps=2)
    assert math.isnan(output.training_loss) and "train_loss" not in output.metrics
    assert not any("loss" in entry for entry in trainer.state.log_history)


def test_a_users_own_logs_stay_as_they_are(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, {0}, steps=3)
    trainer.log({"loss": 5.0})
    assert trainer.state.log_history[-1]["loss"] == 5.0
