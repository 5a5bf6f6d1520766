"""DPSFTTrainer and DPDPOTrainer: exact, clipped by example and by pair."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.integrations import oracle
from tests.integrations.test_trainer import FIXED, HUGE, check_steps, differ
from tests.integrations.tiny import VOCABULARY, arguments, llama, weights

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from opacus.integrations.transformers import DPArguments, DPDPOTrainer, DPSFTTrainer  # noqa: E402
from opacus.integrations.transformers.batches import LogicalBatch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours


def tokenizer() -> Any:
    """Words w1, w2, ... with a beginning, an end and padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="w2"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


def words(count: int, draw: torch.Generator) -> str:
    return " ".join(f"w{int(i)}" for i in torch.randint(3, VOCABULARY, (count,), generator=draw))


def texts(count: int = 12, lengths: tuple[int, ...] = (5,)) -> Any:
    draw = torch.Generator().manual_seed(3)
    return datasets.Dataset.from_list(
        [{"text": words(lengths[i % len(lengths)], draw)} for i in range(count)]
    )


def completions(count: int = 12) -> Any:
    draw = torch.Generator().manual_seed(4)
    return datasets.Dataset.from_list(
        [
            {"prompt": words(2 + i % 3, draw), "completion": " " + words(1 + i % 4, draw)}
            for i in range(count)
        ]
    )


def preferences(count: int = 12) -> Any:
    draw = torch.Generator().manual_seed(5)
    return datasets.Dataset.from_list(
        [
            {
                "prompt": words(2 + i % 3, draw),
                "chosen": " " + words(1 + i % 4, draw),
                "rejected": " " + words(3, draw),
            }
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


def watched(cls: Any) -> Any:
    class Watched(cls):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
            self.__dict__.setdefault("seen", []).append(
                (copy.deepcopy(inputs), weights(self.model))
            )
            return super().training_step(model, inputs, *args)

    return Watched


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


def pair_loss(kind: str, reference: Any, beta: float = 0.1) -> Any:
    """The published losses of one pair, from log-probabilities of unpadded answers."""

    def logp(model: Any, ids: Tensor, mask: Tensor, attention: Tensor) -> tuple[Tensor, int]:
        length = int(attention.sum())
        ids, mask = ids[None, :length], mask[:length]
        logits = model(input_ids=ids).logits[0, :-1]
        own = F.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        return (own * mask[1:]).sum(), int(mask.sum())

    def loss(model: Any, row: dict[str, Tensor]) -> Tensor:
        scores, sizes = [], []
        for i in range(2):
            each = [row[k][i] for k in ("input_ids", "completion_mask", "attention_mask")]
            value, size = logp(model, *each)
            with torch.no_grad():
                base, _ = logp(reference, *each)
            scores.append(value - base)
            sizes.append(size)
        margin = scores[0] - scores[1]
        if kind == "ipo":
            return (scores[0] / sizes[0] - scores[1] / sizes[1] - 1 / (2 * beta)) ** 2
        if kind == "hinge":
            return torch.relu(1 - beta * margin)
        return -F.logsigmoid(beta * margin)

    return loss


def pairs_of(batch: Any) -> list[dict[str, Tensor]]:
    rows = []
    for chunk, size in zip(batch.chunks, batch.sizes, strict=True):
        rows += [{k: v[[i, size + i]] for k, v in chunk.items()} for i in range(size)]
    return rows


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
