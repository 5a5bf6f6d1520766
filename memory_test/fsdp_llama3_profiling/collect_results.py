"""Put all that was measured below a folder into one file, to be committed.

    python collect_results.py --input-dir results --output ../results/MODEL_CARDS_DATE_WHAT.json

Takes results and failures of ``single_experiment.py``, and what ``test_deferred_norm.py``,
``test_accuracy_comparison.py``, ``benchmark_norm_parallel.py`` and ``profiling_script.py`` left
there. ``visualize_results.py`` and ``memory_test/benchmarks/tables.py`` read such files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.failures import StorageError, UsageError, describe
from memory_test.common.results import (
    check_result,
    failure_path,
    prepare_folder,
    write_json,
)
from memory_test.common.schema import head, is_result_file

ROOT = Path(__file__).resolve().parents[2]
# Keys of the file, and where else each kind of result is recognised by.
PARTS = ("results", "failures", "deferred", "norms", "accuracy", "profiles")


def part_of(found: Any) -> str | None:
    """Which part of the file a JSON value belongs to."""
    if not isinstance(found, dict):
        return None
    if found.get("status") == "failed":
        return "failures"
    if "trainer" in found and "kernels" in found:
        return "profiles"
    if found.get("kind") in PARTS:
        return found["kind"]
    return None if check_result(found) else "results"


def trimmed(part: str, found: dict[str, Any]) -> dict[str, Any]:
    """A value without what only its own folder needs."""
    if part == "failures":
        error = str(found.get("error", "")).replace(f"{ROOT}/", "")
        return {k: v for k, v in found.items() if k != "details"} | {"error": error}
    if part != "profiles":
        return found
    memory = {k: v for k, v in found["memory"].items() if k != "curve"}
    kernels = {k: v for k, v in found["kernels"].items() if k != "longest"}
    longest = [{**k, "name": k["name"][:100]} for k in found["kernels"]["longest"][:5]]
    return {**found, "memory": memory, "kernels": {**kernels, "longest": longest}}


def collect(folder: Path) -> tuple[dict[str, list[Any]], list[str]]:
    """All parts, and the files that belong to none.

    Raises:
        UsageError: There is no such folder, or nothing in it.
    """
    if not folder.is_dir():
        raise UsageError(f"--input-dir {folder}: no such folder")
    parts: dict[str, list[Any]] = {part: [] for part in PARTS}
    others = []
    for path in sorted(folder.rglob("*.json")):
        if path.name.endswith(".trace.json"):
            continue
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            others.append(f"{path}: {error}")
            continue
        if is_result_file(found):
            for part in PARTS:
                parts[part] += found.get(part, [])
        elif (part := part_of(found)) is None:
            others.append(f"{path}: no result")
        elif part != "failures" or not path.with_name(_result_of(path)).is_file():
            parts[part].append(trimmed(part, found))
    if not any(parts.values()):
        raise UsageError(f"--input-dir {folder}: no results")
    return parts, others


def _result_of(failure: Path) -> str:
    """Name of the result whose failure this would record: there may be one all the same."""
    suffix = failure_path(Path("x.json")).name.removeprefix("x")
    return failure.name.removesuffix(suffix) + ".json"


def _head(what: str, parts: dict[str, list[Any]]) -> dict[str, Any]:
    """What the rows say together of when and where they were measured."""
    rows = [row for name in PARTS for run in parts[name] for row in (run, *run.get("rows", ()))]
    found = {k: v for row in rows for k, v in row.get("versions", {}).items()}
    device = next((row["device"] for row in rows if "device" in row), "")
    world = max((row.get("num_processes", 1) for row in rows), default=1)
    dates = [row["date"] for row in rows if "date" in row]
    return {**head(what, device, found, world), **({"date": max(dates)} if dates else {})}


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--input-dir", type=Path, default=Path("results"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--what", default="", help="a sentence about the run")
    args = parser.parse_args(argv)
    try:
        prepare_folder(args.output)
        parts, others = collect(args.input_dir)
        write_json(args.output, {**_head(args.what, parts), **parts})
    except (UsageError, StorageError) as error:
        print(error, file=sys.stderr)
        return describe(error).exit_code
    for line in others:
        print(f"left out {line}", file=sys.stderr)
    counts = ", ".join(f"{len(found)} {part}" for part, found in parts.items() if found)
    print(f"{counts}: written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
