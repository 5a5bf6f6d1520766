"""Terms of the loss that PEFT's adapters add to it, and that depend on their parameters alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def add_penalties(model: nn.Module, optimizer: Any) -> None:
    """Declare the adapters' own terms to a private optimizer, which adds them after the noise.

    PEFT adds AdaLoRA's orthogonality term to the loss that a model computes itself, which private
    training does not use.

    Args:
        model: As it is trained; without such adapters nothing is done.
        optimizer: See ``add_penalty``.
    """
    for module in model.modules():
        name = vars(module).get("trainable_adapter_name")  # PeftModel has its parts' names too
        weight = getattr(getattr(module, "peft_config", {}).get(name), "orth_reg_weight", 0)
        factors = _factors(module, str(name)) if weight else []
        if factors:
            optimizer.add_penalty(partial(_orthogonality, factors, float(weight)))


def _factors(module: nn.Module, adapter: str) -> list[tuple[nn.Parameter, bool]]:
    """AdaLoRA's matrices that are trained, and whether their rows are to be orthogonal."""
    return [
        (p, "lora_A" in name)
        for name, p in module.named_parameters()
        if p.requires_grad and adapter in name and ("lora_A" in name or "lora_B" in name)
    ]


def _orthogonality(factors: list[tuple[nn.Parameter, bool]], weight: float) -> Tensor:
    """Weight times the mean of the distances of ``A A^T`` and ``B^T B`` from the identity."""
    total = []
    for parameter, by_rows in factors:
        gather = getattr(parameter, "full_tensor", None)  # where it is sharded
        p: Tensor = parameter if gather is None else gather()
        product = p @ p.T if by_rows else p.T @ p
        total.append((product - torch.eye(len(product), dtype=p.dtype, device=p.device)).norm())
    return weight * torch.stack(total).mean()
