"""What is learned: batches of random data, and the loss, private or not.

Shapes: B samples, T tokens, V tokens in the vocabulary, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memory_test.common.models import CLASSES

TASKS = ("lm", "classify")
DIFFUSION_STEPS = 1000


@dataclass(frozen=True)
class Batch:
    """Inputs of a model by argument name, and the targets of its loss."""

    inputs: dict[str, Tensor]
    targets: Tensor


def criterion_for(task: str) -> nn.Module:
    """The loss: the squared error for diffusion, else the cross-entropy; a mean over samples."""
    return nn.MSELoss() if task == "denoise" else nn.CrossEntropyLoss()


def random_batch(
    task: str,
    model: Any,
    *,
    batch: int,
    length: int,
    vocab: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Batch:
    """A batch of ``batch`` samples of ``length`` tokens on the generator's device.

    Args:
        task: ``"lm"``, ``"classify"`` or ``"denoise"``.
        model: The model; a diffusion model knows the size of its images.
        batch: Number of samples B.
        length: Number of tokens T.
        vocab: Number of tokens in the vocabulary.
        generator: Source of the numbers.
        dtype: Type of images.
    """
    place: dict[str, Any] = {"generator": generator, "device": generator.device}
    if task == "denoise":
        shape = (batch, 4, *model.image_size)
        noise, image = (torch.randn(shape, **place).to(dtype) for _ in range(2))
        steps = torch.randint(DIFFUSION_STEPS, (batch,), **place)
        labels = torch.randint(model.classes, (batch,), **place)
        share = (steps.to(dtype) / DIFFUSION_STEPS).view(-1, 1, 1, 1)
        noised = (1 - share) * image + share * noise
        return Batch({"images": noised, "steps": steps, "labels": labels}, noise)
    tokens = torch.randint(1, vocab, (batch, length), **place)
    # Expanded: per-sample gradients of a position embedding need a row for each sample.
    positions = torch.arange(length, device=generator.device).expand(batch, -1).contiguous()
    inputs = {"input_ids": tokens, "position_ids": positions}
    if task == "classify":
        return Batch(inputs, torch.randint(CLASSES, (batch,), **place))
    return Batch(inputs, tokens[:, 1:])


def loss_of(task: str, criterion: Any, output: Any, targets: Tensor, private: bool) -> Any:
    """The loss of a model's output.

    Args:
        task: See :func:`random_batch`.
        criterion: From :func:`criterion_for`, or what ``make_private`` made of it.
        output: ``[B, T, V]`` or ``[B, K]`` logits (also in a ``logits`` attribute), or images.
        targets: Of the batch.
        private: Whether the criterion is a private one, which must be told what a sample is.
    """
    output = getattr(output, "logits", output)
    if task != "lm":
        return criterion(output, targets)
    logits = output[:, :-1]
    flat = logits.reshape(-1, logits.shape[-1])
    shape = {"shape": tuple(logits.shape)} if private else {}
    return criterion(flat, targets.reshape(-1), **shape)
