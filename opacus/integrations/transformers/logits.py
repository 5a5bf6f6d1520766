"""Training without logits where that is the same loss."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from opacus.core.rules.spec import layer_kind
from opacus.integrations.transformers.losses import causal_lm, loss_of
from opacus.losses import LossInHead, is_without_logits, linear_head

logger = logging.getLogger(__name__)


def computes_the_models_loss(trainer: type, mixin: type) -> bool:
    """Whether a Trainer has no loss of its own."""
    names = ("per_sample_loss", "model_outputs")
    return all(getattr(trainer, name) is getattr(mixin, name) for name in names)


def drop_logits(model: Any, bare: Any, device: torch.device, smoothing: float) -> LossInHead | None:
    """Let a causal language model compute its training loss in its head, where that is the same.

    It is where the model's loss is that of its head's output alone. The model runs on two tokens
    to see that: many scale or cap their logits, some add terms. Otherwise nothing is changed.

    Args:
        model: As it is trained and placed; a collective call if it is sharded.
        bare: Without wrappers.
        device: Of its inputs.
        smoothing: Label smoothing.

    Returns:
        What undoes it; ``None`` where the model is as it was.
    """
    head = linear_head(bare)
    if head is None or is_without_logits(bare) or loss_of(bare) is not causal_lm:
        return None
    if layer_kind(head) is not nn.Linear or head._compiled_call_impl or "forward" in vars(head):
        return None
    inside = LossInHead(bare, head, label_smoothing=smoothing)
    if _is_of_its_head(inside, model, device):
        return inside
    inside.undo()
    return None


def _is_of_its_head(inside: LossInHead, model: Any, device: torch.device) -> bool:
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    batch = {"input_ids": tokens, "attention_mask": tokens + 1, "labels": tokens}
    model.eval()
    try:
        with torch.no_grad():
            return inside.fits(lambda: model(**batch, use_cache=False))
    except Exception as error:  # of models that need other inputs
        logger.info("the loss is computed from logits: %s: %s", type(error).__name__, error)
        return False
    finally:
        model.train()
