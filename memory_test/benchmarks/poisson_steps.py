"""All steps of `DPTrainer` on Poisson batches, from the first, beside those of the plain `Trainer`.

    torchrun --nproc_per_node=1 memory_test/benchmarks/poisson_steps.py --fsdp --output result.json

One process, texts of 20 to 64 random tokens. A private batch has another size each step, so the
first steps take new memory, and with compiled blocks they compile. Plain batches always have
``--batch`` texts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from memory_test.benchmarks.step_results import ratios, spread
from memory_test.benchmarks.trainer_steps import Clock, at_once, quiet
from memory_test.common.memory import MB, peak_mb, release, reset_peak
from memory_test.common.models import SHAPES
from memory_test.common.results import write_json
from memory_test.common.schema import head, versions
from opacus.integrations.transformers import DPArguments, DPTrainer

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SHORTEST, LONGEST = 20, 64


def texts(count: int, vocab: int) -> list[dict[str, Tensor]]:
    """Random texts, always the same."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count,), generator=draw).tolist()
    return [{"input_ids": torch.randint(1, vocab, (n,), generator=draw)} for n in lengths]


def padded(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch, each tensor ``[B, T]``; padding is masked and has no label."""
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
    }


def run(args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Train; the row then has the times of all steps, and the spread of the later half."""
    private, shape = row["trainer"] == "DPTrainer", SHAPES[args.model]
    torch.manual_seed(0)
    config = LlamaConfig(use_cache=False, tie_word_embeddings=shape.tied, **shape.sizes)
    more: dict[str, Any] = {}
    if private:
        more["privacy"] = DPArguments(
            noise_multiplier=1.0, delta=1e-5, expected_batch_size=args.batch
        )
    release(DEVICE)
    reset_peak(DEVICE)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = quiet(
            folder,
            args.fsdp,
            per_device_train_batch_size=at_once(args.batch, private),
            max_steps=args.steps,
            learning_rate=3e-5,
            torch_compile=row["compiled"],
        )
        trainer = (DPTrainer if private else Trainer)(
            model=LlamaForCausalLM(config),
            args=settings,
            train_dataset=texts(args.texts, config.vocab_size),
            data_collator=padded,
            callbacks=[clock],
            **more,
        )
        trainer.train()
    row["mode"] = getattr(trainer, "_mode", "no_dp")
    row["times_ms"] = [round(ms, 1) for ms in clock.ms]
    row["ms"] = spread(clock.ms[len(clock.ms) // 2 :])
    row["peak_gb"] = round(peak_mb(DEVICE) * MB / 1e9, 3)


def measure(args: argparse.Namespace, compiled: bool) -> list[dict[str, Any]]:
    """The plain trainer's row, then the private one's."""
    rows = [
        {
            "trainer": name, "model": args.model, "batch": args.batch, "tokens": LONGEST,
            "checkpointing": False, "compiled": compiled, "fsdp": args.fsdp,
        }
        for name in ("Trainer", "DPTrainer")
    ]  # fmt: skip
    for row in rows:
        run(args, row)
        row |= ratios(row, rows[0]["ms"], rows[0]["peak_gb"], in_turns=False)
        print({key: value for key, value in row.items() if key != "times_ms"}, flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m" if CUDA else "tiny-llama", help="of common/models.py")
    add("--batch", type=int, default=512 if CUDA else 8, help="expected texts a step")
    add("--texts", type=int, default=9000 if CUDA else 200, help="in the data set")
    add("--steps", type=int, default=40)
    add("--blocks", default="eager,compiled")
    add("--fsdp", action="store_true", help="shard by FSDP2; start it with torchrun")
    add("--output", type=Path)
    args = parser.parse_args(argv)
    rows = [row for how in args.blocks.split(",") for row in measure(args, how == "compiled")]
    if args.output:
        what = (
            f"all steps of DPTrainer on Poisson batches and of Trainer, texts of {SHORTEST} to "
            f"{LONGEST} tokens, random weights, AdamW; ms and ratios: of the later half"
        )
        card = torch.cuda.get_device_name() if CUDA else ""
        write_json(args.output, {**head(what, card, versions()), "trainers": rows})


if __name__ == "__main__":
    main()
