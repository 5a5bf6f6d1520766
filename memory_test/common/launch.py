"""Processes of a run: one a GPU, or several on the CPU, started here or by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from memory_test.common.failures import (
    EXIT_FAILED,
    Failure,
    UsageError,
    describe,
    describe_exit,
)

STORE_VARIABLE = "MEMORY_TEST_STORE"
REPORTS_VARIABLE = "MEMORY_TEST_REPORTS"
# Grace period of processes that wait for a failed one, before they are ended.
GRACE_SECONDS = 5.0
CPU_PROCESSES = 2


@dataclass(frozen=True)
class Runtime:
    """Where this process stands.

    Attributes:
        rank: Number of this process.
        world_size: Number of processes.
        device: Where it computes.
    """

    rank: int
    world_size: int
    device: Any

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest over all processes of each value (a collective call)."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def barrier(self) -> None:
        """Wait for all processes and for this one's device."""
        import torch
        import torch.distributed as dist

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.world_size > 1:
            dist.barrier()


def is_started() -> bool:
    """Whether this process was started as one of several, by torchrun or from here."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def count_processes(wanted: int | None, device: str, spread: bool) -> int:
    """How many processes to start.

    Args:
        wanted: As asked for; ``None`` for one a GPU, or two on the CPU.
        device: ``"auto"``, ``"cuda"`` or ``"cpu"``.
        spread: Whether the run uses more than one process at all.

    Raises:
        UsageError: There are not as many GPUs.
    """
    if device == "cpu":
        return (wanted or CPU_PROCESSES) if spread else 1
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus < (wanted or 1):
        raise UsageError(
            f"--device cuda: {wanted or 1} GPUs are needed, {gpus} found; use --device cpu"
        )
    if not spread:
        return 1
    return wanted or gpus or CPU_PROCESSES


@contextlib.contextmanager
def joined(device: str, timeout: float | None = None) -> Iterator[Runtime]:
    """Join the process group of the run; a group of one if nothing started this process.

    Raises:
        UsageError: ``device`` is ``"cuda"`` and there are fewer GPUs than processes.
    """
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus < here:
        raise UsageError(f"--device cuda: {here} processes on this host, but {gpus} GPUs")
    cuda = device != "cpu" and gpus >= here
    place = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout)} if timeout else {}
    if STORE_VARIABLE in os.environ:
        options |= {"init_method": f"file://{os.environ[STORE_VARIABLE]}"}
        options |= {"rank": rank, "world_size": world}
    elif not is_started():
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if cuda and world > 1:
        options |= {"device_id": place}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **options)
    yield Runtime(rank, world, place)
    # Not after an error: the others may be stuck in a collective.
    dist.barrier()
    dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End this process.

    One of several ends at once: threads of the communication backends may abort a process
    that takes its time to clean up, when its work is long done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if is_started():
        os._exit(status)
    raise SystemExit(status)


def report_failure(failure: Failure) -> bool:
    """Tell :func:`run_processes`, if that started this process; whether it did."""
    folder = os.environ.get(REPORTS_VARIABLE)
    if not folder:
        return False
    partial = Path(folder, f"rank{failure.rank}.partial")
    partial.write_text(json.dumps(asdict(failure)))
    partial.replace(partial.with_suffix(".json"))
    return True


def run_test(
    device: str,
    timeout: float | None,
    test: Callable[[Runtime], bool],
    verdict: Callable[[bool], str],
) -> int:
    """Run a test in this process; rank 0 says how it ended.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        timeout: Seconds until collectives give up.
        test: Whether it passed.
        verdict: What rank 0 prints.

    Returns:
        The exit status.
    """
    rank = 0
    try:
        with joined(device, timeout) as runtime:
            rank = runtime.rank
            passed = test(runtime)
            if runtime.is_main:
                print(verdict(passed), flush=True)
        return 0 if passed else EXIT_FAILED
    except Exception as error:
        failure = describe(error, rank)
        if not report_failure(failure) or failure.kind != "usage":
            print(failure.details or failure.error, file=sys.stderr)
        return failure.exit_code


def run_in_processes(
    script: str, arguments: Sequence[str], count: int, timeout: float | None
) -> int:
    """Run a script again in ``count`` processes that know of each other; the exit status."""
    command = [sys.executable, str(Path(script).resolve()), *arguments]
    return exit_status(run_processes(command, count, timeout=timeout))


def exit_status(failure: Failure | None) -> int:
    """Say what failed, unless the processes have; the exit status."""
    if failure is None:
        return 0
    if failure.details or failure.kind != "error":
        print(f"{failure.kind.replace('_', ' ')}: {failure.error}", file=sys.stderr)
    return failure.exit_code


def run_processes(
    command: Sequence[str],
    count: int,
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Failure | None:
    """Run ``command`` in ``count`` processes of one group and wait for them.

    Args:
        command: The command with its arguments.
        count: Number of processes.
        timeout: Seconds, after which all are killed.
        env: Further variables of their environment.

    Returns:
        What went wrong, or ``None``.
    """
    with tempfile.TemporaryDirectory(prefix="memory_test_") as folder:
        processes: list[subprocess.Popen[bytes]] = []
        with _killing(processes):
            for rank in range(count):
                variables = _environment(rank, count, folder) | dict(env or {})
                processes.append(subprocess.Popen(list(command), env=variables))
            in_time = _wait(processes, timeout)
            codes = [process.poll() for process in processes]
        return _failure_of(codes, Path(folder), None if in_time else timeout)


def _environment(rank: int, count: int, folder: str) -> dict[str, str]:
    threads = str(max(1, (os.cpu_count() or 1) // count))
    return {
        "OMP_NUM_THREADS": threads,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        STORE_VARIABLE: f"{folder}/store",
        REPORTS_VARIABLE: folder,
    }


@contextlib.contextmanager
def _killing(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Leave no process behind, also if this one is told to end."""

    def end(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float | None) -> bool:
    """Wait for all; False if some had to be given up without any having failed."""
    deadline = time.monotonic() + timeout if timeout else float("inf")
    failed = False
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return failed
        if not failed and any(process.poll() not in (0, None) for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)
    return True


def _failure_of(codes: Sequence[int | None], folder: Path, timeout: float | None) -> Failure | None:
    if timeout is not None:
        return Failure("timeout", f"no result after {timeout:g} s; all processes were ended")
    reports = [Failure(**json.loads(p.read_text())) for p in sorted(folder.glob("rank*.json"))]
    silent = {report.rank for report in reports}
    ended = [(code, rank) for rank, code in enumerate(codes) if code and rank not in silent]
    reports += [describe_exit(code, rank) for code, rank in ended]
    # One that ran out of memory makes the others fail in their collectives.
    return min(reports, key=lambda f: (f.kind == "error", f.rank), default=None)
