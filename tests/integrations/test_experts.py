"""Mixtures of experts: values move rows inside, which have to be followed in few passes only."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from opacus.core.record.experts import give_rows_back
from opacus.core.record.trail.mode import Trail
from tests.helpers.losses_of_tokens import next_token_losses, private
from tests.helpers.oracle import CLIPPING_EPS, norms, per_sample_gradients, trainable

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

B, T, STEPS = 4, 6, 5
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "pad_token_id": 0,
    "attention_dropout": 0.0, "use_cache": False,
}  # fmt: skip
FAMILIES = ("Mixtral", "Qwen3Moe", "GptOss")


def build(family: str, trained: str, how: str = "eager") -> Any:
    """In float64 if experts run one by one; ``trained`` is part of the names of parameters."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    config._attn_implementation, config._experts_implementation = "eager", how
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return model.to(torch.float64 if how == "eager" else torch.float32)


def per_sample_loss(model: nn.Module, tokens: Any) -> torch.Tensor:
    return next_token_losses(model(input_ids=tokens).logits, tokens)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One more number for each forward pass that is followed."""
    passes: list[int] = []
    enter = Trail.__enter__

    def count(trail: Trail) -> Trail:
        passes.append(len(passes))
        return enter(trail)

    monkeypatch.setattr(Trail, "__enter__", count)
    return passes


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("trained", ["q_proj", ""])
@pytest.mark.parametrize("family", FAMILIES)
def test_later_passes_are_not_followed(
    family: str, trained: str, mode: str, followed: list[int]
) -> None:
    model = build(family, trained)
    tokens = torch.randint(1, 40, (STEPS, B, T), generator=torch.Generator().manual_seed(1))
    rows = [
        per_sample_gradients(model, lambda m, one: per_sample_loss(m, one).sum(), batch)
        for batch in tokens
    ]
    c = min(float(norms(r).min()) for r in rows) / 2
    model, optimizer, criterion = private(model, c, mode, B)
    model.isolation.interval = 10**6  # its own passes are counted too
    after_two = 0
    for number, (batch, own) in enumerate(zip(tokens, rows, strict=True)):
        if number == 2:
            after_two = len(followed)
        optimizer.zero_grad()
        criterion(per_sample_loss(model, batch)).backward()
        optimizer.step()
        factors = c / (norms(own) + CLIPPING_EPS)
        for part, parameter in zip(*trainable(model._module), strict=True):
            expected = torch.einsum("b,b...->...", factors, own[part]) / B
            assert float((parameter.grad - expected).abs().max()) < 1e-8 * c, part
    assert after_two and len(followed) == after_two


def test_grouped_products_are_not_followed_either(followed: list[int]) -> None:
    model, optimizer, criterion = private(build("Mixtral", "q_proj", "grouped_mm"), 1.0, "ghost", B)
    for _ in range(STEPS):
        optimizer.zero_grad()
        criterion(per_sample_loss(model, torch.randint(1, 40, (B, T)))).backward()
        optimizer.step()
    assert 0 < len(followed) <= 4


def test_experts_that_give_rows_to_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS

    def rolled(module: Any, rows: Any, *_: Any) -> torch.Tensor:
        order = torch.argsort(rows[:, 0])
        return rows[order] * 0.5

    monkeypatch.setitem(functions._global_mapping, "rolled", rolled)
    model, _, criterion = private(build("Mixtral", "q_proj", "rolled"), 1.0, "ghost", B)
    with pytest.raises(ValueError, match=r"q_proj|of no single sample"):
        criterion(per_sample_loss(model, torch.randint(1, 40, (B, T)))).backward()


def test_which_modules_give_rows_back() -> None:
    model = build("Mixtral", "q_proj")
    found = [name for name, module in model.named_modules() if give_rows_back(module)]
    assert found == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    experts = type(model.model.layers[0].mlp.experts)

    class Own(experts):  # type: ignore[misc, valid-type]
        def forward(self, rows: Any, *more: Any) -> Any:
            return super().forward(rows, *more).flip(0)

    model.model.layers[0].mlp.experts.__class__ = Own
    assert not give_rows_back(model.model.layers[0].mlp.experts)

    @transformers.integrations.moe.use_experts_implementation
    class Decorated(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()

        def forward(self, rows: Any, *more: Any) -> Any:
            return rows.flip(0)

    assert not give_rows_back(Decorated(model.config))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(how: Any) -> None:
    model = private(build("Mixtral", "q_proj"), 1.0, "hooks", B)[0]
    how(model)(input_ids=torch.randint(1, 40, (B, T))).logits.sum().backward()
