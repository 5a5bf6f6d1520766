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
    reversible: bool  # whether tokens decode to the text, which a language model needs

    def encode(self, text: str) -> list[int]:
        """Token numbers with begin and end marks; at least one."""

    def plain(self, text: str) -> list[int]:
        """Token numbers without marks."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token numbers, without marks; only if ``reversible``."""


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

    plain = encode

    def decode(self, tokens: Sequence[int]) -> str:
        """Hashes are no text."""
        raise TypeError("words that were hashed cannot be had back")


class Bytes:
    """The bytes of the UTF-8 text between a begin and an end mark."""

    pad: ClassVar[int] = PAD
    reversible: ClassVar[bool] = True
    vocab_size: ClassVar[int] = 256 + _SPECIAL

    def encode(self, text: str) -> list[int]:
        """Begin mark, bytes, end mark."""
        return [BEGIN, *self.plain(text), END]

    def plain(self, text: str) -> list[int]:
        """Bytes alone."""
        return [byte + _SPECIAL for byte in text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the bytes among the tokens."""
        return bytes(t - _SPECIAL for t in tokens if t >= _SPECIAL).decode(errors="replace")


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
        return [BEGIN, *self.plain(text), END]

    def plain(self, text: str) -> list[int]:
        """Learned pieces alone."""
        return self._model.encode(text).ids

    def save(self, folder: Path) -> None:
        """Write the vocabulary."""
        self._model.save(str(folder / "tokenizer.json"))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the pieces."""
        return self._model.decode([t for t in tokens if t >= _SPECIAL])


class OfModel:
    """The tokenizer of a model in the format of ``transformers``."""

    reversible: ClassVar[bool] = True

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocab_size = len(model)
        self._end = model.eos_token_id or 0
        self.pad = self._end if model.pad_token_id is None else model.pad_token_id
        self.template = self._rendered if getattr(model, "chat_template", None) else None

    def encode(self, text: str) -> list[int]:
        """What the tokenizer makes of the text, with an end mark."""
        ids = self.model(text)["input_ids"] if text else [*self._begin()]
        return ids if ids and ids[-1] == self._end else [*ids, self._end]

    def plain(self, text: str) -> list[int]:
        """What it makes of the text, without marks."""
        return self.model(text, add_special_tokens=False)["input_ids"]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text without special tokens."""
        return self.model.decode(list(tokens), skip_special_tokens=True)

    def _begin(self) -> list[int]:
        return [t for t in self.model("")["input_ids"] if t != self._end]

    def _rendered(self, turns: Sequence[tuple[str, str]], answer_next: bool) -> str:
        """Turns as the chat template writes them."""
        messages = [{"role": role, "content": text} for role, text in turns]
        return self.model.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answer_next
        )


def from_folder(folder: Path) -> OfModel:
    """The tokenizer that lies in a model's folder.

    Raises:
        ValueError: There is none that can be read.
    """
    from transformers import AutoTokenizer

    try:
        return OfModel(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model {folder}: its tokenizer cannot be read ({error})") from error


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
        return from_folder(folder)
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
