"""Deferred against immediate norms: the same numbers, and what deferring costs or brings.

    python test_deferred_norm.py --mode correctness                         # one process
    torchrun --nproc_per_node=2 test_deferred_norm.py --mode performance    # two ranks

``performance`` without torchrun starts two processes by itself, on the CPU if there are not two
GPUs. The word PASSED is printed only if everything that is said before it holds; the exit status
is then 0, otherwise 1 (2: invalid request).

The default model is a transformer with ``DPMultiheadAttentionWithFlashAttention``
(``memory_test/common/dp_transformer.py``): small for ``correctness`` and on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.failures import UsageError, describe
from memory_test.common.launch import (
    Runtime,
    count_processes,
    exit_status,
    is_started,
    leave,
    run_in_processes,
    run_test,
)
from memory_test.common.reference import check_folder
from memory_test.common.results import prepare_folder, write_json

RANKS = 2


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--mode", choices=("correctness", "performance"), required=True)
    add("--grad-sample-mode", help="default: all deferrable ones; performance: one FSDP mode")
    add("--model-name", help="as in single_experiment.py; default: medium on GPUs, else tiny")
    add("--seq-length", type=int, nargs="+", help="default: 1024 on GPUs, else 64")
    add("--batch-size", type=int, default=4, help="samples of a process")
    add("--num-iter", type=int, default=5, help="timed steps a round")
    add("--rounds", type=int, default=3, help="rounds of immediate, then deferred")
    add("--lora-rank", type=int, default=0, help="train adapters of this rank only")
    add("--slower", type=float, help="share by which deferred may be slower; default: 0.02, on "
        "the CPU, where steps of milliseconds are all noise, 1")  # fmt: skip
    add("--memory-growth", type=float, default=0.05, help="share by which its peak may grow")
    add("--min-speedup", type=float, default=0.0, help="speedup that it must reach")
    add("--reference", type=Path, help="folder with another opacus to measure in the same call")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--output", type=Path, help="JSON file of what was measured")
    add("--timeout", type=float, default=1800.0, help="seconds until a run is given up")
    return parser.parse_args(argv)


# --- correctness ---


def correctness(args: argparse.Namespace, runtime: Runtime) -> bool:
    """Compare norms and clipped gradients with each other and with one sample at a time."""
    from memory_test.common.deferred import check_mode
    from memory_test.common.modes import available_modes, is_deferrable, resolve_mode

    modes = [args.grad_sample_mode] if args.grad_sample_mode else available_modes()
    for mode in modes:
        resolve_mode(mode, runtime.world_size)
    fine = True
    for mode in (m for m in modes if is_deferrable(m)):
        errors = check_mode(mode, runtime.device, args.batch_size)
        good = all(error.holds for error in errors)
        fine &= good
        print(f"{mode}: {'same numbers' if good else 'DIFFERS'}")
        for error in errors:
            print(f"  {error}")
    return fine


# --- performance ---


def performance(args: argparse.Namespace, runtime: Runtime) -> bool:
    """Measure both in turn, in the same processes; whether deferred keeps to the limits."""
    lengths = args.seq_length or ([1024] if runtime.device.type == "cuda" else [64])
    rows = [_compare(args, runtime, length) for length in lengths]
    fine = all(row["holds"] for row in rows)
    args.remark = " (>1.2x speedup)" if min(row["speedup"] for row in rows) > 1.2 else ""
    if runtime.is_main and args.output is not None:
        write_json(args.output, {"kind": "deferred", "passed": fine, "rows": rows})
    return fine


def _compare(args: argparse.Namespace, runtime: Runtime, length: int) -> dict[str, Any]:
    results: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for _ in range(args.rounds):
        for deferred in (False, True):
            results[deferred].append(_measure(args, runtime, length, deferred))
    median, peak = {}, {}
    for deferred, rounds in results.items():
        median[deferred] = statistics.median(t for r in rounds for t in r["times_ms"])
        peak[deferred] = max(r["peak_memory_mb"] for r in rounds)
    speedup, growth = median[False] / median[True], peak[True] / peak[False] - 1
    on_gpu = runtime.device.type == "cuda"  # a process' resident set only grows
    slower = (0.02 if on_gpu else 1.0) if args.slower is None else args.slower
    holds = speedup >= max(1 / (1 + slower), args.min_speedup)
    holds &= growth <= args.memory_growth or not on_gpu
    if runtime.is_main:
        print(
            f"{length} tokens, {args.batch_size} samples a process, {runtime.world_size} processes:"
        )
        print(f"  immediate {median[False]:9.2f} ms  peak {peak[False]:9.1f} MB")
        print(f"  deferred  {median[True]:9.2f} ms  peak {peak[True]:9.1f} MB")
        memory = f"memory {growth:+.1%}" if on_gpu else "memory is not comparable on the CPU"
        print(f"  speedup {speedup:.2f}x, {memory}: {'within' if holds else 'OUTSIDE'} the limits")
    last = results[True][-1]
    if args.reference is not None:
        _against_reference(args, runtime, last, min(median.values()))
    keys = ("model", "mode", "device", "num_processes", "versions", "config", "date", "reference")
    about = {k: last[k] for k in keys if k in last}
    return {
        "seq_length": length, "batch_size": args.batch_size, "holds": holds, "speedup": speedup,
        "memory_growth": growth, "immediate_ms": median[False], "deferred_ms": median[True],
        "immediate_peak_mb": peak[False], "deferred_peak_mb": peak[True], **about,
    }  # fmt: skip


def _against_reference(
    args: argparse.Namespace, runtime: Runtime, result: dict[str, Any], best_ms: float
) -> None:
    """Say how long a step takes with another package; no part of the verdict."""
    from memory_test.common.reference import measure_with

    asked = {
        "--mode": "ghost_fsdp", "--model-name": result["model"],
        "--seq-length": result["seq_length"], "--batch-size": args.batch_size,
        "--num-iter": args.num_iter, "--warmup-iter": 2,
        "--lora-rank": args.lora_rank, "--device": args.device,
    }  # fmt: skip
    arguments = [str(part) for pair in asked.items() for part in pair]
    other = measure_with(args.reference, [*arguments, "--no-profiler"], runtime)
    if other:
        version, ms = other["versions"]["opacus"], other["median_time_ms"]
        peak = other["peak_memory_mb"]
        slower = f"{ms / best_ms:.2f} times"
        print(f"  opacus {version} ghost_fsdp {ms:.2f} ms, peak {peak:.1f} MB: {slower}")
        result["reference"] = {k: other[k] for k in ("versions", "times_ms", "peak_memory_mb")}


def _measure(
    args: argparse.Namespace, runtime: Runtime, length: int, deferred: bool
) -> dict[str, Any]:
    from memory_test.common.experiment import Settings, run_experiment
    from memory_test.common.memory import release
    from memory_test.common.models import ModelRequest

    name = args.model_name or ("medium" if runtime.device.type == "cuda" else "tiny")
    settings = Settings(
        mode=args.grad_sample_mode or _default_mode(),
        model=ModelRequest(name, "lm", length),
        batch_size=args.batch_size,
        num_iter=args.num_iter,
        warmup_iter=2,
        lora_rank=args.lora_rank,
        profile_collectives=False,
    )
    result = run_experiment(replace(settings, deferred=deferred), runtime)
    if result["deferred"] != deferred:
        raise UsageError(f"--grad-sample-mode {settings.mode} has no deferred norms in this opacus")
    release(runtime.device)
    return result


def _default_mode() -> str:
    from memory_test.common.modes import available_modes

    wanted = ("flash_fsdp", "ghost_fsdp")
    return next(mode for mode in wanted if mode in available_modes())


# --- processes ---


def work(args: argparse.Namespace) -> int:
    """One process: test, and say on rank 0 whether it passed."""
    name, args.remark = args.mode.upper(), ""
    test = {"correctness": correctness, "performance": performance}[args.mode]
    return run_test(
        args.device,
        args.timeout,
        lambda runtime: test(args, runtime),
        lambda passed: f"✓ {name} TEST PASSED!{args.remark}" if passed else f"✗ {name} TEST FAILED",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args = parse(argv)
    try:
        if args.output is not None:
            prepare_folder(args.output)
        if args.reference is not None:
            check_folder(args.reference)
        if is_started() or args.mode == "correctness":
            return work(args)
        import torch

        enough = torch.cuda.is_available() and torch.cuda.device_count() >= RANKS
        device = "cpu" if args.device == "auto" and not enough else args.device
        count = count_processes(RANKS, device, spread=True)
        arguments = [*(sys.argv[1:] if argv is None else argv), "--device", device]
        return run_in_processes(__file__, arguments, count, args.timeout)
    except UsageError as error:
        return exit_status(describe(error))


if __name__ == "__main__":
    leave(main())
