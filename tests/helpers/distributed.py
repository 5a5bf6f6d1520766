"""Run a function in several gloo processes, and fail with stack traces when they hang.

    def job(rank, world_size, scale):          # module level: it is pickled by name
        total = torch.tensor([rank * scale])
        dist.all_reduce(total)
        return total

    results = run_distributed(job, 2, 10.0)    # [rank 0's result, rank 1's result]

Each process is forked from a server that has imported torch and this package and has done nothing
else (so no rank waits for imports, and none inherits what a test did), runs on one thread with the
global seed `SEED`, with the environment and the output of the caller, and has its default group
initialised through a file, so that no port can collide. Results travel through `torch.save`:
tensors, containers and picklable objects.

A job of many cases calls `progress(case)` before each: then a hang is one case that takes longer
than `STALL` seconds, however long all of them may take, and the error says which one it was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.reduction
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

SEED = 0
# What the server imports for all ranks: nothing that starts a thread or depends on a variable.
PRELOADED = [
    "pytest",
    "opacus",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
]


def preload(*modules: str) -> None:
    """Has the server import these too; call it where a test module begins, before any test runs."""
    PRELOADED.extend(name for name in modules if name not in PRELOADED)


# Limits are for hangs: what works stays far below them, also where others keep the machine busy.
# Longest time from one call of `progress` to the next.
STALL = 150.0
# A rank that waits for a peer which has already failed gets this long before it is ended, and one
# of a hang until its stack is written.
GRACE_AFTER_FAILURE, GRACE_AFTER_HANG = 20.0, 5.0


# Of this process, if it is a rank: when it has to have ended, and where its stacks go.
_RANK: dict[str, Any] = {}


def progress(case: Any) -> None:
    """Notes which case a rank has come to, and gives it `STALL` seconds; elsewhere does nothing."""
    if not _RANK:
        return
    _RANK["case"].write_text(str(case))
    time_left = max(0.1, min(STALL, _RANK["deadline"] - time.time()))
    faulthandler.dump_traceback_later(time_left, file=_RANK["stacks"])


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, or the trace of what it raises: one case, one failure."""
    progress(f"{function.__name__}{args}")
    try:
        return function(*args)
    except Exception:
        return traceback.format_exc()


class DistributedTestError(AssertionError):
    """A rank raised, died or hung; the message holds what every rank had to say."""


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 500,
    backend: str = "gloo",
    fresh: bool = False,
) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` in `world_size` processes.

    Args:
        fn: a module-level function (spawned processes import it by name).
        world_size: number of processes.
        *args: further arguments of `fn`, picklable.
        timeout: seconds, start-up included, after which the run counts as a hang.
        backend: "gloo", or "nccl" with one GPU a rank, which is the default device there.
        fresh: ranks are interpreters of their own, each with its own order of sets and addresses,
            as under torchrun; forked ones have the same. Seconds slower a rank. So are all ranks with GPUs.

    Returns:
        What `fn` returned, one entry a rank, in rank order.

    Raises:
        DistributedTestError: with the traceback of each rank that raised, or, after a hang, the
            stack of every thread of each rank that had not finished.
    """
    with tempfile.TemporaryDirectory(prefix="opacus_dist_") as folder:
        context = multiprocessing.get_context(
            "spawn" if fresh or backend == "nccl" else "forkserver"
        )
        context.set_forkserver_preload(PRELOADED)
        deadline = time.time() + timeout
        # Not daemons: those may not have children, and data loader workers are children.
        processes = [
            context.Process(
                target=_rank_main,
                args=(_Caller(), fn, rank, world_size, folder, deadline, args, backend),
            )
            for rank in range(world_size)
        ]
        with _single_threaded_children():
            for process in processes:
                process.start()
        try:
            hung = _wait(processes, deadline, Path(folder))
        finally:
            _end(processes)
        return _collect(processes, Path(folder), hung, timeout)


@contextlib.contextmanager
def _single_threaded_children() -> Iterator[None]:
    """Two cores and several ranks: more than one thread a rank only makes them wait."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


class _Caller:
    """The environment and the output of the caller, which a forked rank takes over."""

    def __getstate__(self) -> tuple[Any, ...]:
        outputs = [multiprocessing.reduction.DupFd(fd) for fd in (1, 2)]
        return dict(os.environ), os.getcwd(), outputs

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        environment, folder, outputs = state
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        for fd, output in zip((1, 2), outputs, strict=True):
            os.dup2(output.detach(), fd)


def _rank_main(
    caller: _Caller,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    deadline: float,
    args: tuple[Any, ...],
    backend: str,
) -> None:
    gc.freeze()  # what the server imported stays, and is shared with it
    with open(f"{folder}/stack{rank}", "w") as stacks:
        time_left = max(0.1, deadline - time.time())
        faulthandler.dump_traceback_later(time_left, file=stacks)
        _RANK.update(deadline=deadline, stacks=stacks, case=Path(folder, f"case{rank}"))
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        if backend == "nccl":
            torch.cuda.set_device(rank)
            torch.set_default_device("cuda")
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(hours=1),  # a hang is to be dumped, not to become an error
            )
            result = fn(rank, world_size, *args)
            _write(Path(folder, f"result{rank}"), _to_cpu(result))
            dist.barrier()
            Path(folder, f"done{rank}").touch()
        except BaseException:
            _write(Path(folder, f"error{rank}"), traceback.format_exc())
            # Destroying the group here could wait for peers that are stuck in a collective.
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()


def _to_cpu(value: Any) -> Any:
    """The parent compares on the CPU."""
    return tree_map_only(torch.Tensor, lambda t: t.cpu(), value)


def _write(path: Path, value: Any) -> None:
    """Atomic, so that the parent never reads half a file."""
    partial = path.with_suffix(".partial")
    torch.save(value, partial)
    partial.replace(path)


def _wait(processes: list[Any], deadline: float, folder: Path) -> bool:
    """Waits for all ranks; True if some were still running at the end of their time."""
    give_up = deadline + 1.0  # by then the stacks are on disk
    failed = stalled = False
    while any(process.is_alive() for process in processes):
        if time.time() > give_up:
            return not failed
        if not failed and any(process.exitcode not in (0, None) for process in processes):
            failed = True
            give_up = min(give_up, time.time() + GRACE_AFTER_FAILURE)
        if not stalled and any(path.stat().st_size for path in folder.glob("stack*")):
            stalled = True
            give_up = min(give_up, time.time() + GRACE_AFTER_HANG)  # for the other ranks' stacks
        time.sleep(0.02)
    return False


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _collect(processes: list[Any], folder: Path, hung: bool, timeout: float) -> list[Any]:
    complaints = [
        f"rank {rank} {complaint}"
        for rank, process in enumerate(processes)
        if (complaint := _complaint(rank, process, folder, hung, timeout))
    ]
    if complaints:
        raise DistributedTestError("\n".join(["a rank failed", *complaints]))
    return [
        torch.load(folder / f"result{rank}", weights_only=False) for rank in range(len(processes))
    ]


def _complaint(rank: int, process: Any, folder: Path, hung: bool, timeout: float) -> str | None:
    error, stack = folder / f"error{rank}", folder / f"stack{rank}"
    if error.exists():
        return f"raised:\n{torch.load(error, weights_only=False)}"
    # PyTorch's threads may abort a process that has done its work and is ending: on a busy CPU one
    # in ten that used FSDP2 on gloo, also without this package.
    aborted = process.exitcode == -signal.SIGABRT and (folder / f"done{rank}").exists()
    if process.exitcode == 0 or aborted:
        return None
    if hung:
        case = folder / f"case{rank}"
        where = f" in {case.read_text()}" if case.exists() else ""
        dump = stack.read_text() if stack.exists() else "(it had not started)"
        return f"hung{where} for {min(timeout, STALL if where else timeout):g} s:\n{dump}"
    return f"died with exit code {process.exitcode}"
