"""Adapters of PEFT in a private Trainer: what they add to the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.tiny import Texts, arguments, collate, llama

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

LR = 0.5


def after_a_step(folder: Path, weight: float) -> Any:
    from opacus.integrations.transformers import DPArguments, DPTrainer

    config = peft.AdaLoraConfig(
        target_r=2, init_r=3, total_step=10, target_modules=["q_proj"], orth_reg_weight=weight,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(llama(), config)
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    trainer = DPTrainer(
        model, arguments(folder, max_steps=1, learning_rate=LR,
                         train_sampling_strategy="sequential"),
        train_dataset=Texts(4), data_collator=collate,
        privacy=DPArguments(noise_multiplier=0.0, clipping_norm=1e6, poisson_sampling=False),
    )  # fmt: skip
    trainer.train()
    return start, dict(model.named_parameters())


@pytest.mark.filterwarnings("ignore")  # theirs, not ours
def test_adaloras_orthogonality_is_a_penalty(tmp_path: Path) -> None:
    start, without = after_a_step(tmp_path, 1e-9)
    _, with_it = after_a_step(tmp_path, 0.5)
    factors = {n: p.clone().requires_grad_() for n, p in start.items() if "lora_E" not in n}
    assert len(factors) == 4  # A and B of two layers
    term = 0.0
    for name, p in factors.items():
        product = p @ p.T if "lora_A" in name else p.T @ p
        term = term + (product - torch.eye(3)).norm() / 4
    wanted = torch.autograd.grad(0.5 * term, list(factors.values()))
    for (name, _), grad in zip(factors.items(), wanted, strict=True):
        assert float(grad.norm()) > 0.01
        moved = (without[name] - with_it[name]).detach() / LR
        torch.testing.assert_close(moved, grad, rtol=1e-4, atol=1e-5)
