"""Times whole private training steps against the non-private step, in the same run.

    torchrun --nproc_per_node=2 memory_test/benchmarks/steps.py --suite fsdp-1b --output out.json
    python memory_test/benchmarks/steps.py --suite single-1b --cells 1x4096 --modes ghost_bk

Without torchrun it starts one process a GPU by itself (two without GPUs). Private and
non-private steps take turns; each private one is compared with the non-private step that has the
same features. Each mode is first checked against one sample at a time; one that is wrong is not
reported, and the exit status is 1, as where one failed. Others: 0 all measured, 2 invalid request,
3 a mode ran out of memory, 124 no result in time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# At the end: a folder with another opacus on PYTHONPATH comes first.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.benchmarks.cases import OPTIMIZERS, SUITES, WRAPPINGS, Suite, cells_of, suite_of
from memory_test.benchmarks.ways import FEATURES, ways_of
from memory_test.common.failures import (
    EXIT_FAILED,
    EXIT_MEMORY,
    Failure,
    UsageError,
    describe,
)
from memory_test.common.launch import (
    count_processes,
    is_started,
    joined,
    leave,
    report_failure,
    run_processes,
)
from memory_test.common.results import prepare_folder


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suite", default="fsdp-1b", help=f"one of {', '.join(SUITES)}")
    add("--cells", help="instead of those of the suite: BATCHxTOKENS,...")
    add("--modes", help=f"private modes, MODE+FEATURE+...,... with features {FEATURES}")
    add("--model", help="built-in shape")
    add("--wrapping", choices=WRAPPINGS, help="how the private model is sharded")
    add("--lora", type=int, help="rank of adapters, 0 for none")
    add("--checkpointing", action=argparse.BooleanOptionalAction)
    add("--half", action=argparse.BooleanOptionalAction, help="parameters in the timed type")
    add("--optimizer", choices=OPTIMIZERS)
    add("--compiled", action=argparse.BooleanOptionalAction, help="also compiled non-private")
    add("--iters", type=int, default=10, help="timed steps of each mode")
    add("--warmup", type=int, default=3, help="steps before them")
    add("--rounds", type=int, help="one model in memory at a time, so many turns each; 0: all")
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
        help="auto: bf16 on a GPU, else fp32")  # fmt: skip
    add("--budget", type=float, default=500.0, help="start no cell after so many seconds")
    add("--reference", type=Path, help="folder with pip opacus, to be timed in the same call")
    add("--reference-modes", help="default: ghost_fsdp, or ghost in one process")
    add("--reference-iters", type=int, default=3)
    add("--output", type=Path, help="JSON file; written after every cell")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--num-processes", type=int, help="instead of one a GPU; 2 without GPUs")
    add("--timeout", type=float, default=580.0, help="seconds until the run is given up")
    add("--checks", choices=("full", "small", "none"), default="full",
        help="small: on a small model only; the file is marked unchecked")  # fmt: skip
    add("--other-package", action="store_true", help=argparse.SUPPRESS)  # for --reference
    args = parser.parse_args(argv)
    if min(args.iters, args.reference_iters) < 1 or min(args.warmup, args.rounds or 0) < 0:
        parser.error("--iters must be at least 1, --warmup and --rounds at least 0")
    return args


def suite_from(args: argparse.Namespace) -> Suite:
    """The suite with what the command line changes."""
    return suite_of(
        args.suite,
        cells=cells_of(args.cells) if args.cells else None,
        ways=ways_of(args.modes) if args.modes is not None else None,
        model=args.model,
        wrapping=args.wrapping,
        lora_rank=args.lora,
        checkpointing=args.checkpointing,
        half=args.half,
        optimizer=args.optimizer,
        compiled=args.compiled,
    )


def measure(args: argparse.Namespace) -> int:
    """One process of the run; the exit status."""
    rank = int(os.environ.get("RANK", 0))
    try:
        with joined(args.device, args.timeout) as runtime:
            from memory_test.benchmarks.step_run import run_suite

            found = run_suite(args, suite_from(args), runtime)
            return _status(found)
    except Exception as error:
        failure = describe(error, rank)
        if failure.details:
            print(failure.details, file=sys.stderr)
        return failure.exit_code if report_failure(failure) else end(failure)


def _status(found: dict[str, Any]) -> int:
    statuses = {row["status"] for cell in found["cells"] for row in cell["rows"]}
    if statuses & {"refused", "failed"}:
        return EXIT_FAILED
    return EXIT_MEMORY if "out_of_memory" in statuses else 0


def supervise(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start the processes of the run and wait for them; the exit status."""
    try:
        suite = suite_from(args)
        if args.output is not None:
            prepare_folder(args.output)
        count = count_processes(args.num_processes, args.device, suite.sharded)
        command = [sys.executable, str(Path(__file__).resolve()), *argv]
        failure = run_processes(command, count, timeout=args.timeout)
    except UsageError as error:
        failure = describe(error)
    return end(failure)


def end(failure: Failure | None) -> int:
    """Say how a run ended; its exit status."""
    if failure is None:
        return 0
    print(f"{failure.kind.replace('_', ' ')}: {failure.error}", file=sys.stderr)
    return failure.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args = parse(argv)
    if is_started():
        return measure(args)
    return supervise(args, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    leave(main())
