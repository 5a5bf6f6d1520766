"""Runs that are killed and resumed, best models, adapters."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.steps import HUGE, differ
from tests.integrations.tiny import Texts, arguments, collate, llama, weights

transformers = pytest.importorskip("transformers")

from opacus.integrations.transformers import DPArguments, DPTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
BUDGET = DPArguments(target_epsilon=3.0, delta=1e-3)


def trainer_of(
    folder: Path, model: Any = None, privacy: DPArguments = BUDGET, **changes: Any
) -> Any:
    evaluation = {"eval_dataset": changes.pop("eval_dataset")} if "eval_dataset" in changes else {}
    return DPTrainer(
        llama() if model is None else model, arguments(folder, **{**SAVING, **changes}),
        train_dataset=Texts(40), data_collator=collate, privacy=privacy, **evaluation,
    )  # fmt: skip


class Killed(Exception):
    pass


class KillAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_killed_and_resumed(tmp_path: Path, optim: str, caplog: pytest.LogCaptureFixture) -> None:
    more = {"optim": optim, "lr_scheduler_type": "linear", "learning_rate": 0.01}
    whole = trainer_of(tmp_path / "whole", **more)
    whole.train()
    killed = trainer_of(tmp_path / "run", **more)
    killed.add_callback(KillAt(5))
    with pytest.raises(Killed):
        killed.train()
    resumed = trainer_of(tmp_path / "run", **more)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == len(resumed.privacy_engine.accountant) == 6
    assert (
        resumed.get_epsilon() == pytest.approx(whole.get_epsilon()) and resumed.get_epsilon() > 2.8
    )
    rates = [
        [h["learning_rate"] for h in t.state.log_history if "learning_rate" in h]
        for t in (whole, resumed)
    ]
    assert rates[0] == pytest.approx(rates[1])
    assert "has not been iterated" not in caplog.text  # the private loader is, when resuming too


def test_a_resumed_step_has_other_noise(tmp_path: Path) -> None:
    """From one checkpoint twice: with equal noise their difference would have none."""
    first = trainer_of(tmp_path)
    first.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    ends = []
    for _ in range(2):
        folder = shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-{len(ends)}")
        again = trainer_of(folder)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        ends.append(weights(again.model))
    assert differ(ends[0], ends[1]) > 1e-3
    assert differ(ends[0], weights(first.model)) > 1e-3


def test_nothing_in_a_checkpoint_is_secret(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    kept = []

    class Look(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            kept.append(trainer.optimizer._parallelism.key.key.secret)

    trainer.add_callback(Look())
    trainer.train()
    content = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert len(set(kept)) == 1 and kept[0] not in content


def test_a_checkpoint_without_an_accountant_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path, save_only_model=True).train()
    trainer = trainer_of(tmp_path)
    before = weights(trainer.model)
    with pytest.raises(ValueError, match=r"checkpoint-6 has no privacy\.pt"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="there is no such folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert differ(before, weights(trainer.model)) == 0.0  # nothing was loaded


def test_files_of_different_steps_are_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path).train()
    shutil.copy(tmp_path / "checkpoint-2" / "privacy.pt", tmp_path / "checkpoint-6")
    with pytest.raises(
        ValueError, match=r"privacy\.pt is of step 2, trainer_state\.json of step 6"
    ):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)


def test_more_steps_than_the_budget_allows_are_refused(tmp_path: Path) -> None:
    """The noise of the steps taken was made for 6 steps."""
    trainer_of(tmp_path).train()
    with pytest.raises(ValueError, match=r"6 steps have been taken in the checkpoint"):
        trainer_of(tmp_path, max_steps=12).train(resume_from_checkpoint=True)


def test_a_finished_run_takes_no_step_when_it_is_resumed(tmp_path: Path) -> None:
    """Also where it ended within an epoch: the noise was made for 6 steps of its 10."""
    finished = trainer_of(tmp_path)
    finished.train()
    resumed = trainer_of(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == len(resumed.privacy_engine.accountant) == 6
    assert resumed.get_epsilon() == finished.get_epsilon() <= BUDGET.target_epsilon
    assert differ(weights(finished.model), weights(resumed.model)) == 0.0


def test_another_batch_size_is_said(tmp_path: Path) -> None:
    """As it is on another number of processes, or with another share of a batch for each."""
    trainer_of(tmp_path).train()
    resumed = trainer_of(tmp_path, gradient_accumulation_steps=2)
    with pytest.warns(UserWarning) as said:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    texts = "\n".join(str(warning.message) for warning in said)
    for change in (
        "expected_batch_size = 4.0.* 8.0",
        "sample_rate = 0.1.* 0.2",
        "noise_multiplier",
    ):
        assert re.search(f"the checkpoint was saved with .*{change}", texts), texts
    assert [entry[1:] for entry in resumed.privacy_engine.accountant.history] == [
        (0.1, 2),
        (0.2, 4),
    ]


@pytest.mark.parametrize(
    "changes", [{"max_steps": 8}, {"per_device_train_batch_size": 2, "max_steps": 10}]
)
def test_a_resumed_run_of_other_steps_ends_within_its_budget(
    tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """More steps, or smaller batches as on fewer processes: the rest has more noise."""
    first = trainer_of(tmp_path)
    first.train()
    resumed = trainer_of(tmp_path, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "so that target_epsilon=3 is not exceeded" in caplog.text
    assert 2.95 < resumed.get_epsilon() <= 3.0
    (_, *before), (sigma, _, left) = resumed.privacy_engine.accountant.history
    assert before == [0.1, 2] and left == changes["max_steps"] - 2
    assert resumed.guarantee().sigma == sigma


def test_epsilon_is_of_the_steps_of_the_checkpoint(tmp_path: Path) -> None:
    """Also where as many steps were counted before, with other noise."""
    loud = DPArguments(noise_multiplier=3.0, delta=1e-3)
    trainer_of(tmp_path / "loud", privacy=loud).train()
    again = trainer_of(tmp_path / "quiet")
    again.train()
    before = again.get_epsilon()
    again.train(resume_from_checkpoint=str(tmp_path / "loud" / "checkpoint-6"))
    assert again.get_epsilon() == again.privacy_engine.get_epsilon(1e-3) < before


def test_arguments_are_saved_as_they_were_given(tmp_path: Path) -> None:
    """A run that is made of them draws as many examples a step."""
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=2, max_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    args = torch.load(tmp_path / "training_args.bin", weights_only=False)
    again = DPTrainer(llama(), args, train_dataset=Texts(40), data_collator=collate, privacy=BUDGET)
    assert again.expected_batch_size == trainer.expected_batch_size == 8
    assert args.logging_nan_inf_filter
    assert "gradient_accumulation_steps: 2" in (tmp_path / "README.md").read_text()


def test_the_best_model(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, privacy=DPArguments(**HUGE), eval_strategy="steps", eval_steps=2, max_steps=6,
        load_best_model_at_end=True, eval_dataset=Texts(5, (4, 7)), learning_rate=3.0,
    )  # fmt: skip
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    best = Path(state["best_model_checkpoint"])
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(best)
    assert differ(weights(reloaded), weights(trainer.model)) == 0.0
    losses = [h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), abs=1e-5)


def with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), lora)


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = trainer_of(tmp_path, with_adapters(), learning_rate=0.1)
    before = weights(trainer.model)
    trainer.train()
    moved = {n for n, w in weights(trainer.model).items() if not torch.equal(w, before[n])}
    assert moved == {n for n in before if "lora_" in n}
    trainer.save_model(str(tmp_path / "adapters"))
    card = (tmp_path / "adapters" / "README.md").read_text()
    assert "Differential privacy" in card and "library_name: peft" in card
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters")
    assert differ(weights(loaded), weights(trainer.model)) == 0.0
    again = trainer_of(tmp_path, with_adapters(), learning_rate=0.1)
    shutil.rmtree(tmp_path / "checkpoint-6")
    again.train(resume_from_checkpoint=True)
    assert again.get_epsilon() == pytest.approx(trainer.get_epsilon())
