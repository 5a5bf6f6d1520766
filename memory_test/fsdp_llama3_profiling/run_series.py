"""Measure a list of experiments in one set of processes, so that they start only once.

    python run_series.py PLAN --output-dir results --budget 300

Each line of PLAN (``-``: standard input) holds the arguments of one ``single_experiment.py``:

    --model-name llama3-1b --mode ghost_bk --seq-length 4096 --deferred 1

Results lie where ``run_all_experiments.sh`` puts them, and what has a result is not run again. A
failure is recorded and the rest goes on, in new processes if need be. With ``--budget`` no run is
begun after so many seconds; what was left out is done by the next call. Exit status: 0 all have
a result, 1 some have not, 2 invalid request.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import single_experiment

from memory_test.common.failures import (
    EXIT_FAILED,
    EXIT_TIMEOUT,
    Failure,
    StorageError,
    UsageError,
    describe,
)
from memory_test.common.launch import (
    Runtime,
    count_processes,
    exit_status,
    is_started,
    joined,
    leave,
    report_failure,
    run_processes,
)
from memory_test.common.modes import is_deferrable
from memory_test.common.results import failure_path, prepare_folder

# What a run in progress may take beyond the budget before it is ended.
OVERRUN_SECONDS = 30.0


class RunFailedError(Exception):
    """A run failed in a way that leaves these processes useless."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


@dataclass(frozen=True)
class Entry:
    """One experiment: its arguments, with ``output`` set."""

    arguments: argparse.Namespace

    @property
    def output(self) -> Path:
        """Where its result belongs."""
        return self.arguments.output

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.output.parent.parent.name}/{self.output.parent.name}"

    def is_open(self, since: float) -> bool:
        """Whether it has neither a result nor a failure since then (Unix time)."""
        if self.output.is_file() and self.output.stat().st_size:
            return False
        record = failure_path(self.output)
        return not record.is_file() or record.stat().st_mtime < since


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("plan", type=Path, help="a file, a line a run; - for standard input")
    add("--output-dir", type=Path, default=Path("results"))
    add("--budget", type=float, default=1e9, help="seconds after which no run is begun")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--num-processes", type=int, help="default: one a GPU, 2 without GPUs")
    # Set where the script starts itself.
    add("--since", type=float, help=argparse.SUPPRESS)
    add("--progress", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def read_plan(text: str, folder: Path) -> list[Entry]:
    """The experiments of a plan.

    Raises:
        UsageError: A line is not understood.
    """
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        try:
            arguments = single_experiment.parse(words)
        except SystemExit as error:
            raise UsageError(f"line {number} of the plan: {line.strip()}") from error
        arguments.output = folder / folder_name(arguments) / "result.json"
        entries.append(Entry(arguments))
    return entries


def folder_name(arguments: argparse.Namespace) -> str:
    """Folder of a run below the output folder, as ``run_all_experiments.sh`` names it."""
    deferred = arguments.deferred
    if deferred is None and is_deferrable(arguments.mode):
        deferred = os.environ.get("OPACUS_USE_DEFERRED_NORM") == "1"
    parts = [arguments.mode, f"T{arguments.seq_length}", f"B{arguments.batch_size}"]
    parts += ["deferred"] if deferred else []
    parts += ["checkpointing"] if arguments.activation_checkpointing else []
    parts += [f"lora{arguments.lora_rank}"] if arguments.lora_rank else []
    return f"{arguments.model_name.replace('/', '_')}/{'_'.join(parts)}"


# --- one of the processes ---


def work(args: argparse.Namespace) -> int:
    """Run what is open; the exit status."""
    rank = int(os.environ["RANK"])
    # Before the processes join: so all of them see the same files.
    todo = [e for e in read_plan(args.plan.read_text(), args.output_dir) if e.is_open(args.since)]
    try:
        with joined(args.device) as runtime:
            for entry in todo:
                if runtime.largest([time.time()])[0] > args.since + args.budget:
                    break
                if runtime.is_main:
                    args.progress.write_text(str(entry.output))
                run(entry, runtime)
    except Exception as error:
        failure = error.failure if isinstance(error, RunFailedError) else describe(error, rank)
        report_failure(failure)
        return failure.exit_code
    return 0


def run(entry: Entry, runtime: Runtime) -> None:
    """One experiment: written, or its failure recorded.

    Raises:
        RunFailedError: These processes cannot go on: others wait in a collective, or the device
            may be in disorder.
    """
    from memory_test.common.experiment import run_experiment
    from memory_test.common.memory import release

    failure = None
    start = time.monotonic()
    try:
        with given_up_after(entry.arguments.timeout, runtime.rank):
            result = run_experiment(single_experiment.settings_of(entry.arguments), runtime)
        if runtime.is_main:
            single_experiment.deliver(entry.arguments, result)
            print(f"  {time.monotonic() - start:.1f} s in all", flush=True)
    except Exception as error:
        failure = describe(error, runtime.rank)
        if failure.kind == "error":
            print(failure.details, file=sys.stderr)
    # Here, where the exception, which held what the run left, is gone.
    release(runtime.device)
    if failure is None:
        return
    alone = runtime.world_size == 1
    if not alone or failure.kind in ("error", "storage"):
        raise RunFailedError(failure)
    single_experiment.end(failure, entry.arguments)


@contextmanager
def given_up_after(seconds: float, rank: int) -> Iterator[None]:
    """End this process if the block takes longer."""

    def give_up() -> None:
        report_failure(Failure("timeout", f"no result after {seconds:g} s", rank))
        os._exit(EXIT_TIMEOUT)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- the process that starts them ---


def supervise(args: argparse.Namespace) -> int:
    """Start processes until nothing is open or the time is over; the exit status."""
    text = sys.stdin.read() if str(args.plan) == "-" else _read(args.plan)
    entries = read_plan(text, args.output_dir)
    args.since = time.time()
    for entry in entries:
        prepare_folder(entry.output)
    count = args.num_processes or count_processes(None, args.device, spread=True)
    with tempfile.TemporaryDirectory(prefix="run_series_") as place:
        plan, args.progress = Path(place, "plan"), Path(place, "progress")
        plan.write_text(text)
        while _time_left(args) > 0 and any(e.is_open(args.since) for e in entries):
            args.progress.write_text("")
            failure = run_processes(
                _command(args, plan), count, timeout=_time_left(args) + OVERRUN_SECONDS
            )
            if failure is None or not _record(failure, args, entries):
                break
    return summary(entries, args.since)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _time_left(args: argparse.Namespace) -> float:
    return args.since + args.budget - time.time()


def _command(args: argparse.Namespace, plan: Path) -> list[str]:
    options = {
        "--output-dir": args.output_dir, "--budget": args.budget, "--device": args.device,
        "--since": repr(args.since), "--progress": args.progress,
    }  # fmt: skip
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, str(Path(__file__).resolve()), str(plan), *words]


def _record(failure: Failure, args: argparse.Namespace, entries: Sequence[Entry]) -> bool:
    """Record the failure of the run in progress; whether to go on with the others."""
    name = args.progress.read_text()
    current = next((e for e in entries if str(e.output) == name), None)
    if current is None or failure.kind == "storage":
        exit_status(failure)
        return False
    if current.output.is_file():  # it was done: something failed at the end
        exit_status(failure)
        return True
    if _time_left(args) <= -OVERRUN_SECONDS:
        print(f"{current.name} was ended: the time is over", file=sys.stderr)
        return False
    single_experiment.end(failure, current.arguments)
    return failure_path(current.output).is_file()


def summary(entries: Sequence[Entry], since: float) -> int:
    """Say what was measured; the exit status."""
    measured = [e for e in entries if e.output.is_file()]
    left = [e.name for e in entries if e.is_open(since)]
    failed = [e.name for e in entries if not (e.is_open(since) or e.output.is_file())]
    print(f"{len(measured)} measured, {len(failed)} failed, {len(left)} left")
    for word, names in (("failed", failed), ("left", left)):
        if names:
            print(f"{word}: {' '.join(names)}")
    return EXIT_FAILED if failed or left else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args = parse(argv)
    try:
        if is_started() and args.since is None:
            raise UsageError("run_series.py starts its processes by itself: leave torchrun out")
        return work(args) if is_started() else supervise(args)
    except (UsageError, StorageError) as error:
        return exit_status(describe(error))


if __name__ == "__main__":
    leave(main())
