"""Ctrl-C ends a run between two steps, on all processes, with a line and not a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from runtime import Runtime, this_rank

FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for what a process died of
# What gloo and NCCL say when another process has ended.
LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exited")


class Stopped(Exception):  # noqa: N818 (no error)
    """The user has asked for the end, and a step is complete."""


class StopRequest:
    """Notes Ctrl-C, which processes see at different times, until all of them can stop."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.asked = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        # torchrun repeats the signal to its processes; alone, a second one is impatience.
        if self.asked and self._runtime.world_size == 1:
            raise KeyboardInterrupt
        self.asked = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note Ctrl-C within the body, instead of raising KeyboardInterrupt anywhere."""
        before = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @staticmethod
    def command(resume: str) -> str:
        """The command that started this process, with ``--resume``."""
        words = [w for i, w in enumerate(sys.argv) if not _is_resume(sys.argv, i)]
        size = int(os.environ.get("WORLD_SIZE", 1))
        own = size == 1 or any(word.startswith("--processes") for word in words)
        launcher = ["python"] if own else ["torchrun", f"--nproc_per_node={size}"]
        return shlex.join([*launcher, *words, "--resume", resume])


def _is_resume(words: list[str], index: int) -> bool:
    before = words[index - 1] if index else ""
    return words[index].startswith("--resume=") or "--resume" in (words[index], before)


@contextlib.contextmanager
def short_errors(script: str) -> Iterator[None]:
    """End in one line if something is refused, or Ctrl-C is pressed outside of training.

    Under torchrun the line is also what its closing report shows; of any other error it shows the
    last line, after the traceback of the process that failed. Those that lost it print none.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        _end(f"{script}: error: {error}", 2)
    except KeyboardInterrupt:
        _end(f"{script}: interrupted", 130)
    except Exception as error:
        if FILE not in os.environ:
            raise
        line = " ".join(f"{type(error).__name__}: {error}".split())
        if not any(words in line for words in LOST):
            sys.excepthook(*sys.exc_info())
        _tell_torchrun(line)
        sys.exit(1)


def _end(line: str, status: int) -> None:
    if this_rank() == 0:
        print(line, file=sys.stderr, flush=True)
    _tell_torchrun(line)
    sys.exit(status)


def _tell_torchrun(line: str) -> None:
    path = os.environ.get(FILE)
    if path:
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))
