"""Small classification tasks of the shipped movie reviews, as tensors.

Words are hashed, so nothing is learned from private data before training does.
"""

from __future__ import annotations

import csv
import itertools
import random
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import TensorDataset

REVIEWS = Path(__file__).resolve().parents[2] / "examples" / "data" / "movie_review_snippets.tsv"
WORDS = 1024  # buckets of hashed words and pairs of words
_TEST_SHARE = 5  # one row of so many


@dataclass(frozen=True)
class Task:
    """Inputs ``[N, width]`` of length 1 and labels ``[N]``, 1 for a good review."""

    train: TensorDataset
    test: TensorDataset

    @property
    def width(self) -> int:
        """Numbers of an input."""
        return int(self.train.tensors[0].shape[1])


def reviews(rows: int | None) -> Task:
    """Hashed words of the reviews; of so many rows alone, if a number is given."""
    texts, labels = _read(rows)
    return _split(torch.stack([_hashed(text) for text in texts]), labels)


def model_features(folder: str, rows: int | None, device: str) -> Task:
    """Features of a pretrained language model: the mean of its last hidden states.

    Args:
        folder: in the format of transformers, such as SmolLM2's.
        rows: as in :func:`reviews`.
        device: where the model runs.
    """
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModel.from_pretrained(folder).to(device).eval()
    texts, labels = _read(rows)
    found = []
    with torch.no_grad():
        for first in range(0, len(texts), 64):
            tokens = tokenizer(
                texts[first : first + 64],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=48,
            ).to(device)
            hidden = model(**tokens).last_hidden_state.float()  # [B, T, d]
            mask = tokens["attention_mask"].unsqueeze(-1)
            found.append(((hidden * mask).sum(1) / mask.sum(1)).cpu())
    # Hidden states share large coordinates, a property of the model: their signed roots do less.
    features = torch.cat(found)
    return _split(normalize(features.sign() * features.abs().sqrt(), dim=1), labels)


def _read(rows: int | None) -> tuple[list[str], Tensor]:
    with REVIEWS.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    random.Random(0).shuffle(found)  # the file has an order
    found = found[:rows]
    labels = torch.tensor([int(float(row["score"]) > 0) for row in found])
    return [row["text"] for row in found], labels


def _split(inputs: Tensor, labels: Tensor) -> Task:
    test = torch.arange(len(labels)) % _TEST_SHARE == 0
    return Task(
        TensorDataset(inputs[~test], labels[~test]), TensorDataset(inputs[test], labels[test])
    )


def _hashed(text: str) -> Tensor:
    words = re.findall(r"[a-z']+", text.lower())
    pairs = [f"{one} {other}" for one, other in itertools.pairwise(words)]
    counts = torch.zeros(WORDS)
    for word in {*words, *pairs}:
        code = zlib.crc32(word.encode())
        counts[code % WORDS] += 1 if code >> 31 else -1
    return normalize(counts, dim=0)
