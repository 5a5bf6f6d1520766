"""Draws what ``norm_kernels.py`` measured.

python memory_test/benchmarks/kernel_plot.py RESULT.json --png docs/images/NAME.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def draw_width(axes: Any, rows: list[Row]) -> None:
    """Rate of the width kernel beside cuBLAS' weight gradient."""
    rows = [r for r in rows if r["dtype"] == "torch.bfloat16" and r["p"] >= 1024]
    names = [f"{r['d']}x{r['p']}\nT={r['T']}" for r in rows]
    places = range(len(rows))
    axes.bar([x - 0.2 for x in places], [r["cublas_tflops"] for r in rows], 0.4, label="cuBLAS")
    axes.bar([x + 0.2 for x in places], [r["tflops"] for r in rows], 0.4, label='"width"')
    axes.set_xticks(list(places), names, fontsize=6, rotation=90)
    axes.set_ylabel("TFLOP/s")
    axes.set_title("Norm from tiles of the product, against a weight gradient")
    axes.legend(loc="lower right")


def draw_gram(axes: Any, rows: list[Row]) -> None:
    """How much faster the Gram kernel is than the two products alone."""
    for d, p in dict.fromkeys((r["d"], r["p"]) for r in rows):
        own = [r for r in rows if (r["d"], r["p"]) == (d, p)]
        axes.plot([r["T"] for r in own], [r["over_two_bmm"] for r in own], "o-", label=f"{d}x{p}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.axhline(1.5, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("times faster than two bmm")
    axes.set_ylim(bottom=0)
    axes.set_title("Norm from Gram matrices")
    axes.legend(title="d x p")


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--png", type=Path, required=True)
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = json.loads(options.result.read_text())
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4.5), width_ratios=(2, 1), layout="constrained"
    )
    draw_width(left, [row for row in found["kernels"] if row["section"] == "width"])
    draw_gram(right, [row for row in found["kernels"] if row["section"] == "gram"])
    figure.suptitle(
        f"{found['device']}, bf16, Triton {found['versions']['triton']}, {found['date'][:10]}"
    )
    options.png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.png, dpi=110)


if __name__ == "__main__":
    main()
