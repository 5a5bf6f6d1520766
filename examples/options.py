"""Command-line options of the example, and the checks of them."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arguments import positive, probability, seed
from models import SHAPES, local_folder
from runtime import DEVICES, choose_device
from text_data import SHIPPED, TASKS
from tokenizer import KINDS

from opacus.checkpoints.folder import MANIFEST, latest_checkpoint

MODES = (
    "ghost_fsdp_bk",
    "ghost_fsdp",
    "flash_fsdp_bk",
    "flash_fsdp",
    "ghost_bk",
    "ghost",
    "flash_bk",
    "flash",
    "hooks",
    "auto",
)

# What a resumed run must share with the one that it goes on with.
SHARED = (
    "task",
    "model",
    "tokenizer",
    "seq_length",
    "epochs",
    "batch_size",
    "epsilon",
    "delta",
    "max_grad_norm",
    "lr",
    "lora",
)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line, or from ``argv``."""
    parser = argparse.ArgumentParser(
        description="Train a small transformer on texts with differential privacy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_data(parser)
    _add_privacy(parser)
    _add_training(parser)
    _add_files(parser)
    return parser.parse_args(argv)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data and model").add_argument
    add("--task", choices=TASKS, default="classify", help="what to learn")
    add("--data", default=str(SHIPPED), help="a .jsonl, .json, .csv, .tsv or .txt file")
    add("--test-data", help="file with the test rows; if not given, a tenth of --data")
    add("--text-column", help="if not given: text, or messages, or prompt and completion")
    add("--label-column", help="if not given: label, or score (the label is score > 0)")
    add("--model", default="tiny", help=f"{', '.join(SHAPES)}, or a local folder")
    add(
        "--tokenizer",
        choices=("auto", *KINDS),
        default="auto",
        help="auto: hashed words to classify, bytes for lm, its own for a model's folder",
    )
    add("--seq-length", type=_length, default=128, help="tokens kept of a text, at least 2")


def _add_privacy(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("privacy").add_argument
    add("--grad-sample-mode", choices=MODES, default=MODES[0], help="how gradients are clipped")
    add(
        "--deferred",
        action=argparse.BooleanOptionalAction,
        help="compute norms after the backward pass; if not given, OPACUS_USE_DEFERRED_NORM says",
    )
    add("--epsilon", type=positive(float), default=8.0, help="privacy budget")
    add("--delta", type=probability, help="if not given, the smaller of 1e-5 and 1/N^1.1")
    add("--max-grad-norm", type=positive(float), default=1.0, help="clipping norm")
    add("--secure-mode", action="store_true", help="randomness of the operating system; slow")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=positive(int), default=8, help="passes over the data")
    add("--batch-size", type=positive(int), default=1024, help="expected samples a step")
    add(
        "--max-physical-batch-size",
        type=positive(int),
        default=256,
        help="samples that a process handles at once",
    )
    add("--lr", type=positive(float), default=3e-3, help="learning rate of AdamW")
    add("--lora", type=positive(int), metavar="RANK", help="train LoRA adapters only")
    add("--seed", type=seed, help="repeats a run, for tests: who knows the seed knows the noise")
    add(
        "--baseline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train the model without privacy, too, to compare",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files and device").add_argument
    add("--save", metavar="FOLDER", help="save the trained model there; FOLDER must be new")
    add("--logdir", help="folder for TensorBoard")
    add(
        "--log-clipped",
        action="store_true",
        help="also log the share of samples that are clipped, to tune --max-grad-norm by; the "
        "guarantee does not cover it",
    )
    add("--checkpoint", help="folder to save to after each epoch; it keeps the last two")
    add("--checkpoint-every", type=positive(int), metavar="STEPS", help="save within epochs too")
    add(
        "--resume",
        help="folder of checkpoints, or one of them, to go on from; if it is the folder of "
        "--checkpoint and empty, start",
    )
    add("--device", choices=DEVICES, default="auto", help="where to run")
    add(
        "--processes",
        type=positive(int),
        help="start so many processes on this machine; with torchrun leave it out",
    )


def _length(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"must be 2 or more, got {text}")
    return value


def check_options(args: argparse.Namespace) -> None:
    """Refuse what needs no data to be seen to be wrong.

    Raises:
        ValueError: It names the option.
    """
    choose_device(args.device)
    local_folder(args.model)
    _check_paths(args)
    if args.log_clipped and not args.logdir:
        raise ValueError("--log-clipped: needs --logdir, a folder for the curves")
    if args.log_clipped and args.grad_sample_mode == "hooks":
        raise ValueError("--log-clipped: the mode hooks does not keep norms; use ghost")
    if args.lora is not None and importlib.util.find_spec("peft") is None:
        raise ValueError("--lora: needs peft; pip install peft")
    if args.label_column and args.task == "lm":
        raise ValueError("--label-column: --task lm reads no labels; leave it out")
    if args.deferred is not None and args.grad_sample_mode == "hooks":
        raise ValueError(
            "--deferred, --no-deferred: the mode hooks has no norm pass that could be deferred; "
            "use --grad-sample-mode ghost or ghost_fsdp"
        )
    if args.secure_mode and args.seed is not None:
        raise ValueError("--seed: does nothing under --secure-mode; leave one of them out")
    if args.logdir and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--logdir: needs TensorBoard; pip install tensorboard")


def _check_paths(args: argparse.Namespace) -> None:
    _check_checkpoints(args)
    if args.logdir and os.path.exists(args.logdir) and not os.path.isdir(args.logdir):
        raise ValueError(f"--logdir {args.logdir}: not a folder")
    if args.save is None:
        return
    if os.path.exists(args.save) and not (os.path.isdir(args.save) and not os.listdir(args.save)):
        raise ValueError(f"--save {args.save}: exists already; choose a new folder")
    if not _can_be_made(Path(args.save)):
        raise ValueError(f"--save {args.save}: the folder it is in is read-only")


def _can_be_made(folder: Path) -> bool:
    """Whether this folder could be made, with those that it is in."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK)


def _check_checkpoints(args: argparse.Namespace) -> None:
    if args.checkpoint and not os.access(Path(args.checkpoint).absolute().parent, os.W_OK):
        raise ValueError(f"--checkpoint {args.checkpoint}: its folder is missing or read-only")
    if args.checkpoint and os.path.isfile(args.checkpoint):
        raise ValueError(f"--checkpoint {args.checkpoint}: a file, but a folder is needed")
    if args.checkpoint_every and not args.checkpoint:
        raise ValueError("--checkpoint-every: needs --checkpoint, a folder to save to")
    if args.resume and newest(args.resume) is None:
        if not args.checkpoint or Path(args.checkpoint) != Path(args.resume):
            raise ValueError(f"--resume {args.resume}: there is no complete checkpoint")
        args.resume = None  # the first start of a run that is restarted with the same options
    used = latest_checkpoint(args.checkpoint) if args.checkpoint else None
    resumed = newest(args.resume) if args.resume else None
    if used is not None and (resumed is None or resumed.resolve() != used.resolve()):
        raise ValueError(
            f"--checkpoint {args.checkpoint}: holds {used.name} of another run; go on with it by "
            f"--resume {args.checkpoint}, or choose another folder"
        )


def newest(path: str) -> Path | None:
    """The newest checkpoint of a folder, or ``path`` itself if it is one; ``None`` if neither."""
    return latest_checkpoint(path) or (Path(path) if Path(path, MANIFEST).is_file() else None)


def choose_tokenizer(args: argparse.Namespace) -> str:
    """The kind of tokenizer that ``auto`` stands for.

    Raises:
        ValueError: The kind does not fit the task, or the model is unknown.
    """
    folder = local_folder(args.model)
    kind = args.tokenizer
    if kind == "auto":
        own = folder is not None and any(folder.glob("tokenizer*"))
        kind = "model" if own else {"classify": "words", "lm": "bytes"}[args.task]
    if kind == "words" and args.task == "lm":
        raise ValueError("--tokenizer words: hashes are no text to be modelled; use bytes for lm")
    return kind


def shared_settings(args: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Settings that a checkpoint keeps, to be compared when a run goes on."""
    return {"training rows": rows, **{name: getattr(args, name) for name in SHARED}}


def check_resumed(path: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with other settings: noise and epsilon were planned for the old ones.

    Raises:
        ValueError: It names the settings that differ.
    """
    differ = [f"{k} was {saved.get(k)}, is {v}" for k, v in now.items() if saved.get(k) != v]
    if differ:
        raise ValueError(f"--resume {path}: made with other settings ({'; '.join(differ)})")
