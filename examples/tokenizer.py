"""Tokenizers, all with right padding.

``words`` and ``bytes`` need no training and so cost no privacy. A vocabulary trained on private
texts (``bpe``) is a function of them that nothing protects: whoever sees it learns which strings
are frequent.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

KINDS = ("words", "bytes", "bpe", "model")
PAD, BEGIN, END = 0, 1, 2
_SPECIAL = 3


class Tokenizer(Protocol):
    """Turns a text into numbers below ``vocab_size``; ``PAD`` is none of a text's own."""

    vocab_size: int
    pad: int
    reversible: bool  # whether the text can be had back, so that a language model makes sense

    def encode(self, text: str) -> list[int]:
        """Token numbers; at least one."""


class HashedWords:
    """Words and punctuation marks, each hashed into one of a fixed number of buckets."""

    pad: ClassVar[int] = PAD
    reversible: ClassVar[bool] = False
    _pattern = re.compile(r"\w+|[^\w\s]")

    def __init__(self, buckets: int = 4096) -> None:
        self.vocab_size = buckets + 1
        self._buckets = buckets

    def encode(self, text: str) -> list[int]:
        """Bucket of each word, from 1 on; 0 is the padding."""
        words = self._pattern.findall(text.lower())
        return [1 + zlib.crc32(word.encode()) % self._buckets for word in words]


class Bytes:
    """The bytes of the UTF-8 text between a begin and an end mark."""

    pad: ClassVar[int] = PAD
    reversible: ClassVar[bool] = True
    vocab_size: ClassVar[int] = 256 + _SPECIAL

    def encode(self, text: str) -> list[int]:
        """Begin mark, bytes, end mark."""
        return [BEGIN, *(byte + _SPECIAL for byte in text.encode()), END]


class BytePairs:
    """Byte-pair encoding learned from texts. The vocabulary is NOT private.

    Args:
        texts: Texts to learn from; the training split, never the test split.
        vocab_size: Number of tokens, special ones included.
    """

    pad: ClassVar[int] = PAD
    reversible: ClassVar[bool] = True

    def __init__(self, texts: Sequence[str], vocab_size: int = 4096) -> None:
        # Here, because only this tokenizer needs the package.
        from tokenizers import ByteLevelBPETokenizer

        self._model = ByteLevelBPETokenizer()
        self._model.train_from_iterator(
            texts,
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=["<pad>", "<begin>", "<end>"],
        )
        self.vocab_size = self._model.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Begin mark, learned pieces, end mark."""
        return [BEGIN, *self._model.encode(text).ids, END]


class FromFolder:
    """The tokenizer that lies in a model's folder.

    Raises:
        ValueError: There is none that can be read.
    """

    reversible: ClassVar[bool] = True

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._model: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"--model {folder}: its tokenizer cannot be read ({error})") from error
        self.vocab_size = len(self._model)
        self._end = self._model.eos_token_id or 0
        self.pad = self._end if self._model.pad_token_id is None else self._model.pad_token_id

    def encode(self, text: str) -> list[int]:
        """What the tokenizer makes of the text, with an end mark."""
        ids = self._model(text)["input_ids"]
        return ids if ids and ids[-1] == self._end else [*ids, self._end]


def make_tokenizer(kind: str, texts: Sequence[str], folder: Path | None = None) -> Tokenizer:
    """The tokenizer of this kind.

    Args:
        kind: One of :data:`KINDS`.
        texts: Training texts, used by ``"bpe"`` only.
        folder: Folder of the model, for ``"model"``.

    Raises:
        ValueError: There is no such kind, or ``"model"`` has no folder.
    """
    if kind == "model":
        if folder is None:
            raise ValueError("--tokenizer model needs --model to be a local folder")
        return FromFolder(folder)
    makers = {"words": HashedWords, "bytes": Bytes, "bpe": lambda: BytePairs(texts)}
    if kind not in makers:
        raise ValueError(f"--tokenizer must be one of {KINDS}, got {kind!r}")
    return makers[kind]()


def pad_right(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Token numbers and mask, ``[B, T]`` int64 each; the mask is 1 on tokens, 0 on padding."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    tokens = torch.full((len(rows), width), pad)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    mask = torch.arange(width) < lengths[:, None]
    return tokens, mask.long()
