"""A small classification task of the shipped movie reviews, as tensors.

Words are hashed, so nothing is learned from private data before training does.
"""

from __future__ import annotations

import csv
import itertools
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import TensorDataset

REVIEWS = Path(__file__).resolve().parents[2] / "examples" / "data" / "movie_review_snippets.tsv"
WORDS = 1024  # buckets of hashed words and pairs of words
HIDDEN = 16
_TEST_SHARE = 5  # one row of so many


class Net(nn.Module):
    """Two layers; tanh suits clipped gradients (arXiv 2007.14191)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WORDS, HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, WORDS]`` to ``[B, 2]``."""
        return self.head(self.body(x).tanh())


@dataclass(frozen=True)
class Task:
    """Inputs, labels ``[N]`` (1 for a good review), and a model that has learned nothing of them.

    Attributes:
        train: rows to learn from.
        test: other rows.
        model: makes the model of a run.
        device: where it is trained.
    """

    train: TensorDataset
    test: TensorDataset
    model: Callable[[], nn.Module]
    device: str = "cpu"


def reviews(rows: int | None) -> Task:
    """Hashed words of the reviews, of length 1; of so many rows alone, if a number is given."""
    texts, labels = read(rows)
    return Task(*split(torch.stack([_hashed(text) for text in texts]), labels), Net)


def read(rows: int | None) -> tuple[list[str], Tensor]:
    """Texts, shuffled alike each time, and labels ``[N]``."""
    with REVIEWS.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    random.Random(0).shuffle(found)  # the file has an order
    found = found[:rows]
    labels = torch.tensor([int(float(row["score"]) > 0) for row in found])
    return [row["text"] for row in found], labels


def split(inputs: Tensor, labels: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Rows to learn from, and every fifth as a test."""
    test = torch.arange(len(labels)) % _TEST_SHARE == 0
    return (
        TensorDataset(inputs[~test], labels[~test]),
        TensorDataset(inputs[test], labels[test]),
    )


def _hashed(text: str) -> Tensor:
    words = re.findall(r"[a-z']+", text.lower())
    pairs = [f"{one} {other}" for one, other in itertools.pairwise(words)]
    counts = torch.zeros(WORDS)
    for word in {*words, *pairs}:
        code = zlib.crc32(word.encode())
        counts[code % WORDS] += 1 if code >> 31 else -1
    return normalize(counts, dim=0)
