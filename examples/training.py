"""The two training loops, private and not, and the evaluation they share.

A batch is (tokens ``[B, T]``, mask ``[B, T]``, targets), all int64; targets are classes ``[B]``, or
the next tokens ``[B, T]``. With Poisson sampling a batch may be empty: B = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from conversations import encode_turns
from models import IGNORE, SampleCrossEntropy
from reporting import Meter, Reporter
from runtime import Runtime
from text_data import Text, Texts
from tokenizer import Tokenizer, pad_right
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from opacus.utils.batch_memory_manager import BatchMemoryManager

Batch = tuple[Tensor, Tensor, Tensor]


class Encoded(NamedTuple):
    """A text as token numbers.

    Attributes:
        tokens: T numbers.
        label: Its class.
        learned: Which of the tokens a language model learns to write; ``None``: all.
    """

    tokens: list[int]
    label: int
    learned: list[bool] | None = None

    @property
    def targets(self) -> list[int]:
        """The next tokens, T - 1 numbers; ``IGNORE`` where they are not to be learned."""
        if self.learned is None:
            return self.tokens[1:]
        after = zip(self.tokens[1:], self.learned[1:], strict=True)
        return [token if learn else IGNORE for token, learn in after]


class EncodedTexts(Dataset[Encoded]):
    """Texts as token numbers, cut to a length.

    Args:
        texts: One split.
        tokenizer: Its tokenizer.
        max_length: Largest number of tokens of a text.
    """

    def __init__(self, texts: Texts, tokenizer: Tokenizer, max_length: int) -> None:
        self.texts = texts
        self.rows = [
            self._encoded(tokenizer, text, label, max_length)
            for text, label in zip(texts.texts, texts.labels, strict=True)
        ]

    @staticmethod
    def _encoded(tokenizer: Tokenizer, text: Text, label: int, length: int) -> Encoded:
        if isinstance(text, str):
            return Encoded(tokenizer.encode(text)[:length], label)
        tokens, learned = encode_turns(tokenizer, text)
        return Encoded(tokens[:length], label, learned[:length])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Encoded:
        return self.rows[index]

    @property
    def without_targets(self) -> int:
        """Number of texts of which a language model learns nothing."""
        return sum(all(t == IGNORE for t in row.targets) for row in self.rows)


def collate_classify(samples: Sequence[Encoded], pad: int) -> Batch:
    """Batch for classification."""
    tokens, mask = pad_right([sample.tokens for sample in samples], pad)
    return tokens, mask, torch.tensor([sample.label for sample in samples])


def collate_lm(samples: Sequence[Encoded], pad: int) -> Batch:
    """Batch for language modelling: each token predicts the next one."""
    tokens, mask = pad_right([sample.tokens[:-1] for sample in samples], pad)
    targets, _ = pad_right([sample.targets for sample in samples], IGNORE)
    return tokens, mask, targets


@dataclass(frozen=True)
class Task:
    """What is learned, and how it is scored.

    Attributes:
        name: ``"classify"`` or ``"lm"``.
        collate: Makes a batch of samples.
    """

    name: str
    collate: Callable[[Sequence[Encoded]], Batch]

    @classmethod
    def of(cls, name: str, pad: int) -> Task:
        """The task of this name, for a tokenizer that pads with ``pad``."""
        return cls(name, partial({"classify": collate_classify, "lm": collate_lm}[name], pad=pad))

    def score(self, logits: Tensor, targets: Tensor) -> tuple[float, float]:
        """Sum of scores and number of things scored.

        Right answers and samples; or negative log-likelihood and tokens.
        """
        if self.name == "classify":
            return float((logits.argmax(1) == targets).sum()), len(targets)
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return float(losses), int((targets != IGNORE).sum())

    def result(self, total: float, count: float) -> float:
        """Accuracy in [0, 1], or perplexity per token."""
        return total / count if self.name == "classify" else math.exp(min(total / count, 700))


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    tokens, mask, targets = (tensor.to(device) for tensor in batch)
    return tokens, mask, targets


@torch.no_grad()
def evaluate(
    model: nn.Module, data: EncodedTexts, task: Task, runtime: Runtime, batch_size: int
) -> float:
    """Accuracy or perplexity on all of ``data`` (a collective call).

    Each process scores its share. Sharded models need as many forward passes on all of them, so
    those that have run out of samples pass one again, unscored.
    """
    was_training = model.training
    model.eval()
    total = count = 0.0
    share = range(runtime.rank, len(data), runtime.world_size)
    for start in range(0, math.ceil(len(data) / runtime.world_size), batch_size):
        own = share[start : start + batch_size]
        batch = task.collate([data[index] for index in own or [0]])
        tokens, mask, targets = moved(batch, runtime.device)
        logits = model(tokens, mask)
        if own:
            value, things = task.score(logits, targets)
            total, count = total + value, count + things
    model.train(was_training)
    return task.result(*runtime.sum(total, count))


def private_epoch(
    model: nn.Module,
    optimizer: Any,
    criterion: Any,
    loader: DataLoader[Any],
    *,
    runtime: Runtime,
    reporter: Reporter,
    physical_batch: int,
    epsilon: Callable[[], float],
    after_step: Callable[[float, int], None],
    title: str,
) -> Meter:
    """One epoch of private training.

    Args:
        model: Private model, as ``make_private`` returns it; likewise the next three.
        optimizer: Private optimizer.
        criterion: Private criterion in ghost modes, else the plain one.
        loader: Loader with Poisson sampling.
        runtime: This process.
        reporter: Shows the progress.
        physical_batch: Largest number of samples that are processed at once.
        epsilon: Gives what has been spent.
        after_step: Called after each physical batch with its mean loss and number of samples.
        title: Title of the bar.

    Returns:
        Loss and speed. The training loss is not private.
    """
    meter = Meter()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=physical_batch, optimizer=optimizer
    ) as physical:
        for batch in reporter.progress(physical, len(physical), title):
            tokens, mask, targets = moved(batch, runtime.device)
            optimizer.zero_grad()
            loss = criterion(model(tokens, mask), targets)
            loss.backward()
            # Also for an empty batch: it is a step like any other.
            optimizer.step()
            meter.add(loss.item(), len(batch[0]), int(batch[1].sum()))
            reporter.on_bar(meter, epsilon)
            after_step(loss.item(), len(batch[0]))
    return meter


def train_without_privacy(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: EncodedTexts,
    task: Task,
    *,
    runtime: Runtime,
    reporter: Reporter,
    batch_size: int,
    physical_batch: int,
    epochs: int,
) -> None:
    """The baseline: as many epochs of ordinary training, with batches of the same size.

    Args:
        model: A model, sharded if there are several processes.
        optimizer: Its optimizer.
        data: Training split.
        task: What is learned.
        runtime: This process.
        reporter: Shows the progress.
        batch_size: Samples a step, of all processes.
        physical_batch: Largest number of samples that a process handles at once.
        epochs: Passes over the data.
    """
    criterion = SampleCrossEntropy()
    sampler = DistributedSampler(data, runtime.world_size, runtime.rank)
    per_rank = max(1, batch_size // runtime.world_size)
    loader = DataLoader(data, per_rank, sampler=sampler, collate_fn=task.collate)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in reporter.progress(loader, len(loader), f"not private, epoch {epoch + 1}"):
            optimizer.zero_grad()
            for part, weight in _parts(batch, physical_batch):
                tokens, mask, targets = moved(part, runtime.device)
                (criterion(model(tokens, mask), targets) * weight).backward()
            optimizer.step()


def _parts(batch: Batch, size: int) -> Iterator[tuple[Batch, float]]:
    """Parts of a batch, and the share of its samples that each holds."""
    whole = len(batch[0])
    for tokens, mask, targets in zip(*(tensor.split(size) for tensor in batch), strict=True):
        yield (tokens, mask, targets), len(tokens) / whole


def simple_baseline(task: Task, train: EncodedTexts, test: EncodedTexts, vocab_size: int) -> float:
    """What needs no model: the larger class of the test rows, or token frequencies.

    Returns:
        Accuracy of the test split's largest class; or perplexity of the training split's token
        frequencies, each raised by one, on the test split.
    """
    if task.name == "classify":
        counts = torch.bincount(torch.tensor([row.label for row in test.rows]))
        return float(counts.max() / counts.sum())
    seen, asked = (
        torch.bincount(
            torch.tensor([t for row in data.rows for t in row.targets if t != IGNORE]),
            minlength=vocab_size,
        )
        for data in (train, test)
    )
    log_share = ((seen + 1) / (seen + 1).sum()).log()
    return math.exp(float(-(log_share * asked).sum() / asked.sum()))
