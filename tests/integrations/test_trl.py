"""DPSFTTrainer and DPDPOTrainer: exact, clipped by example and by pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import oracle
from tests.integrations.steps import FIXED, HUGE, check_steps, differ
from tests.integrations.texts import (
    datasets,
    pair_loss,
    pairs_of,
    preferences,
    texts,
    tokenizer,
    words,
)
from tests.integrations.tiny import arguments, llama, watched, weights

trl = pytest.importorskip("trl")

from opacus.integrations.transformers import DPArguments, DPDPOTrainer, DPSFTTrainer  # noqa: E402
from opacus.integrations.transformers.batches import LogicalBatch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours


def completions(count: int = 12) -> Any:
    draw = torch.Generator().manual_seed(4)
    return datasets.Dataset.from_list(
        [
            {"prompt": words(2 + i % 3, draw), "completion": " " + words(1 + i % 4, draw)}
            for i in range(count)
        ]
    )


def run(cls: Any, folder: Path, data: Any, kind: str, **changes: Any) -> Any:
    more = {"gradient_checkpointing": False, "max_grad_norm": 0, **changes}
    init = {
        k: more.pop(k) for k in ("privacy", "ref_model", "peft_config", "eval_dataset") if k in more
    }
    trainer = cls(
        model=llama(), args=arguments(folder, kind, **more), train_dataset=data,
        processing_class=tokenizer(), **init,
    )  # fmt: skip
    trainer.start = weights(trainer.model)
    trainer.train()
    return trainer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sft_without_noise_is_the_plain_one(tmp_path: Path, checkpointing: bool) -> None:
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    more = {**FIXED, "gradient_checkpointing": checkpointing}
    plain = run(trl.SFTTrainer, tmp_path, texts(), "SFTConfig", **more)
    ours = run(
        DPSFTTrainer, tmp_path, texts(), "SFTConfig", privacy=DPArguments(**HUGE), **more, **split,
        eval_dataset=texts(5), eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    assert differ(weights(plain.model), plain.start) > 1e-2
    assert differ(weights(plain.model), weights(ours.model)) < 1e-6
    assert sum("eval_loss" in h for h in ours.state.log_history) == 3


@pytest.mark.parametrize(
    "data", [texts(14, (3, 8, 5)), completions(14)], ids=["text", "completion"]
)
def test_sft_clipped_sums(tmp_path: Path, data: Any) -> None:
    privacy = DPArguments(noise_multiplier=0.0, clipping_norm=0.3)
    trainer = run(
        watched(DPSFTTrainer), tmp_path, data, "SFTConfig", privacy=privacy, max_steps=4,
        per_device_train_batch_size=2, gradient_accumulation_steps=2,
    )  # fmt: skip
    assert min(check_steps(trainer, llama(), 0.3)) > 0.3


@pytest.mark.parametrize("changes", [{"packing": True}, {"padding_free": True}])
def test_sft_refusals(tmp_path: Path, changes: dict[str, Any]) -> None:
    name = next(iter(changes))
    with pytest.raises(ValueError, match=f"{name}=True cannot be private"):
        run(DPSFTTrainer, tmp_path, texts(), "SFTConfig", privacy=DPArguments(noise_multiplier=1.0),
            **changes)  # fmt: skip


def test_another_trainer_of_trl_is_refused(tmp_path: Path) -> None:
    from opacus.integrations.transformers import DPTrainerMixin

    class Rewards(DPTrainerMixin, trl.RewardTrainer):
        pass

    with pytest.raises(TypeError, match="per_sample_loss"):
        Rewards(llama(), privacy=DPArguments(noise_multiplier=1.0))


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_dpo_clips_pairs(tmp_path: Path, kind: str, mode: str) -> None:
    norm = 0.02 if kind != "ipo" else 1.0
    privacy = DPArguments(noise_multiplier=0.0, clipping_norm=norm, grad_sample_mode=mode)
    trainer = run(
        watched(DPDPOTrainer), tmp_path, preferences(14), "DPOConfig", privacy=privacy, max_steps=4,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, loss_type=[kind],
        ref_model=llama(), learning_rate=0.5 if kind != "ipo" else 0.05,
    )  # fmt: skip
    every, model = [], llama()
    loss = pair_loss(kind, llama().double())
    after = [w for _, w in trainer.seen[1:]] + [weights(trainer.model)]
    lr = trainer.args.learning_rate
    for (batch, before), then in zip(trainer.seen, after, strict=True):
        model.load_state_dict(before)
        want, norms = oracle.clipped_sum(model, pairs_of(batch), norm, loss)
        every += norms
        for name, total in want.items():
            moved = (before[name] - then[name]).double() / lr * trainer.expected_batch_size
            torch.testing.assert_close(moved, total, rtol=1e-3, atol=1e-5)
    assert min(every) > norm


def test_dpo_without_noise_is_the_plain_one(tmp_path: Path) -> None:
    more = {**FIXED, "ref_model": None}
    plain = run(
        trl.DPOTrainer, tmp_path, preferences(), "DPOConfig", **{**more, "ref_model": llama()}
    )
    ours = run(
        DPDPOTrainer, tmp_path, preferences(), "DPOConfig", privacy=DPArguments(**HUGE),
        **{**more, "ref_model": llama()}, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, eval_dataset=preferences(5), eval_strategy="steps",
        eval_steps=1,
    )  # fmt: skip
    assert differ(weights(plain.model), plain.start) > 1e-4
    assert differ(weights(plain.model), weights(ours.model)) < 1e-6
    assert sum("eval_loss" in h for h in ours.state.log_history) == 3


def test_dpo_with_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = run(
        DPDPOTrainer, tmp_path, preferences(), "DPOConfig", max_steps=2,
        privacy=DPArguments(target_epsilon=8.0),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    assert 7 < trainer.get_epsilon() <= 8
    moved = {n for n, w in weights(trainer.model).items() if not torch.equal(w, trainer.start[n])}
    assert moved and all("lora_" in n for n in moved)


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_dpo_without_pairs_in_a_step(tmp_path: Path, mode: str) -> None:
    class Empty(DPDPOTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
            return super().training_step(model, LogicalBatch([], []), *args)

    privacy = DPArguments(noise_multiplier=0.0, grad_sample_mode=mode)
    trainer = run(Empty, tmp_path, preferences(), "DPOConfig", privacy=privacy, ref_model=llama())
    assert differ(weights(trainer.model), trainer.start) == 0.0
    assert len(trainer.privacy_engine.accountant) == 2


def test_losses_of_dpo_that_join_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"loss_type=\['aot'\] is not supported"):
        run(DPDPOTrainer, tmp_path, preferences(), "DPOConfig", loss_type=["aot"],
            privacy=DPArguments(noise_multiplier=1.0), ref_model=llama())  # fmt: skip
    with pytest.raises(ValueError, match="torch_compile=True is not supported with pairs"):
        run(DPDPOTrainer, tmp_path, preferences(), "DPOConfig", torch_compile=True,
            privacy=DPArguments(noise_multiplier=1.0), ref_model=llama())  # fmt: skip
