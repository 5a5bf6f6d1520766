"""DPSFTTrainer and DPDPOTrainer on two processes, replicated and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import preload, run_distributed
from tests.integrations import oracle, texts
from tests.integrations.on_ranks import WAYS, become_rank, whole
from tests.integrations.tiny import arguments, llama

pytest.importorskip("trl")
preload("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")

LR, STEPS = 0.5, 4


def against_the_oracle(rank: int, world_size: int, folder: str, way: str, kind: str) -> Any:
    become_rank(rank, world_size)
    from opacus.integrations.transformers import DPArguments, DPDPOTrainer, DPSFTTrainer

    dpo = kind == "DPOConfig"
    norm = 0.02 if dpo else 0.3

    class Watched(DPDPOTrainer if dpo else DPSFTTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            seen.append((inputs, whole(self.model)))
            return super().training_step(model, inputs, *args)

    seen: list[Any] = []
    data = texts.preferences(14) if dpo else texts.texts(14, (3, 8, 5))
    trainer = Watched(
        model=llama(),
        args=arguments(folder, kind, ddp_backend="gloo", max_steps=STEPS, eval_strategy="steps",
                       eval_steps=STEPS, per_device_train_batch_size=2, gradient_checkpointing=False,
                       **WAYS[way]),
        train_dataset=data, eval_dataset=data.select(range(6)),
        processing_class=texts.tokenizer(), **({"ref_model": llama()} if dpo else {}),
        privacy=DPArguments(noise_multiplier=0.0, clipping_norm=norm),
    )  # fmt: skip
    trainer.train()
    loss = texts.pair_loss("sigmoid", llama().double()) if dpo else oracle.next_tokens
    examples = texts.pairs_of if dpo else oracle.rows_of
    after = [w for _, w in seen[1:]] + [whole(trainer.model)]
    model, norms, worst = llama(), [], 0.0
    for (batch, before), then in zip(seen, after, strict=True):
        model.load_state_dict(before)
        rows: list[Any] = [None] * world_size
        dist.all_gather_object(rows, examples(batch))
        every = [row for of_rank in rows for row in of_rank]
        want, own = oracle.clipped_sum(model, every, norm, loss)
        norms += own
        for name, total in want.items():
            moved = (before[name] - then[name]).double() / LR * trainer.expected_batch_size
            worst = max(worst, float((moved - total).abs().max()))
    evaluated = [h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h]
    return {"worst": worst, "norms": norms, "least": norm, "evaluated": evaluated}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SFTConfig", "DPOConfig"])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_clipped_sums_on_two_ranks(tmp_path: Path, way: str, kind: str) -> None:
    for out in run_distributed(against_the_oracle, 2, str(tmp_path), way, kind):
        assert out["worst"] < (1e-5 if kind == "DPOConfig" else 3e-5)
        assert out["norms"] and min(out["norms"]) > out["least"]
        assert len(out["evaluated"]) == 1 and torch.isfinite(torch.tensor(out["evaluated"])).all()
