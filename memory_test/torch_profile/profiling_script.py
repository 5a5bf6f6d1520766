"""Profile a training step: SGD, DP-SGD, DP-SGD by ghost clipping.

    python profiling_script.py --mode=test       # CPU, 1M parameters, under a minute
    python profiling_script.py --mode=profile    # GPU, 1B parameters

Each trainer runs at each batch size and length. A run has a folder below ``./runs``: the trace
(for TensorBoard, Perfetto, Holistic Trace Analysis), result.json, events for TensorBoard's
scalars, on a GPU snapshot.pickle. report.md compares them all. A run that fails is recorded in
result.failure.json, the others go on, and the exit status says so.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.failures import EXIT_USAGE, UsageError, describe, fail_if_planted
from memory_test.common.results import failure_path, prepare_folder, write_json

TRAINER_NAMES = ("StandardTrainer", "DPSGDTrainer", "DPGhostClippingTrainer")
# Batch sizes and lengths by device.
BATCH_SIZES = {"cuda": [4, 8], "cpu": [2, 4]}
SEQ_LENGTHS = {"cuda": [512, 1024], "cpu": [256, 512]}
STEPS = {"cuda": (2, 5), "cpu": (0, 1)}  # before everything, timed
RESULT = "result.json"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--mode", choices=("test", "profile"), required=True, help="CPU and 1M, or GPU and 1B")
    add("--trainers", nargs="+", choices=TRAINER_NAMES, default=list(TRAINER_NAMES))
    add("--batch-sizes", type=_positive, nargs="+", help="default: 4 8 on a GPU, 2 4 on the CPU")
    add("--seq-lengths", type=_positive, nargs="+", help="default: 512 1024, or 256 512 on the CPU")
    add("--output-dir", type=Path, default=Path("runs"))
    add("--warmup-iter", type=int, help="steps before the profiled and the timed ones")
    add("--num-iter", type=_positive, help="timed steps")
    add("--profiled-iter", type=_positive, default=1, help="steps under the profiler")
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="auto: bf16 on a GPU")
    add("--sigma", type=float, default=1.0, help="noise multiplier")
    add("--max-grad-norm", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--with-stack", action="store_true", help="record Python's stacks (large traces)")
    add("--no-snapshot", action="store_true", help="no memory snapshot on a GPU")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def check_installation() -> None:
    """Raise a :class:`UsageError` that says what to install, if something is missing."""
    for name, how in (("torch", "pip install torch"), ("opacus", "pip install -e ../..")):
        try:
            __import__(name)
        except ImportError as error:
            raise UsageError(f"the package {name} cannot be imported ({error}): {how}") from error


def choose_device(mode: str) -> Any:
    """The device of a mode; says so where a GPU is wanted and there is none."""
    import torch

    if mode == "profile" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if mode == "profile":
        print("no GPU: CUDA is not available, so the small model runs on the CPU", flush=True)
    return torch.device("cpu")


def run_one(args: argparse.Namespace, name: str, batch: int, length: int) -> dict[str, Any]:
    """Build one trainer, time it, profile it."""
    from memory_test.common.experiment import DTYPES, versions
    from memory_test.torch_profile import model, recording, trainers

    device = args.device
    shape = model.LARGE if device.type == "cuda" else model.SMALL
    dtype = "bf16" if device.type == "cuda" else "fp32"
    dtype = dtype if args.dtype == "auto" else args.dtype
    settings = trainers.Settings(batch, length, args.sigma, args.max_grad_norm, seed=args.seed + 1)
    fail_if_planted(name, 0)
    built = model.build_model(shape, device, DTYPES[dtype], args.seed)
    trainer = trainers.TRAINERS[name](built, shape.vocab, settings)
    folder = folder_of(args, name, batch, length)
    warmup, count = STEPS[device.type]
    for _ in range(warmup if args.warmup_iter is None else args.warmup_iter):
        trainer.step()
    recorded = recording.record(
        trainer.step, folder, name, device, steps=args.profiled_iter, stacks=args.with_stack
    )
    times = recording.measure_times(trainer.step, device, args.num_iter or count)
    kept = None if args.no_snapshot else recording.snapshot(trainer.step, folder, device)
    return {
        "status": "ok",
        **asked_for(name, batch, length),
        "description": trainer.description,
        "parameters": model.count_parameters(built),
        "dtype": dtype,
        **times,
        "tokens_per_second": round(batch * length / times["median_time_ms"] * 1e3),
        **recorded,
        "snapshot": kept,
        "device": recording.device_name(device),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def asked_for(name: str, batch: int, length: int) -> dict[str, Any]:
    """What names a run."""
    return {"trainer": name, "batch_size": batch, "seq_length": length}


def folder_of(args: argparse.Namespace, name: str, batch: int, length: int) -> Path:
    """Folder of a run."""
    return args.output_dir / f"{name}_B{batch}_T{length}"


def try_one(args: argparse.Namespace, name: str, batch: int, length: int) -> int:
    """One run, written or its failure recorded; its exit status."""
    output = folder_of(args, name, batch, length) / RESULT
    try:
        prepare_folder(output)
        result = run_one(args, name, batch, length)
        write_json(output, result)
    except Exception as error:
        return _fail(output, error, asked_for(name, batch, length))
    finally:
        _free(args.device)
    failure_path(output).unlink(missing_ok=True)
    _write_scalars(output.parent, result)
    print(
        f"{name:<22} B={batch} T={length}: {result['median_time_ms']:.1f} ms a step, peak "
        f"{result['memory']['peak_mb']:.0f} MB, trace {result['trace_mb']} MB",
        flush=True,
    )
    for fault in result["trace_faults"]:
        print(f"the trace is not sound: {fault}", file=sys.stderr, flush=True)
    return 0


def _fail(output: Path, error: Exception, asked: dict[str, Any]) -> int:
    failure = describe(error)
    if failure.kind == "error":
        print(failure.details, file=sys.stderr)
    hint = ""
    if failure.kind == "out_of_memory":
        hint = " (try smaller --batch-sizes or --seq-lengths)"
    place = f"{asked['trainer']} B={asked['batch_size']} T={asked['seq_length']}"
    print(f"{place} failed: {failure.error}{hint}", file=sys.stderr, flush=True)
    try:
        write_json(failure_path(output), failure.record(**asked))
    except Exception as second:
        print(f"the failure could not be recorded: {second}", file=sys.stderr)
    return failure.exit_code


def _free(device: Any) -> None:
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _write_scalars(folder: Path, result: dict[str, Any]) -> None:
    from memory_test.torch_profile.report import write_scalars

    try:
        write_scalars(folder, result)
    except ImportError:
        print("no scalars for TensorBoard: pip install tensorboard", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; the exit status is that of the first run that failed."""
    args = parse(argv)
    try:
        check_installation()
        prepare_folder(args.output_dir / "report.md")
        args.device = choose_device(args.mode)
        _check_lengths(args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    kind = args.device.type
    status = 0
    for batch in args.batch_sizes or BATCH_SIZES[kind]:
        for length in args.seq_lengths or SEQ_LENGTHS[kind]:
            for name in args.trainers:
                status = try_one(args, name, batch, length) or status
    return _report(args) or status


def _check_lengths(args: argparse.Namespace) -> None:
    from memory_test.torch_profile import model

    limit = (model.LARGE if args.device.type == "cuda" else model.SMALL).max_length
    long = [n for n in args.seq_lengths or () if n > limit or n < 2]
    if long:
        raise UsageError(f"--seq-lengths {long}: must be from 2 to {limit} for this model")


def _report(args: argparse.Namespace) -> int:
    from memory_test.torch_profile.report import write_report

    try:
        text = write_report(args.output_dir)
    except Exception as error:
        return _fail(args.output_dir / "report", error, asked_for("report", 0, 0))
    print(f"\n{text}\nwritten to {args.output_dir}; tensorboard --logdir={args.output_dir}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
