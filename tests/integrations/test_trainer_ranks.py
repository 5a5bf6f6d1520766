"""DPTrainer on two processes, replicated and sharded: against the oracle, saved, resumed."""

from __future__ import annotations

import copy
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import DistributedTestError, run_distributed
from tests.integrations import oracle
from tests.integrations.on_ranks import WAYS, become_rank, whole, with_plugin
from tests.integrations.tiny import Texts, arguments, collate, llama, weights

pytest.importorskip("transformers")

CLIPPING_NORM, STEPS, LR = 0.3, 5, 0.5


def trainer_of(folder: Any, way: str, model: Any = None, **changes: Any) -> Any:
    from opacus.integrations.transformers import DPArguments, DPTrainer

    class Watched(DPTrainer):
        seen: list[Any]

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if way in ("fsdp", "offloaded"):
                with_plugin(self)

        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            self.seen.append((copy.deepcopy(inputs), whole(self.model)))
            return super().training_step(model, inputs, *args)

    settings = changes.pop("privacy", {"noise_multiplier": 0.0, "clipping_norm": CLIPPING_NORM})
    evaluation = {"eval_dataset": changes.pop("eval_dataset")} if "eval_dataset" in changes else {}
    trainer = Watched(
        llama() if model is None else model,
        arguments(folder, ddp_backend="gloo", **WAYS[way],
                  **{"max_steps": STEPS, "per_device_train_batch_size": 2, **changes}),
        train_dataset=Texts(14, (3, 9, 5, 2)), data_collator=collate,
        privacy=DPArguments(**settings), **evaluation,
    )  # fmt: skip
    trainer.seen = []
    return trainer


def of_way(way: str) -> Any:
    """Table and head share their weight where FSDP2 shards it, as in small language models."""
    model = llama()
    if way == "fsdp":
        model.config.tie_word_embeddings = True
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def against_the_oracle(rank: int, world_size: int, folder: str, way: str) -> dict[str, Any]:
    become_rank(rank, world_size)
    if way == "wrapped":  # by the user, beforehand
        from opacus.utils.fsdp_utils import FSDP2Wrapper

        trainer = trainer_of(folder, way, FSDP2Wrapper(llama()))
    else:
        trainer = trainer_of(folder, way, of_way(way))
    trainer.train()
    after = [w for _, w in trainer.seen[1:]] + [whole(trainer.model)]
    model, norms, texts, worst = of_way(way), [], [], 0.0
    for (batch, before), then in zip(trainer.seen, after, strict=True):
        model.load_state_dict(before, strict=way != "fsdp")
        rows: list[Any] = [None] * world_size
        dist.all_gather_object(rows, oracle.rows_of(batch))
        every = [row for of_rank in rows for row in of_rank]
        want, own = oracle.clipped_sum(model, every, CLIPPING_NORM)
        norms += own
        texts += [row["input_ids"].flatten().tolist() for row in rows[rank]]
        for name, total in want.items():
            moved = (before[name] - then[name]).double() / LR * trainer.expected_batch_size
            worst = max(worst, float((moved - total).abs().max()))
    trainer.save_model(folder)
    return {
        "mode": trainer._mode, "worst": worst, "norms": norms, "texts": texts,
        "counted": len(trainer.privacy_engine.accountant), "end": whole(trainer.model),
        "expected": trainer.expected_batch_size,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp", "offloaded", "wrapped"])
def test_clipped_sums_on_two_ranks(tmp_path: Path, way: str) -> None:
    import transformers

    first, second = run_distributed(against_the_oracle, 2, str(tmp_path), way)
    assert first["mode"] == ("ghost_bk" if way == "ddp" else "ghost_fsdp_bk")
    assert first["expected"] == 4 and first["counted"] == second["counted"] == STEPS
    assert max(first["worst"], second["worst"]) < 2e-5
    assert min(first["norms"]) > CLIPPING_NORM  # all are clipped
    assert not any(text in second["texts"] for text in first["texts"])  # each draws its own
    for name, value in first["end"].items():
        torch.testing.assert_close(value, second["end"][name], rtol=0, atol=0)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(saved).__name__ == "LlamaForCausalLM"
    for name, value in weights(saved).items():
        torch.testing.assert_close(value, first["end"][name], rtol=0, atol=0)
    assert "Differential privacy" in (tmp_path / "README.md").read_text()


def resume(rank: int, world_size: int, folder: str, way: str, adapters: bool) -> dict[str, Any]:
    become_rank(rank, world_size)

    def made() -> Any:
        if not adapters:
            return llama()
        import peft

        torch.manual_seed(0)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(llama(), lora)

    more = {
        "privacy": {"target_epsilon": 3.0, "delta": 1e-3}, "optim": "adamw_torch",
        "learning_rate": 0.01, "save_strategy": "steps", "save_steps": 2, "max_steps": 4,
        "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": Texts(6, (4,)),
        "load_best_model_at_end": True, "train_sampling_strategy": "random",
    }  # fmt: skip
    first = trainer_of(folder, way, made(), **more)
    first.evaluate()  # which leaves a sharded model's root unsharded
    first.train()
    best = min((h["eval_loss"], h["step"]) for h in first.state.log_history if "eval_loss" in h)
    again = trainer_of(folder, way, made(), **more)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return {
        "epsilon": (first.get_epsilon(), again.get_epsilon()), "best": best,
        "end": whole(first.model), "kept": first.seen[2][1],
        "initial": first.seen[0][1], "started": again.seen[0][1], "steps": len(again.seen),
        "evaluated": first.evaluate()["eval_loss"],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_resumed_on_two_ranks(tmp_path: Path, way: str, adapters: bool) -> None:
    first, second = run_distributed(resume, 2, str(tmp_path), way, adapters)
    for out in (first, second):
        assert out["epsilon"][0] == pytest.approx(out["epsilon"][1]) and out["epsilon"][0] > 2.8
        assert out["steps"] == 2  # of 4, from checkpoint-2
        assert out["evaluated"] == pytest.approx(out["best"][0], abs=1e-5)
    for name, value in first["end"].items():
        torch.testing.assert_close(value, second["end"][name], rtol=0, atol=0)
    for name, value in first["kept"].items():
        torch.testing.assert_close(first["started"][name], value, rtol=0, atol=0)
    assert any(not torch.equal(first["initial"][n], w) for n, w in first["started"].items())
    assert (tmp_path / "checkpoint-4" / "privacy.pt").is_file()


# An order of the data without chance, and no noise: a resumed run ends where a whole one does.
EXACT = {"noise_multiplier": 0.0, "clipping_norm": CLIPPING_NORM, "poisson_sampling": False}
NOISY = {"target_epsilon": 3.0, "delta": 1e-3}


def killed_run(folder: str, kind: str, **changes: Any) -> Any:
    privacy = {**(EXACT if kind == "exact" else NOISY), "expected_batch_size": 4}
    trainer = trainer_of(
        f"{folder}/{kind}", "fsdp", privacy=privacy, optim="adamw_torch", learning_rate=0.01,
        per_device_train_batch_size=4, save_strategy="steps", save_steps=2, max_steps=4,
        train_sampling_strategy="sequential" if kind == "exact" else "random", **changes,
    )  # fmt: skip
    trainer.keys = []
    step = trainer.training_step

    def noted(*args: Any) -> Any:
        loss = step(*args)
        trainer.keys.append(trainer.optimizer._parallelism.key.key.identifier)
        return loss

    trainer.training_step = noted
    return trainer


def run_and_die(rank: int, world_size: int, folder: str) -> None:
    """A whole run; then rank 1 is killed in step 4, after the checkpoint of step 2."""
    become_rank(rank, world_size)
    exact = killed_run(folder, "exact")
    exact.train()
    end = whole(exact.model)
    trainer = killed_run(folder, "noisy")
    step = trainer.training_step

    def dying(*args: Any) -> Any:
        if trainer.state.global_step == 3:
            kept = trainer.seen[2][1], trainer.keys, end
            if rank == 0:
                torch.save(kept, f"{folder}/before")
            dist.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return step(*args)

    trainer.training_step = dying
    trainer.train()


def go_on(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    become_rank(rank, world_size)
    found: dict[str, Any] = {}
    for kind in ("exact", "noisy"):
        trainer = killed_run(folder, kind)
        trainer.train(resume_from_checkpoint=f"{folder}/{kind}/checkpoint-2")
        found[kind] = {
            "epsilon": trainer.get_epsilon() if kind == "noisy" else 0.0, "keys": trainer.keys,
            "history": trainer.privacy_engine.accountant.history, "end": whole(trainer.model),
            "start": trainer.seen[0][1],
            "losses": [h["loss"] for h in trainer.state.log_history if "loss" in h],
        }  # fmt: skip
    return found


@pytest.mark.slow
def test_a_rank_is_killed_and_the_run_goes_on_on_four_and_on_one(tmp_path: Path) -> None:
    with pytest.raises(DistributedTestError, match="rank 1 died with exit code -9") as failure:
        run_distributed(run_and_die, 2, str(tmp_path))
    start, keys, end = torch.load(tmp_path / "before", weights_only=False)
    # Rank 0 does not wait for it: else it would have been ended, and have raised nothing.
    assert "rank 0 raised" in str(failure.value) and "peer" in str(failure.value)
    losses = {}
    for world_size in (4, 1):
        folder = tmp_path / f"on-{world_size}"
        for kind in ("exact", "noisy"):
            shutil.copytree(tmp_path / kind / "checkpoint-2", folder / kind / "checkpoint-2")
        ranks = run_distributed(go_on, world_size, str(folder))
        losses[world_size] = ranks[0]["exact"]["losses"]
        for of_rank in ranks:
            noisy, exact = of_rank["noisy"], of_rank["exact"]
            assert 2.8 < noisy["epsilon"] <= 3.0
            assert [(rate, steps) for _, rate, steps in noisy["history"]] == [(4 / 14, 4)]
            assert len(noisy["keys"]) == 2 and not set(noisy["keys"]) & set(keys)
            for name, value in noisy["start"].items():
                torch.testing.assert_close(value, start[name], rtol=0, atol=0)
                torch.testing.assert_close(noisy["end"][name], ranks[0]["noisy"]["end"][name])
            for name, value in exact["end"].items():
                torch.testing.assert_close(value, end[name], rtol=1e-4, atol=1e-6)
    assert losses[4] == pytest.approx(losses[1], abs=1e-3)  # also where ranks have no examples


def noise_alone(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    become_rank(rank, world_size)
    from opacus.integrations.transformers.batches import LogicalBatch

    moved = {}
    for way in ("ddp", "fsdp"):
        privacy = {"noise_multiplier": 2.0, "clipping_norm": CLIPPING_NORM}
        trainer = trainer_of(folder, way, privacy=privacy, max_steps=2)
        step = trainer.training_step
        trainer.training_step = lambda m, b, *a, s=step: s(m, LogicalBatch([], []), *a)
        trainer.train()
        before, after = weights(llama()), whole(trainer.model)
        moved[way] = torch.cat([(after[n] - before[n]).flatten() for n in before])
    return moved


@pytest.mark.slow
def test_noise_is_that_of_one_process(tmp_path: Path) -> None:
    first, second = run_distributed(noise_alone, 2, str(tmp_path))
    std = LR * 2.0 * CLIPPING_NORM / 4 * 2**0.5  # of two steps, over the batch of both ranks
    for way in ("ddp", "fsdp"):
        torch.testing.assert_close(first[way], second[way], rtol=0, atol=0)
        assert float(first[way].std()) == pytest.approx(std, rel=0.08), way  # 5168 numbers
