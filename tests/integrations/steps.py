"""A Trainer's steps against the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.integrations import oracle
from tests.integrations.tiny import weights

HUGE = {"noise_multiplier": 0.0, "clipping_norm": 1e6, "poisson_sampling": False}
FIXED = {"train_sampling_strategy": "sequential", "max_steps": 3}


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


def check_steps(
    trainer: Any, model: Any, clipping_norm: float, loss: Any = oracle.next_tokens, lr: float = 0.5
) -> list[float]:
    """Each step against the oracle; returns all norms."""
    every: list[float] = []
    after = [w for _, w in trainer.seen[1:]] + [weights(trainer.model)]
    for (batch, before), then in zip(trainer.seen, after, strict=True):
        model.load_state_dict(before, strict=False)
        want, norms = oracle.clipped_sum(model, oracle.rows_of(batch), clipping_norm, loss)
        every += norms
        for name, total in want.items():
            moved = (before[name] - then[name]).double() / lr * trainer.expected_batch_size
            torch.testing.assert_close(moved, total, rtol=1e-4, atol=3e-6)
    return every
