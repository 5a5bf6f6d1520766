"""Results as files: written whole or not at all, checked when they are read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memory_test.common.failures import StorageError, UsageError
from memory_test.common.schema import RESULT, is_result_file, lacking


def check_result(result: Any) -> list[str]:
    """What is wrong with a step of a series; an empty list if nothing."""
    return ["is no JSON object"] if not isinstance(result, dict) else lacking(result, RESULT)


def time_summary(times_ms: list[float]) -> dict[str, Any]:
    """The times of the iterations, and their mean, median and range."""
    return {
        "avg_time_ms": round(statistics.fmean(times_ms), 3),
        "median_time_ms": round(statistics.median(times_ms), 3),
        "min_time_ms": round(min(times_ms), 3),
        "max_time_ms": round(max(times_ms), 3),
        "times_ms": [round(t, 3) for t in times_ms],
    }


def prepare_folder(path: Path) -> None:
    """Make the folder of a file that is to be written, before hours of work.

    Raises:
        UsageError: It cannot be made or written to.
    """
    folder = path.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from error
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{path} cannot be written: it is a folder, or lies in one without rights")


def write_json(path: Path, value: Any) -> None:
    """Write a file whole: an earlier one stays until the new one is complete.

    Raises:
        StorageError: No space, or no right to write; the earlier file is kept.
    """
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """See :func:`write_json`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """See :func:`write_json`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "no space left on the device" if full else error.strerror
        kept = "; the earlier file is kept" if path.exists() else ""
        raise StorageError(f"{path} cannot be written: {why}{kept}") from error


def failure_path(output: Path) -> Path:
    """Where the failure of a run is recorded whose result would be ``output``."""
    return output.with_suffix(".failure.json")


def read_results(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """All results below a folder, the failures, and what could not be read.

    Files of the layout of :mod:`memory_test.common.schema` hold many of them.

    Raises:
        UsageError: There is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"--input-dir {folder}: no such folder")
    results, failures, unread = [], [], []
    for path in sorted(folder.rglob("*.json")):
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            unread.append(f"{path}: {error}")
            continue
        if is_result_file(found):
            results += [{**r, "file": str(path)} for r in found.get("results", ())]
            failures += [{**f, "file": str(path)} for f in found.get("failures", ())]
        elif isinstance(found, dict) and found.get("status") == "failed":
            failures.append({**found, "file": str(path)})
        elif wrong := check_result(found):
            unread.append(f"{path}: {'; '.join(wrong[:3])}")
        else:
            results.append({**found, "file": str(path)})
    return results, failures, unread


def latest(results: Iterable[dict[str, Any]], keys: Iterable[str]) -> list[dict[str, Any]]:
    """Of results that agree in ``keys``, the one with the latest date."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    keys = tuple(keys)
    for result in sorted(results, key=lambda r: r["date"]):
        newest[tuple(result[key] for key in keys)] = result
    return list(newest.values())
