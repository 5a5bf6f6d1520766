"""What can go wrong in a run, how it is recorded, and the exit status that says so."""

from __future__ import annotations

import errno
import os
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

# A run that failed; a request that cannot be met; no memory; no answer in time.
EXIT_FAILED, EXIT_USAGE, EXIT_MEMORY, EXIT_TIMEOUT = 1, 2, 3, 124

# "KIND:MODE,..." (or "KIND" for all modes): fail on purpose, to see how a failure is reported.
PLANT_VARIABLE = "MEMORY_TEST_PLANT"

_EXITS = {
    "error": EXIT_FAILED,
    "storage": EXIT_FAILED,
    "usage": EXIT_USAGE,
    "out_of_memory": EXIT_MEMORY,
    "timeout": EXIT_TIMEOUT,
}


class UsageError(Exception):
    """Something that the caller can put right; the text says how."""


class StorageError(Exception):
    """A result could not be written; what was there before is still there."""


@dataclass(frozen=True)
class Failure:
    """How a run ended that gave no result.

    Attributes:
        kind: ``"usage"``, ``"out_of_memory"``, ``"timeout"``, ``"storage"`` or ``"error"``.
        error: One line for people.
        rank: The process that failed; -1 if not known.
        details: End of the traceback.
    """

    kind: str
    error: str
    rank: int = -1
    details: str = ""

    @property
    def exit_code(self) -> int:
        """Exit status of a script that ends with this failure."""
        return _EXITS[self.kind]

    def record(self, **settings: Any) -> dict[str, Any]:
        """The failure as JSON, with what was asked for."""
        return {"status": "failed", **asdict(self), **settings, "when": time.strftime("%F %T")}


def describe(error: BaseException, rank: int = -1) -> Failure:
    """The failure that an exception stands for."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0]
    if "can't allocate memory: " in first:  # after the place in torch's source
        first = first[first.index("can't allocate memory: ") :]
    if isinstance(error, UsageError):
        return Failure("usage", text, rank)
    details = "".join(traceback.format_exception(error)[-12:]) + _causes(error)
    if isinstance(error, StorageError) or getattr(error, "errno", None) == errno.ENOSPC:
        return Failure("storage", first, rank, details)
    if is_out_of_memory(error):
        return Failure("out_of_memory", first, rank, details)
    return Failure("error", f"{type(error).__name__}: {first}", rank, details)


def _causes(error: BaseException) -> str:
    """A line for each exception that led to ``error``, which long traces leave out."""
    lines, known = [], {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in known:
        known.add(id(cause))
        lines.append(f"caused by: {type(cause).__name__}: {cause}\n")
        cause = cause.__cause__ or cause.__context__
    return "".join(lines)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return (
        "out of memory" in text or "can't allocate memory" in text or "failed to allocate" in text
    )


def describe_exit(code: int, rank: int) -> Failure:
    """The failure of a process that left nothing but its exit status."""
    if code == -signal.SIGKILL:
        text = f"process {rank} was killed: most likely the system ran out of memory"
        return Failure("out_of_memory", text, rank)
    if code < 0:
        return Failure("error", f"process {rank} ended by {signal.Signals(-code).name}", rank)
    return Failure("error", f"process {rank} ended with exit status {code}", rank)


def fail_if_planted(mode: str, rank: int) -> None:
    """Hang, or ask for memory that there is not, if the environment says so.

    Raises:
        RuntimeError: Of the allocator, for the kind ``oom``.
        UsageError: The variable names another kind.
    """
    for plant in filter(None, os.environ.get(PLANT_VARIABLE, "").split(",")):
        kind, _, wanted = plant.partition(":")
        if kind not in ("oom", "hang"):
            raise UsageError(f"{PLANT_VARIABLE} must be oom or hang, got {kind!r}")
        if wanted in ("", mode):
            _fail(kind, rank)


def _fail(kind: str, rank: int) -> None:
    if kind == "oom":
        import torch

        torch.empty(1 << 60, dtype=torch.uint8)
    while kind == "hang" and rank == 0:  # the others wait for this one in their next collective
        time.sleep(1)
