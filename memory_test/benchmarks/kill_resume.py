"""SmolLM2 through `DPSFTTrainer` with FSDP2: a rank is killed, and the run goes on elsewhere.

    python memory_test/benchmarks/kill_resume.py --model FOLDER --cards 2 --resume-on 2 1 \
        --output result.json

FOLDER is what ``examples/smollm2.py`` writes. LoRA on film reviews: a run without privacy; a
private one, of which the last rank is killed (SIGKILL) in the middle of an epoch; and from its
checkpoint one on each number of cards. A row of each: steps, epsilon, losses (that of reviews
held out is logged before a checkpoint and after it was loaded), tokens a second, memory; of the
killed one how long the others lived on, and what was said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import torch

from memory_test.benchmarks.smollm2_reviews import (
    CUDA,
    WARM,
    adapters,
    option_parser,
    plain,
    reviews,
    settings,
)
from memory_test.benchmarks.trainer_steps import Clock, at_once
from memory_test.common.schema import head, versions

HELD_OUT, LONGEST, RANK = 256, 64, 16  # reviews, tokens, of the adapters


def main(argv: Sequence[str] | None = None) -> None:
    """All runs, or, with ``--kind``, one process of one of them."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--output", type=Path)
    add("--cards", type=int, default=2)
    add("--resume-on", type=int, nargs="*", default=[2, 1], metavar="CARDS")
    add("--steps", type=int, default=16)
    add("--save", type=int, default=5, help="a checkpoint every so many steps")
    add("--kill", type=int, default=8, help="after so many steps")
    add("--epsilon", type=float, default=8.0)
    add("--seconds", type=float, default=60.0, help="limit of a run")
    add("--kind", help="plain, killed or resumed")
    add("--folder", type=Path)
    args = parser.parse_args(argv)
    if args.kind:
        one_run(args)
    else:
        all_runs(args)


def all_runs(args: argparse.Namespace) -> None:
    """Start the runs one after another; the file is written after each."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        plan = [("plain", args.cards), ("killed", args.cards)]
        plan += [("resumed", cards) for cards in args.resume_on]
        for kind, cards in plan:
            folder = root / f"{kind}-{cards}"
            folder.mkdir()
            if kind == "resumed":
                saved = sorted((root / f"killed-{args.cards}").glob("checkpoint-*"))
                shutil.copytree(saved[-1], folder / saved[-1].name)
            rows.append({"run": kind, "cards": cards, **started(args, kind, cards, folder)})
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "losses"}), flush=True)
            if args.output:
                write(args, rows)


def started(args: argparse.Namespace, kind: str, cards: int, folder: Path) -> dict[str, Any]:
    """A run in processes of its own; what it found, and how it ended."""
    options = ("model", "steps", "save", "kill", "batch", "epsilon")
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={cards}",
        f"--master_port={29600 + os.getpid() % 300}", __file__, "--kind", kind, "--folder", folder,
        *(part for name in options for part in (f"--{name}", getattr(args, name))),
        *(("--rows", args.rows) if args.rows else ()),
    ]  # fmt: skip
    start = time.time()
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=args.seconds
        )
        code: int | None = done.returncode
        said = done.stderr
    except subprocess.TimeoutExpired as error:
        code, said = None, str(error.stderr)
    ended = time.time()
    found = json.loads((folder / "found.json").read_text()) if code == 0 else {}
    died = folder / "died"
    if died.is_file():
        found["seconds_until_all_ended"] = ended - float(died.read_text())
    telling = ("Signal", "Error", "error:", "exitcode", "root_cause")
    lines = [line.strip()[:200] for line in said.splitlines() if any(t in line for t in telling)]
    return {
        "trained": "lora", "trainer": "SFTTrainer" if kind == "plain" else "DPSFTTrainer",
        "epsilon": None, "tried": False, **found, "exit_status": code,
        "seconds": ended - start, "said": [] if code == 0 else lines[-6:],
    }  # fmt: skip


class Watch(Clock):
    """Times steps; kills the last rank after ``kill`` of them."""

    def __init__(self, kill: int | None, folder: Path) -> None:
        super().__init__()
        self.kill, self.folder = kill, folder

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A step starts; or its rank dies."""
        if state.global_step == self.kill and args.process_index == args.world_size - 1:
            (self.folder / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        super().on_step_begin(args, state, control, **more)


def one_run(args: argparse.Namespace) -> None:
    """One rank of a run; rank 0 writes ``found.json``."""
    from text_data import load_text
    from transformers import AutoTokenizer
    from trl import SFTTrainer

    from opacus.integrations.transformers import DPArguments, DPSFTTrainer

    private = args.kind != "plain"
    read = reviews(load_text(task="classify").train, args.rows)
    cut = len(read) - min(HELD_OUT, len(read) // 5)
    watch = Watch(args.kill if args.kind == "killed" else None, args.folder)
    more: dict[str, Any] = {}
    if private:
        more["privacy"] = DPArguments(
            target_epsilon=args.epsilon, delta=1e-5, expected_batch_size=args.batch
        )
    trainer = (DPSFTTrainer if private else SFTTrainer)(
        model=plain(args.model),
        args=config(args, private),
        train_dataset=read.select(range(cut)),
        eval_dataset=read.select(range(cut, len(read))),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="right"),
        peft_config=adapters(RANK),
        callbacks=[watch],
        **more,
    )
    trainer.train(resume_from_checkpoint=True if args.kind == "resumed" else None)
    if int(os.environ["RANK"]) == 0:
        found = summary(trainer, watch.ms, args.batch, private)
        (args.folder / "found.json").write_text(json.dumps(found))


def config(args: argparse.Namespace, private: bool) -> Any:
    """Those of the trainer."""
    from trl import SFTConfig

    share = args.batch // int(os.environ["WORLD_SIZE"])
    return SFTConfig(
        str(args.folder),
        per_device_train_batch_size=at_once(share, private),
        per_device_eval_batch_size=64,
        max_steps=args.steps,
        learning_rate=4e-3,
        max_length=LONGEST,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=args.save,
        eval_on_start=private,  # without privacy FSDP2 has not sharded the model by then
        save_strategy="steps",
        save_steps=args.save,
        fsdp=True,
        fsdp_config={"version": 2},
        **settings(),
        **({} if CUDA else {"ddp_backend": "gloo"}),
    )


def summary(trainer: Any, ms: Sequence[float], batch: int, private: bool) -> dict[str, Any]:
    """What a run found."""
    timed = ms[WARM:] or ms
    tokens = statistics.mean(map(len, trainer.train_dataset["input_ids"])) * batch
    history = trainer.state.log_history
    found = {
        "steps": trainer.state.global_step,
        "steps_of_this_run": len(ms),
        "ms": statistics.median(timed),
        "tokens_per_second": 1e3 * tokens / statistics.median(timed),
        "losses": [(h["step"], h["loss"]) for h in history if "loss" in h],
        "held_out": [(h["step"], h["eval_loss"]) for h in history if "eval_loss" in h],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if CUDA else None,
    }
    if private:
        found |= {"epsilon": trainer.get_epsilon(), "mode": trainer._mode, "sigma": trainer._sigma}
        found["counted"] = len(trainer.privacy_engine.accountant)
    return found


def write(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """The result file."""
    card = torch.cuda.get_device_name() if CUDA else ""
    what = (
        f"SmolLM2-135M-Instruct through DPSFTTrainer, FSDP2, LoRA rank {RANK}, {args.batch} film "
        f"reviews expected a step of at most {LONGEST} tokens, AdamW, delta 1e-05: the last of "
        f"{args.cards} ranks is killed after {args.kill} steps, and the run goes on from its last "
        f"checkpoint; held_out: step and loss of {HELD_OUT} other reviews, also when a run starts: "
        "the mean of batches, which are others on other ranks"
    )
    found = {**head(what, card, versions(), args.cards), "command": sys.argv, "finetuning": rows}
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
