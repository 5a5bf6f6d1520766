"""Adapters of peft on small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.integrations.tiny import VOCABULARY, llama

peft = pytest.importorskip("peft")


MODES = ("hooks", "ghost", "ghost_bk")


class TokenLoss(nn.Module):
    """Mean over the samples of each one's mean over its tokens."""

    reduction = "mean"

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
        return each if self.reduction == "none" else each.mean()


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Those of the texts' own tokens, without virtual ones in front of them."""
    return model(input_ids=ids).logits[:, -ids.shape[1] :]


CONFIGS: dict[str, Callable[[], Any]] = {
    "LoRA of embeddings": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "trainable tokens": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2, 3]}
    ),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "VeRA": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "LoKr": lambda: peft.LoKrConfig(r=2, target_modules=["q_proj"]),
    "DoRA": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"
    ),
}


def adapted(config: Any) -> nn.Module:
    """A tiny model with adapters that are not at their start, where half of them are zero."""
    model = peft.get_peft_model(llama(), config)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def texts(count: int, length: int = 5) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(1, VOCABULARY, (count, length), generator=draw)


def private(model: nn.Module, mode: str, criterion: nn.Module, c: float, count: int) -> Any:
    """Model, optimizer and criterion, without noise."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    loader = DataLoader(TensorDataset(torch.zeros(count, 1)), batch_size=count)
    result = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(parameters, lr=0.0), criterion=criterion,
        data_loader=loader, noise_multiplier=0.0, max_grad_norm=c, poisson_sampling=False,
        grad_sample_mode=mode,
    )  # fmt: skip
    return result[0], result[1], result[2] if len(result) == 4 else criterion
