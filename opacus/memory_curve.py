"""Time of a private step over the memory that it may have, for a model of your own.

    python -m opacus.memory_curve train.py:build --limits 1.0,0.5,0.3 --plot curve.png

``build()`` in ``train.py`` returns ``(model, step)``: a private model, of one of the ``_bk`` modes,
and a function that takes one whole training step. On a GPU limits are ``memory_budget`` (shares of
the card, or GiB from 1.5 on), on a CPU GiB of ``held_budget``. Start several ranks by torchrun.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from opacus.core.sums.report import GIB


def curve(
    model: Any, step: Callable[[], Any], limits: Sequence[float], *, steps: int = 3, warm: int = 2
) -> list[dict[str, Any]]:
    """Measure steps under one limit of memory after the other.

    Args:
        model: Private, of one of the ``_bk`` modes.
        step: Takes one training step.
        limits: See the module.
        steps: How many are timed.
        warm: How many are not, before them.

    Returns:
        A row for each limit: ``limit_gib``, ``ms`` (median), ``peak_gib`` (0 on a CPU), ``ways``
        (number of layers by way), and ``error`` where memory ran out.
    """
    cuda, rows = next(model.parameters()).is_cuda, []
    whole = torch.cuda.get_device_properties("cuda").total_memory if cuda else 0
    for limit in limits:
        given = limit * whole if cuda and limit <= 1 else limit * GIB
        setattr(model, "memory_budget" if cuda else "held_budget", int(given))
        row: dict[str, Any] = {"limit_gib": given / GIB, "ms": 0.0, "peak_gib": 0.0, "ways": {}}
        rows.append(row)
        try:
            row |= _measured(step, steps, warm, cuda)
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).split(".")[0]
        row["ways"] = model._strategy.planner.report.ways
        gc.collect()
    setattr(model, "memory_budget" if cuda else "held_budget", None)
    return rows


def _measured(step: Callable[[], Any], steps: int, warm: int, cuda: bool) -> dict[str, float]:
    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(warm):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    return {"ms": statistics.median(times), "peak_gib": peak}


def text(rows: Sequence[dict[str, Any]]) -> str:
    """A table."""
    lines = [f"{'limit GiB':>10} {'peak GiB':>10} {'ms':>10}  layers"]
    for row in rows:
        ways = row.get("error") or ", ".join(f"{n} {way}" for way, n in row["ways"].items())
        lines.append(
            f"{row['limit_gib']:>10.3g} {row['peak_gib']:>10.2f} {row['ms']:>10.1f}  {ways}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a picture of the curve; needs matplotlib."""
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = sorted((r["limit_gib"], r["ms"]) for r in rows if "error" not in r)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot([limit for limit, _ in good], [ms for _, ms in good], marker="o")
    axes.set(xlabel="memory allowed [GiB]", ylabel="time of a step [ms]", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def load(place: str) -> Callable[[], tuple[Any, Callable[[], Any]]]:
    """The function that ``FILE.py:NAME`` names.

    Raises:
        ValueError: There is no such file or function.
    """
    path, _, name = place.partition(":")
    spec = importlib.util.spec_from_file_location("memory_curve_model", path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise ValueError(f"there is no Python file {path!r}: give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name!r}: give FILE.py:FUNCTION")
    found: Callable[[], tuple[Any, Callable[[], Any]]] = getattr(module, name)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m opacus.memory_curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("build", help="FILE.py:FUNCTION, which returns (model, step)")
    add("--limits", default="1.0,0.6,0.4,0.3,0.2", help="separated by commas")
    add("--steps", type=int, default=3, help="how many are timed")
    add("--json", type=Path, help="write the rows to this file")
    add("--plot", type=Path, help="write a picture to this file; needs matplotlib")
    args = parser.parse_args(argv)
    try:
        build = load(args.build)
    except ValueError as error:
        parser.error(str(error))
    model, step = build()
    rows = curve(model, step, [float(limit) for limit in args.limits.split(",")], steps=args.steps)
    if int(os.environ.get("RANK", "0")):
        return
    print(text(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
