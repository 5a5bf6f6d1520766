"""Does a model learn as well if per-sample gradients are stored in float8 as in bf16?

    python memory_test/benchmarks/float8_accuracy.py --output memory_test/results/NAME.json

A transformer block on scikit-learn's digits, in bf16, one step and noise for both: runs with equal
seeds differ by the type alone in which gradients are stored.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import torch
from digits import DELTA, load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from memory_test.common.results import write_json
from memory_test.common.schema import head, versions
from opacus import PrivacyEngine
from opacus.core.sums.planner import Planner

WIDTH = 64
WHAT = (
    "test accuracy and loss after private training, per-sample gradients stored in bf16 or float8"
)


class Rows(nn.Module):
    """Reads the rows of an image as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.mix, self.up = nn.Linear(8, 8), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.norm = nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(8 * WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1).to(self.embed.weight.dtype))
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        logits: Tensor = self.head(x.flatten(1)).float()
        return logits


def train(stored: str | None, seed: int, epochs: int, epsilon: float) -> dict[str, Any]:
    """One run; its accuracy and loss on the images that it has not seen."""
    os.environ["OPACUS_REPRODUCIBLE"] = "1"
    torch.manual_seed(seed)
    data, model = load_digits(), Rows().bfloat16()
    private, optimizer, criterion, loader = PrivacyEngine(
        accountant="rdp"
    ).make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data.train, batch_size=128),
        max_grad_norm=1.0,
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        grad_sample_mode="ghost_bk",
    )
    private.stored_dtype = stored
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(private(x), y).backward()
            optimizer.step()
    ways = {c.what for c in private._strategy.planner.report.choices.values()}
    private.eval()
    x, y = data.test.tensors
    with torch.no_grad():
        logits = private(x)
    return {
        "stored": stored or "bfloat16",
        "seed": seed,
        "epsilon": epsilon,
        "ways": sorted(ways),
        "accuracy": float((logits.argmax(1) == y).float().mean()),
        "loss": float(nn.functional.cross_entropy(logits, y)),
    }


def main() -> None:
    """All runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True)
    add("--seeds", type=int, default=5)
    add("--epochs", type=int, default=10)
    add("--epsilon", type=float, default=8.0)
    args = parser.parse_args()
    choice = Planner._choice
    Planner._choice = lambda s, r: replace(choice(s, r), what="store")  # type: ignore[method-assign]
    rows = []
    for seed in range(args.seeds):
        for stored in (None, "float8"):
            rows.append(train(stored, seed, args.epochs, args.epsilon))
            print(rows[-1], flush=True)
    write_json(args.output, {**head(WHAT, "", versions()), "stored_dtypes": rows})


if __name__ == "__main__":
    main()
