"""Errors that stop runs of the isolation check: the model's, torch's, or the package's own."""

from __future__ import annotations

import os
import traceback
from typing import Any

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Errors of a model that does not run on so few samples.
RUN_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, KeyError)

RANDOM = "it draws random numbers of its own, other ones in batches of other sizes"
HIDDEN = (
    "it gives the same samples other gradients when it runs again, though it draws no random "
    "numbers that programs share. Either it has a generator of its own, or it keeps something of "
    "samples where nothing finds it (a global variable, a closure, an attribute of a class or of "
    "an object that is no module), which no clipping bounds: keep nothing"
)


class IncomparableError(Exception):
    """Units cannot be compared; says why.

    Args:
        reason: Why.
        compared: Whether a unit among others and beside copies of itself is the same.
    """

    def __init__(self, reason: str, *, compared: bool = False) -> None:
        super().__init__(reason)
        self.compared = compared


def cannot(error: Exception, what: str) -> str:
    """Why the model, which an error stopped in a run on ``what``, is not compared."""
    if isinstance(error, IncomparableError):
        return str(error)
    return f"it cannot be run on {what}: {_brief(error)}"


def _brief(error: BaseException) -> str:
    """An error in one line: torch explains some at length."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def is_theirs(found: Any) -> bool:
    """Whether a model stopped a run, or torch in it."""
    refused = isinstance(found, IncomparableError)
    return isinstance(found, Exception) and not refused and not _is_ours(found)


def _is_ours(error: BaseException) -> bool:
    """Whether the package raised this itself, rather than torch or the model."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(PACKAGE)
