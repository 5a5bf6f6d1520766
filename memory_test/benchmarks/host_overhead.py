"""Host time and operations that privacy adds to a step of many tiny layers.

    python memory_test/benchmarks/host_overhead.py --output out.json

The model has the layers of Llama-3.2-1B in negligible sizes, so a step takes the time of Python and
the dispatcher. On a GPU that time limits a step on few tokens. Non-private
and private steps take turns: on one process, under FSDP2 on one, and under FSDP2 on two. Times are
the processor's, of the fastest step; on a GPU until all work is issued. Operations are those that
reach the dispatcher below autograd, without views and allocations: about one kernel launch each. On
a GPU noise, sums of squares and weighted sums share launches that a CPU does one by one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.benchmarks.cases import Suite
from memory_test.benchmarks.ways import EAGER, Way, ways_of
from memory_test.common.failures import describe
from memory_test.common.launch import (
    Runtime,
    exit_status,
    is_started,
    joined,
    leave,
    report_failure,
    run_processes,
)
from memory_test.common.results import prepare_folder

MODEL = "thin-llama3-1b"
# So few tokens that no layer has a weight for each sample: those of 1B are too wide for it.
BATCH, TOKENS = 2, 48
SINGLE = "ghost_bk,flash_bk,ghost,hooks"
SHARDED = "ghost_fsdp_bk,flash_fsdp_bk,ghost_fsdp"
# Name of a setting -> wrapping, number of processes, modes.
SETTINGS = {
    "one process": ("single", 1, SINGLE),
    "FSDP2 on one": ("blocks", 1, SHARDED),
    "FSDP2 on two": ("blocks", 2, SHARDED),
}
# Neither these start a kernel, nor views that are not counted as such.
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
VIEWS = ("_unsafe_view",)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iters", type=int, default=20, help="timed steps of each mode")
    parser.add_argument("--modes", help="only these, MODE or MODE+deferred, ...")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="only these")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--top", type=int, default=0, help="operations to list by mode")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a setting may take")
    args = parser.parse_args(argv)
    args.settings = args.settings.split(",")
    unknown = sorted(set(args.settings) - set(SETTINGS))
    if unknown or args.iters < 1:
        parser.error(f"--iters must be at least 1, --settings among {', '.join(SETTINGS)}")
    return args


def chosen_ways(setting: str, modes: str | None) -> list[Way]:
    """The non-private step and the requested private ones of a setting."""
    ways = ways_of(SETTINGS[setting][2])
    if modes is not None:
        ways = tuple(w for w in ways_of(modes) if w.mode in {way.mode for way in ways})
    return [Way(EAGER), *ways]


def measure(
    setting: str, ways: Sequence[Way], iters: int, runtime: Runtime
) -> list[dict[str, Any]]:
    """Rows of a setting, the non-private step first; a collective call."""
    import torch

    from memory_test.benchmarks.contenders import Recipe, build

    torch.set_num_threads(1)
    suite = Suite(MODEL, (), (), wrapping=SETTINGS[setting][0])
    half = runtime.device.type == "cuda"
    recipe = Recipe(suite, TOKENS, BATCH, torch.bfloat16 if half else torch.float32)
    contenders = [build(recipe, way, runtime) for way in ways]
    ids = contenders[0].ids(BATCH, TOKENS)
    times: list[list[float]] = [[] for _ in ways]
    operations = []
    for contender in contenders:
        for _ in range(3):
            contender.step(ids)
        operations.append(count(lambda c=contender: c.step(ids)))  # type: ignore[misc]
    gc.collect()
    gc.freeze()
    try:
        for _ in range(iters):
            for contender, taken in zip(contenders, times, strict=True):
                runtime.barrier()
                start = time.process_time()
                contender.step(ids)
                taken.append((time.process_time() - start) * 1e3)
    finally:
        gc.unfreeze()
    layers = sum(1 for m in contenders[0].model.modules() if m._parameters)
    return [
        _row(setting, way, taken, done, layers, first=(times[0], operations[0]))
        for way, taken, done in zip(ways, times, operations, strict=True)
    ]


def count(function: Any) -> Counter[str]:
    """How often ``function`` dispatched each operation, without views and allocations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    done: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = str(func.overloadpacket)
            if not func.is_view and name.rpartition(".")[2] not in (*ALLOCATIONS, *VIEWS):
                done[name] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        function()
    return done


def _row(
    setting: str,
    way: Way,
    taken: list[float],
    done: Counter[str],
    layers: int,
    first: tuple[list[float], Counter[str]],
) -> dict[str, Any]:
    ops, added = sum(done.values()), min(taken) - min(first[0])
    return {
        "setting": setting,
        "mode": str(way),
        "ms": round(min(taken), 3),
        "added_ms": round(added, 3),
        "added_ms_per_layer": round(added / layers, 4),
        "operations": ops,
        "added_operations": ops - sum(first[1].values()),
        "layers": layers,
        "by_operation": dict((done - first[1]).most_common()),
    }


def table(rows: Sequence[dict[str, Any]], top: int = 0) -> str:
    """The rows as text."""
    names = ("ms", "added", "a layer")
    lines = [f"{'setting':14} {'mode':20}" + "".join(f" {name:>8}" for name in names)]
    lines[0] += f" {'ops':>6} {'added':>6}"
    for row in rows:
        lines.append(
            f"{row['setting']:14} {row['mode']:20} {row['ms']:8.2f} {row['added_ms']:8.2f} "
            f"{row['added_ms_per_layer']:8.3f} {row['operations']:6} {row['added_operations']:6}"
        )
        for name, times in list(row["by_operation"].items())[:top]:
            lines.append(f"    {times:6} {name}")
    return "\n".join(lines)


def run_child(args: argparse.Namespace) -> int:
    """One process of one setting; rank 0 writes the rows to ``--output``."""
    (setting,) = args.settings
    try:
        with joined(args.device, args.timeout) as runtime:
            rows = measure(setting, chosen_ways(setting, args.modes), args.iters, runtime)
            if runtime.is_main:
                args.output.write_text(json.dumps(rows))
        return 0
    except Exception as error:
        failure = describe(error, int(os.environ.get("RANK", 0)))
        print(failure.details or failure.error, file=sys.stderr)
        report_failure(failure)
        return failure.exit_code


def run_settings(args: argparse.Namespace) -> int:
    """Each setting in processes of its own; the exit status."""
    rows: list[dict[str, Any]] = []
    if args.output is not None:
        prepare_folder(args.output)
    for setting in args.settings:
        with tempfile.TemporaryDirectory(prefix="host_overhead_") as folder:
            part = Path(folder, "rows.json")
            command = [sys.executable, str(Path(__file__).resolve()), "--settings", setting]
            command += ["--iters", str(args.iters), "--timeout", str(args.timeout)]
            command += ["--device", args.device, "--output", str(part)]
            command += ["--modes", args.modes] if args.modes else []
            threads = {"OMP_NUM_THREADS": "1"}
            failure = run_processes(
                command, SETTINGS[setting][1], timeout=args.timeout, env=threads
            )
            if failure is not None:
                return exit_status(failure)
            rows += json.loads(part.read_text())
    print(table(rows, args.top))
    if args.output is not None:
        args.output.write_text(json.dumps({"rows": rows, "host": _host()}, indent=1) + "\n")
    return 0


def _host() -> dict[str, Any]:
    import platform

    import torch

    return {"torch": torch.__version__, "python": platform.python_version(),
            "machine": platform.machine(), "cores": os.cpu_count()}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args = parse(argv)
    return run_child(args) if is_started() else run_settings(args)


if __name__ == "__main__":
    leave(main())
