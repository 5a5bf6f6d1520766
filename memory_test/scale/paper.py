"""Training of 8B to 405B on 8 to 4,096 cards, on paper.

    python -m memory_test.scale.paper --output memory_test/results/NAME.json --markdown TABLE.md

Each model at the numbers of cards that hold its state: ways, memory, tokens a second, and what sets
the pace or does not fit. Nothing here was measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from memory_test.common.results import write_json, write_text
from memory_test.common.schema import head
from memory_test.scale.prediction import predict
from memory_test.scale.rates import rates_of
from memory_test.scale.run import Run
from memory_test.scale.shapes import SHAPES
from memory_test.scale.ways import planned

GIB = 2**30
SHARE = 0.95  # of the card, as the default budget
HOST = 120 * GIB  # of each rank
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b")
CARDS = (8, 64, 512, 4096)
WHAT = (
    "predictions of the cost model, nothing measured: checkpointed blocks, AdamW, H200, 8 cards a "
    "host, 4,096 tokens a sample, the default budget"
)


def rows(card: str = "h200") -> list[dict[str, Any]]:
    """A row for each model, number of cards, batch and kind of stored gradients."""
    found, rates = [], rates_of(card)
    for model in MODELS:
        for gpus in CARDS:
            for batch, stored in ((1, 2), (4, 2), (4, 1)):
                run = Run(
                    SHAPES[model], gpus, 4096, batch, checkpointing=True, optimizer="adamw",
                    shard=min(gpus, 512), holds_logits=False, stored=stored,
                )  # fmt: skip
                run = planned(run, rates, SHARE * rates.memory_bytes, HOST)
                found.append(_row(model, run, predict(run, rates)))
    return found


def _row(model: str, run: Run, prediction: Any) -> dict[str, Any]:
    said = prediction.record()
    fits = said["peak_gb"] <= SHARE * said["capacity_gb"]
    plain = prediction.plain_memory.peak <= prediction.capacity
    breaks = said["bound_by"] if fits else f"memory: {said['peak_when']}"
    return {
        "model": model,
        "cards": run.gpus,
        "batch": run.batch,
        "stored": "float8" if run.stored == 1 else "bfloat16",
        "held": run.held_blocks,
        "offloaded": run.offloaded_blocks,
        "replayed": run.replayed_blocks,
        "peak_gib": said["peak_gb"],
        "fits": fits,
        "fits_without_privacy": plain,
        "ratio": said["time_ratio"],
        "tokens_per_second": round(run.gpus * run.tokens_here / prediction.duration.step),
        "breaks_first": breaks,
    }


def table(found: list[dict[str, Any]]) -> str:
    """In Markdown."""
    names = ("model", "cards", "batch", "stored", "blocks held / offloaded / again", "peak GiB",
             "time", "tokens/s", "breaks first")  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in found:
        ways = f"{row['held']} / {row['offloaded']} / {row['replayed']}"
        speed = f"{row['tokens_per_second']:,}" if row["fits"] else "-"
        cells = (row["model"], row["cards"], row["batch"], row["stored"], ways,
                 f"{row['peak_gib']:.0f}", f"{row['ratio']:.2f}×", speed,
                 row["breaks_first"])  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    found = rows()
    write_json(args.output, {**head(WHAT, "on paper", {}), "on_paper": found})
    if args.markdown is not None:
        write_text(args.markdown, table(found))


if __name__ == "__main__":
    main()
