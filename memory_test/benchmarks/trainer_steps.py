"""Steps of `DPTrainer` beside those of the plain `Trainer`, in turns: LoRA of a Llama-shaped model.

    python memory_test/benchmarks/trainer_steps.py --model llama3-8b --cells 4x2048+ac,4x512 \
        --output result.json

A cell is BATCHxTOKENS; with ``+ac`` activations are checkpointed, with ``+fsdp`` FSDP2 shards the
model (start it with torchrun). Both trainers see the same batches in the same order, because
Poisson batches vary in size: ``poisson_sampling=False``, noise multiplier 1. Weights are random.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from memory_test.common.models import SHAPES
from memory_test.common.schema import head, versions
from memory_test.common.timing import wait_for
from opacus.integrations.transformers import DPArguments, DPTrainer

WARM, ROUNDS = 3, 2


class Clock(TrainerCallback):
    """Milliseconds of each step, the device's work included."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start a step."""
        self._start = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """End it."""
        self.ms.append((now() - self._start) * 1e3)


def at_once(expected: int, private: bool) -> int:
    """Texts in memory: Poisson draws vary, and with this room nearly each is one batch."""
    return expected + 3 * math.isqrt(expected) if private else expected


def now() -> float:
    """Seconds, when the device is done."""
    wait_for("cuda" if torch.cuda.is_available() else "cpu")
    return time.perf_counter()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the cells and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama3-8b", help="a Llama shape of common/models.py")
    parser.add_argument("--cells", default="4x2048+ac,4x2048,4x512")
    parser.add_argument("--lora", type=int, default=16, metavar="RANK")
    parser.add_argument("--steps", type=int, default=6, help=f"timed, after {WARM}; in each round")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for cell in args.cells.split(","):
        rows += measure(args, cell)
        if args.output:
            card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
            what = (
                f"steps of DPTrainer and Trainer in turns, LoRA rank {args.lora}, random weights, "
                f"bf16, AdamW, noise multiplier 1; ms: median of {ROUNDS} rounds of {args.steps}"
            )
            found = {**head(what, card, versions()), "command": sys.argv, "trainers": rows}
            args.output.write_text(json.dumps(found, indent=1) + "\n")


def measure(args: argparse.Namespace, cell: str) -> list[dict[str, Any]]:
    """Rows of one cell: the plain trainer, then the private one."""
    size, *options = cell.split("+")
    batch, tokens = map(int, size.split("x"))
    rows = [
        {
            "trainer": name, "model": args.model, "lora_rank": args.lora, "batch": batch,
            "tokens": tokens, "checkpointing": "ac" in options, "fsdp": "fsdp" in options,
            "times_ms": [], "peak_gb": 0.0,
        }
        for name in ("Trainer", "DPTrainer")
    ]  # fmt: skip
    for turn in range(ROUNDS):
        for row in rows if turn % 2 == 0 else reversed(rows):
            if "error" not in row:
                one_round(args, row)
    for row in rows:
        if "error" not in row:
            row["ms"] = statistics.median(row["times_ms"])
            row["tokens_per_second"] = batch * tokens / row["ms"] * 1e3
    plain = rows[0]
    for row in rows:
        if "ms" in row and "ms" in plain:
            row["ratio"] = row["ms"] / plain["ms"]
            row["memory_ratio"] = row["peak_gb"] / plain["peak_gb"] if plain["peak_gb"] else 1.0
        print({k: v for k, v in row.items() if k != "times_ms"}, flush=True)
    return rows


def one_round(args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Train a few steps; a failure is a result too."""
    clock = Clock()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = trainer(args, row, clock, folder)
            made.train()
        row["mode"] = getattr(made, "_mode", "")
        row["times_ms"] += clock.ms[WARM:]
        if torch.cuda.is_available():
            row["peak_gb"] = max(row["peak_gb"], torch.cuda.max_memory_allocated() / 1e9)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:600]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def trainer(args: argparse.Namespace, row: dict[str, Any], clock: Clock, folder: str) -> Any:
    """The trainer of a row, on a fresh model."""
    steps = WARM + args.steps
    settings = quiet(
        folder,
        row["fsdp"],
        per_device_train_batch_size=row["batch"],
        max_steps=steps,
        learning_rate=1e-4,
        gradient_checkpointing=row["checkpointing"],
    )
    model = new_model(args.model, args.lora)
    draw = torch.Generator().manual_seed(1)
    count = row["batch"] * steps * max(1, settings.world_size)
    ids = torch.randint(model.config.vocab_size, (count, row["tokens"]), generator=draw)
    data = [{"input_ids": one, "labels": one} for one in ids]
    more: dict[str, Any] = {}
    if row["trainer"] == "DPTrainer":
        more["privacy"] = DPArguments(
            noise_multiplier=1.0,
            delta=1e-6,
            poisson_sampling=False,
            grad_sample_mode=args.mode,
        )
    made = (DPTrainer if more else Trainer)(
        model=model,
        args=settings,
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=[clock],
        **more,
    )
    return made


def quiet(folder: str, sharded: bool, **more: Any) -> TrainingArguments:
    """Arguments of a run that saves and reports nothing, in bf16 on a GPU."""
    return TrainingArguments(
        folder,
        bf16=torch.cuda.is_available(),
        fsdp=sharded,
        fsdp_config={"version": 2} if sharded else None,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        **more,
    )


def new_model(name: str, rank: int) -> Any:
    """A Llama of this shape with random bf16 weights, made where it is trained, and adapters."""
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
        try:
            model = LlamaForCausalLM(LlamaConfig(use_cache=False, **SHAPES[name].sizes))
        finally:
            torch.set_default_dtype(default)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, config)


if __name__ == "__main__":
    main()
