"""Measure one training step in one mode: time, its phases, memory and what is in it.

    python single_experiment.py --mode ghost_fsdp --seq-length 1024 --model-name llama3-1b \
        --output results/ghost.json

starts one process a GPU by itself (two on a machine without GPUs); under torchrun it uses the
processes that are there. Exit status: 0 measured, 1 failed, 2 invalid request, 3 out of memory, 124
no result in time. A failure is recorded next to the output, as FILE.failure.json; an earlier result
is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.failures import Failure, StorageError, UsageError, describe
from memory_test.common.launch import (
    count_processes,
    is_started,
    joined,
    leave,
    report_failure,
    run_processes,
)
from memory_test.common.modes import HARNESS_MODES, takes_all_devices
from memory_test.common.results import failure_path, prepare_folder, write_json

DTYPES = ("auto", "fp32", "bf16", "fp16")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--mode", help=f"one of {', '.join(HARNESS_MODES)}")
    add("--seq-length", type=_positive, default=1024, help="tokens of a sample")
    add("--batch-size", type=_positive, default=1, help="samples of a process")
    add("--num-iter", type=_positive, default=3, help="timed steps")
    add("--warmup-iter", type=int, default=1, help="steps before them")
    add("--output", type=Path, help="JSON file of the result")
    add("--model-name", default="llama3-1b", help="built-in shape, local folder or hub id")
    # The value may be missing: --token $HF_TOKEN without the variable must get as far as a result
    # or an error that says what the hub wants.
    add("--token", nargs="?", help="token for the hub; else HF_TOKEN")
    add("--random-weights", action="store_true", help="take only the shape of a known hub id")
    add("--task", choices=("lm", "classify"), default="lm", help="(diffusion models: denoise)")
    add("--sigma", type=float, default=1.0, help="noise multiplier")
    add("--max-grad-norm", type=float, default=1.0, help="clipping norm")
    add("--dtype", choices=DTYPES, default="auto", help="auto: bf16 on a GPU, else fp32")
    add("--seed", type=int, default=0)
    add("--optimizer", choices=("sgd", "adamw"), default="sgd")
    add("--lora-rank", type=int, default=0, help="train adapters of this rank only")
    add("--deferred", type=int, choices=(0, 1), help="default: as OPACUS_USE_DEFERRED_NORM says")
    add("--activation-checkpointing", action="store_true")
    add("--no-profiler", action="store_true", help="do not measure collectives")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--num-processes", type=_positive, help="instead of one a GPU; 2 without GPUs")
    add("--timeout", type=float, default=1800.0, help="seconds until a run is given up")
    add("--list-modes", action="store_true", help="print the modes that can be run, and end")
    args = parser.parse_args(argv)
    if not args.list_modes and args.mode is None:
        parser.error("--mode is required")
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def settings_of(args: argparse.Namespace) -> Any:
    """What the command line asks to measure."""
    from memory_test.common.experiment import Settings
    from memory_test.common.models import ModelRequest

    model = ModelRequest(
        name=args.model_name,
        task=args.task,
        seq_length=args.seq_length,
        token=args.token,
        random_weights=args.random_weights,
        checkpointing=args.activation_checkpointing,
    )
    return Settings(
        mode=args.mode,
        model=model,
        batch_size=args.batch_size,
        num_iter=args.num_iter,
        warmup_iter=args.warmup_iter,
        sigma=args.sigma,
        max_grad_norm=args.max_grad_norm,
        dtype=args.dtype,
        seed=args.seed,
        optimizer=args.optimizer,
        lora_rank=args.lora_rank,
        deferred=None if args.deferred is None else bool(args.deferred),
        profile_collectives=not args.no_profiler,
    )


def asked_for(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that name a run, for the record of a failure."""
    return {
        "mode": args.mode,
        "model": args.model_name,
        "seq_length": args.seq_length,
        "batch_size": args.batch_size,
    }


def measure(args: argparse.Namespace) -> int:
    """One process of the run: measure, and, on rank 0, write and print."""
    rank = int(os.environ["RANK"])
    try:
        with joined(args.device, args.timeout) as runtime:
            from memory_test.common.experiment import run_experiment

            if args.output is not None:
                prepare_folder(args.output)
            result = run_experiment(settings_of(args), runtime)
            if runtime.is_main:
                deliver(args, result)
    except Exception as error:
        failure = describe(error, rank)
        if failure.details and failure.kind != "storage":
            print(failure.details, file=sys.stderr)
        # Otherwise torchrun started this process, and nobody else keeps the record.
        return failure.exit_code if report_failure(failure) else end(failure, args)
    return 0


def deliver(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print a result, and write it where the arguments say."""
    print(
        f"{result['mode']}: {result['avg_time_ms']:.2f} ms a step (median "
        f"{result['median_time_ms']:.2f}), peak {result['peak_memory_gb']:.2f} GB, "
        f"{result['num_processes']} processes on {result['device']}"
    )
    for name, value in result["phases_ms"].items():
        if value:
            print(f"  {name:<16} {value:10.2f} ms")
    if args.output is None:
        return
    try:
        write_json(args.output, result)
    except StorageError:
        print(json.dumps(result))  # not lost: it is in the log
        raise
    failure_path(args.output).unlink(missing_ok=True)
    print(f"written to {args.output}")


def supervise(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start the processes of the run, wait for them, and record how it failed."""
    try:
        if args.output is not None:
            prepare_folder(args.output)
        spread = takes_all_devices(args.mode)
        count = count_processes(args.num_processes, args.device, spread)
        command = [sys.executable, str(Path(__file__).resolve()), *argv]
        failure = run_processes(command, count, timeout=args.timeout)
    except UsageError as error:
        failure = describe(error)
    return end(failure, args)


def end(failure: Failure | None, args: argparse.Namespace) -> int:
    """Say and record how a run ended; its exit status."""
    if failure is None:
        return 0
    print(f"{failure.kind.replace('_', ' ')}: {failure.error}", file=sys.stderr)
    if args.output is not None:
        try:
            write_json(failure_path(args.output), failure.record(**asked_for(args)))
        except StorageError as error:
            print(error, file=sys.stderr)
    return failure.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args = parse(argv)
    if args.list_modes:
        from memory_test.common.modes import available_modes

        print("\n".join(available_modes()))
        return 0
    if is_started():
        return measure(args)
    return supervise(args, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    leave(main())
