"""Texts and pairs of texts, and the loss of pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.integrations.tiny import VOCABULARY

datasets = pytest.importorskip("datasets")


def tokenizer() -> Any:
    """Words w1, w2, ... with a beginning, an end and padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="w2"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


def words(count: int, draw: torch.Generator) -> str:
    return " ".join(f"w{int(i)}" for i in torch.randint(3, VOCABULARY, (count,), generator=draw))


def texts(count: int = 12, lengths: tuple[int, ...] = (5,)) -> Any:
    draw = torch.Generator().manual_seed(3)
    return datasets.Dataset.from_list(
        [{"text": words(lengths[i % len(lengths)], draw)} for i in range(count)]
    )


def preferences(count: int = 12) -> Any:
    draw = torch.Generator().manual_seed(5)
    return datasets.Dataset.from_list(
        [
            {
                "prompt": words(2 + i % 3, draw),
                "chosen": " " + words(1 + i % 4, draw),
                "rejected": " " + words(3, draw),
            }
            for i in range(count)
        ]
    )


def pair_loss(kind: str, reference: Any, beta: float = 0.1) -> Any:
    """The published losses of one pair, from log-probabilities of unpadded answers."""

    def logp(model: Any, ids: Tensor, mask: Tensor, attention: Tensor) -> tuple[Tensor, int]:
        length = int(attention.sum())
        ids, mask = ids[None, :length], mask[:length]
        logits = model(input_ids=ids).logits[0, :-1]
        own = F.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        return (own * mask[1:]).sum(), int(mask.sum())

    def loss(model: Any, row: dict[str, Tensor]) -> Tensor:
        scores, sizes = [], []
        for i in range(2):
            each = [row[k][i] for k in ("input_ids", "completion_mask", "attention_mask")]
            value, size = logp(model, *each)
            with torch.no_grad():
                base, _ = logp(reference, *each)
            scores.append(value - base)
            sizes.append(size)
        margin = scores[0] - scores[1]
        if kind == "ipo":
            return (scores[0] / sizes[0] - scores[1] / sizes[1] - 1 / (2 * beta)) ** 2
        if kind == "hinge":
            return torch.relu(1 - beta * margin)
        return -F.logsigmoid(beta * margin)

    return loss


def pairs_of(batch: Any) -> list[dict[str, Tensor]]:
    rows = []
    for chunk, size in zip(batch.chunks, batch.sizes, strict=True):
        rows += [{k: v[[i, size + i]] for k, v in chunk.items()} for i in range(size)]
    return rows
