"""Draws the TensorBoard curves of a run as one picture.

python examples/curves.py runs/demo/curves --out runs/demo/curves.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Name of a curve -> its title. Each has an axis of its own; the horizontal one counts steps.
TITLES = {
    "loss": "training loss",
    "test": "test score",
    "epsilon": "epsilon spent",
    "tokens_per_second": "tokens a second",
}


def read(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of each curve of :data:`TITLES` in a folder of TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found = {}
    for name in TITLES:
        if name in events.Tags()["scalars"]:
            points = sorted({p.step: p.value for p in events.Scalars(name)}.items())
            found[name] = ([step for step, _ in points], [value for _, value in points])
    return found


def draw(curves: dict[str, tuple[list[int], list[float]]], path: Path) -> None:
    """Write the picture, a panel for each curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(3.4 * len(curves), 2.8), squeeze=False)
    for axes, (name, (steps, values)) in zip(panels[0], curves.items(), strict=True):
        axes.plot(steps, values, color="#08458b", marker="." if len(steps) < 20 else "")
        axes.set(title=TITLES[name], xlabel="step")
        axes.grid(color="#e6e6e6")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; the exit status: 0 drawn, 2 nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what --logdir named")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    args = parser.parse_args(argv)
    curves = read(args.folder) if args.folder.is_dir() else {}
    if not curves:
        print(f"{args.folder}: no curves here; train with --logdir", file=sys.stderr)
        return 2
    draw(curves, args.out)
    print(f"Curves: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
