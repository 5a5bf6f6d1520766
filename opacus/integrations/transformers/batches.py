"""Logical batches of a Trainer, in physical ones that fit into memory.

What Trainer takes for one batch is all that is drawn for one step: its expected size is
``per_device_train_batch_size * gradient_accumulation_steps`` a process. It is collated in chunks
of at most ``per_device_train_batch_size`` examples, so that each is padded to its own longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from opacus.data.sharding import communication_device


@dataclass
class LogicalBatch:
    """What one step of a process is computed from.

    Attributes:
        chunks: Collated physical batches, at least one; of no examples if ``sizes`` says so.
        sizes: Number of examples in each.
    """

    chunks: list[Any]
    sizes: list[int]

    def pin_memory(self) -> LogicalBatch:
        """The same in pinned memory, as ``DataLoader`` asks for."""
        return LogicalBatch(pin_memory(self.chunks), self.sizes)

    @property
    def size(self) -> int:
        """Number of examples."""
        return sum(self.sizes)


class ChunkedCollate:
    """Collates examples in physical batches of at most ``limit`` whose sizes differ by one at most.

    Args:
        collate: The data collator, for each of them.
        limit: Largest number of examples of one.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], limit: int) -> None:
        self.collate = collate
        self.limit = limit

    def __call__(self, examples: list[Any]) -> LogicalBatch:
        """The logical batch of so many examples, at least one."""
        parts = max(1, math.ceil(len(examples) / self.limit))
        each, more = divmod(len(examples), parts)
        sizes = [each + (part < more) for part in range(parts)]
        rest, chunks = iter(examples), []
        for size in sizes:
            own = [next(rest) for _ in range(size)]
            chunk = self.collate(own)
            check_chunk(chunk, size, self.collate)
            chunks.append(chunk)
        return LogicalBatch(chunks, sizes)


def check_chunk(chunk: Any, size: int, collate: Any) -> None:
    """Refuse a collated batch in which an example's tensors are not its own.

    Raises:
        TypeError: It is no mapping.
        ValueError: Its rows are not the examples, or texts are padded on the left.
    """
    if not isinstance(chunk, Mapping):
        raise TypeError(f"data_collator must return a mapping, got {type(chunk).__name__}")
    tensors = {k: v for k, v in chunk.items() if isinstance(v, Tensor) and v.dim()}
    name = next((k for k in ("input_ids", "pixel_values", "inputs_embeds") if k in tensors), None)
    name = next(iter(tensors), None) if name is None else name
    rows = (size, 2 * size) if "completion_mask" in tensors else (size,)  # DPO's pairs
    if name is not None and len(tensors[name]) not in rows:
        raise ValueError(
            f"data_collator ({type(collate).__name__}) made {len(tensors[name])} rows of {size} "
            f"examples ({name} has shape {tuple(tensors[name].shape)}): gradients are clipped by "
            "row, so each example must be one. Flattening and packing collators join examples: "
            "leave padding_free and packing off"
        )
    mask = tensors.get("attention_mask")
    if mask is not None and mask.dim() == 2 and mask.shape[1] and not bool(mask[:, 0].all()):
        raise ValueError(
            "texts are padded on the left, so the positions of a text's tokens depend on the "
            "longest text of its batch, and its gradient on others' data: set "
            "tokenizer.padding_side = 'right' for training"
        )


def agreed_parts(batch: LogicalBatch) -> tuple[int, float]:
    """What the processes have drawn for a step; a collective call.

    Returns:
        Number of physical batches that every process runs, the largest of all; and the mean of
        their numbers of examples.
    """
    own = [max(1, len(batch.chunks)), batch.size]
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return own[0], float(own[1])
    mine = torch.tensor([own], device=communication_device())
    every = mine.new_empty(dist.get_world_size(), 2)
    dist.all_gather_into_tensor(every, mine)
    parts, sizes = zip(*every.tolist(), strict=True)
    return max(parts), sum(sizes) / len(sizes)


def tokens_in(chunk: Any, main_input: str, without_padding: bool) -> int:
    """Number of tokens of a physical batch."""
    mask = chunk.get("attention_mask") if without_padding else None
    counted = chunk.get(main_input)
    if mask is not None:
        return int(mask.sum())
    return counted.numel() if isinstance(counted, Tensor) else 0
