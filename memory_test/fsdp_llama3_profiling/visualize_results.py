"""Plots and a table of results: python visualize_results.py --input-dir results --output-dir plots

Reads every JSON file below the input folder: results of ``single_experiment.py`` and records of
failures. Writes PNG files and ``summary.md``. Of runs that are the same the latest counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.comparison import (
    Group,
    failures_table,
    group_results,
    pairs_table,
    phases_table,
    runs_table,
)
from memory_test.common.failures import EXIT_USAGE, StorageError, UsageError, describe
from memory_test.common.results import prepare_folder, read_results, write_text


def draw(group: Group, folder: Path, prefix: str) -> list[str]:
    """Draw all plots of a group; the names of the files."""
    from memory_test.common.plots import PLOTS, save

    written = []
    for name, plot in PLOTS.items():
        figure = plot(group)
        if figure is not None:
            written.append(f"{prefix}{name}.png")
            save(figure, folder / written[-1])
    return written


def summarise(
    groups: Sequence[Group],
    pictures: Sequence[Sequence[str]],
    failures: Sequence[dict[str, Any]],
    unread: Sequence[str],
) -> str:
    """The results as Markdown."""
    parts = ["# Results"]
    for group, files in zip(groups, pictures, strict=True):
        versions = sorted(
            {", ".join(f"{k} {v}" for k, v in r["versions"].items()) for r in group.results}
        )
        parts += [f"## {group.title}", "Measured with " + "; ".join(versions) + "."]
        parts.append(runs_table(group))
        if group.pairs():
            parts += ["### Deferred against immediate norms", pairs_table(group)]
        parts += ["### Phases of a step, ms", phases_table(group)]
        parts.append("\n".join(f"![{Path(f).stem.replace('_', ' ')}]({f})" for f in files))
    if failures:
        parts += ["## Runs without a result", failures_table(failures)]
    if unread:
        parts += ["## Files that are no results", "\n".join(f"- {line}" for line in unread)]
    parts.append(NOTE)
    return "\n\n".join(parts) + "\n"


NOTE = """## How to read this

Times are those of whole steps (forward, backward, clipping, noise, optimizer), the slowest process;
ratios are to the non-private run on as many devices at the same length. Memory of a GPU is the
peak of its allocator, on the CPU the largest resident set of a process, which holds Python and
torch too. `reduction` overlaps other phases, so it is not stacked with them. The parts of memory
peak at different times: their sum is not the peak."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status: 0 drawn, 1 not written, 2 nothing to draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--input-dir", type=Path, default=Path("results"))
    parser.add_argument("--output-dir", type=Path, default=Path("plots"))
    args = parser.parse_args(argv)
    try:
        prepare_folder(args.output_dir / "summary.md")
        results, failures, unread = read_results(args.input_dir)
        for line in unread:
            print(f"skipped {line}", file=sys.stderr)
        if not results:
            raise UsageError(
                f"--input-dir {args.input_dir}: no results ({len(failures)} failures, "
                f"{len(unread)} other files); run single_experiment.py first"
            )
        groups = group_results(results)
        prefixes = [f"{group.slug}_" if len(groups) > 1 else "" for group in groups]
        pictures = [draw(g, args.output_dir, p) for g, p in zip(groups, prefixes, strict=True)]
        text = summarise(groups, pictures, failures, unread)
        write_text(args.output_dir / "summary.md", text)
    except (UsageError, StorageError) as error:
        print(error, file=sys.stderr)
        return describe(error).exit_code
    except ImportError as error:
        print(f"plots need matplotlib (pip install matplotlib): {error}", file=sys.stderr)
        return EXIT_USAGE
    print(f"{len(results)} results, {len(failures)} failures: see {args.output_dir}/summary.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
