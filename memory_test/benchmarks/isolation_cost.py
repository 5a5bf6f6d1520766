"""What the isolation check costs: steps with a check each, beside steps without.

    python memory_test/benchmarks/isolation_cost.py --modes ghost_bk,ghost --output out.json

A run checks its first steps, each new structure of a batch, and one step in ``interval`` (1,000)
after those. ``share`` is what that costs of a run: the time that a check adds to its step, over the
time of ``interval`` steps. On a CPU the layers of the model are thin.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.benchmarks.cases import Suite
from memory_test.benchmarks.ways import Way
from memory_test.common.launch import Runtime
from memory_test.common.schema import head, versions

WARM, STEPS = 4, 7


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each mode and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default="hooks,ghost,ghost_bk")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    rows = [measure(mode, args.batch, args.tokens) for mode in args.modes.split(",")]
    for row in rows:
        print(json.dumps(row))
    if args.output:
        import torch

        what = "steps with an isolation check each, beside steps without; ms: medians of 7 after 4"
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        args.output.write_text(
            json.dumps({**head(what, card, versions()), "isolation": rows}, indent=1)
        )


def measure(mode: str, batch: int, tokens: int) -> dict[str, Any]:
    """Medians of both kinds of steps of one mode."""
    import torch

    from memory_test.benchmarks.contenders import Recipe, build
    from memory_test.common.timing import milliseconds

    cuda = torch.cuda.is_available()
    runtime = Runtime(0, 1, torch.device("cuda" if cuda else "cpu"))
    suite = Suite("llama3-1b" if cuda else "thin-llama3-1b", (), (), wrapping="single")
    recipe = Recipe(suite, tokens, batch, torch.bfloat16 if cuda else torch.float32)
    contender = build(recipe, Way(mode), runtime)
    ids = contender.ids(batch, tokens)

    def step() -> float:
        return milliseconds(lambda: contender.step(ids), runtime.device)

    isolation = contender.model.isolation
    interval, ms = isolation.interval, {}
    for name, every in (("without", 10**9), ("with", 1)):
        isolation.interval = every
        for _ in range(WARM):
            step()
        ms[name] = statistics.median(step() for _ in range(STEPS))
    share = (ms["with"] - ms["without"]) / (interval * ms["without"])
    return {"mode": mode, "batch": batch, "tokens": tokens, "ms": ms, "share": share}


if __name__ == "__main__":
    main()
