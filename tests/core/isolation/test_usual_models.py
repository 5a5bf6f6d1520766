"""The isolation check leaves usual models alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opacus import IsolationError
from opacus.layers import DPLSTM
from tests.helpers.isolation import (
    MODES,
    B,
    encoder,
    mlp,
    private,
    step,
    vectors,
)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.h = DPLSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.lstm(x.unsqueeze(1).expand(-1, 5, -1).contiguous())[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.l, self.h = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.h.weight = self.e.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.h(self.l(self.e(ids)).mean(1))


class Checkpointed(nn.Module):
    def __init__(self, preserve: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(6, 32), nn.Linear(32, 6), nn.Linear(6, 3)
        self.how = {"preserve_rng_state": preserve, "use_reentrant": reentrant}

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return self.b(F.dropout(self.a(x).relu(), 0.5, self.training))

        return self.h(checkpoint(block, x.clone().requires_grad_(), **self.how))


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, 1, 8, 8), torch.arange(B) % 3


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.3),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


USUAL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (mlp, vectors),
    "dropout": (encoder, vectors),
    "convolutions": (convolutions, images),
    "recurrent": (Recurrent, vectors),
    "tied": (Tied, lambda: (torch.randint(0, 12, (B, 5)), torch.arange(B))),
    "checkpoint": (lambda: Checkpointed(True), vectors),
    "reentrant checkpoint": (lambda: Checkpointed(True, True), vectors),
    "double": (lambda: mlp().double(), lambda: (vectors()[0].double(), vectors()[1])),
    "one sample": (mlp, lambda: vectors(1)),
    "many samples": (mlp, lambda: vectors(40)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", USUAL)
def test_usual_models_are_checked_and_train(kind: str, mode: str, checks: list[int]) -> None:
    make, batch = USUAL[kind]
    torch.manual_seed(0)
    parts = private(make(), mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(parts, batch())
        step(parts, batch())
    assert checks  # it was compared
    assert parts[0].isolation.schedule.checks == 1


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_autocast(mode: str, checks: list[int]) -> None:
    def loss(model: Any, criterion: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return criterion(model(batch[0]), batch[1])

    torch.manual_seed(0)
    step(private(mlp(), mode), vectors(), loss)
    assert checks


class Rounding(nn.Module):
    """Off by a percent where there are several samples, as rounding to bf16 may be."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.half, self.a, self.b = half, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            x = self.a(x).tanh()
            y = self.b(x * (1.01 if len(x) > 1 else 1.0))
        return y.float()


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
@pytest.mark.parametrize("half", [True, False])
def test_what_layers_compute_in_says_what_is_rounding(
    mode: str, half: bool, unfollowed: None, checks: list[int]
) -> None:
    """Under FSDP2, say, layers compute in bf16, though parameters and losses are fp32."""
    torch.manual_seed(0)
    parts = private(Rounding(half), mode)
    if not half:
        with pytest.raises(IsolationError, match="not its own"):
            step(parts, vectors())
        return
    step(parts, vectors())
    assert checks


def hugging_face(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 20, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=16
        )
        return transformers.GPT2LMHeadModel(config).train()
    if kind == "llama":
        config = transformers.LlamaConfig(
            **small, intermediate_size=24, num_key_value_heads=2, max_position_embeddings=16
        )
        return transformers.LlamaForCausalLM(config).train()
    config = transformers.BertConfig(**small, intermediate_size=24, max_position_embeddings=16)
    return transformers.BertForSequenceClassification(config).train()


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "lora"])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_transformers(kind: str, mode: str, checks: list[int]) -> None:
    model = hugging_face("llama" if kind == "lora" else kind)
    if kind == "lora":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        model = peft.get_peft_model(model, config).train()
    torch.manual_seed(1)
    ids = torch.randint(0, 20, (5, 7))

    def loss(model: Any, criterion: Any, batch: Any) -> Any:
        if kind == "bert":
            return criterion(model(input_ids=ids).logits, ids[:, 0] % 2)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return criterion(logits[:, :-1].transpose(1, 2), ids[:, 1:])

    parts = private(model, mode)
    step(parts, None, loss)
    assert checks
    assert parts[0].isolation.schedule.checks == 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("count", [False, True])
def test_a_loss_inside_the_model(padded: bool, count: bool) -> None:
    """Of transformers: a mean over the tokens of the batch, fine where all have as many."""
    model = hugging_face("llama")
    torch.manual_seed(1)
    ids = torch.randint(0, 20, (5, 7))
    targets = ids.clone()
    if padded:
        targets[2, 3:] = -100
    # As Trainer does; shifted labels, so that all have one less.
    more = {"num_items_in_batch": (targets[:, 1:] != -100).sum()} if count else {}

    def loss(model: Any, criterion: Any, batch: Any) -> Any:
        return model(input_ids=ids, labels=targets, **more).loss

    parts = private(model, "hooks")
    if not padded:
        step(parts, None, loss)
        assert parts[0].isolation.schedule.checks == 1
        return
    with pytest.raises(IsolationError, match="mean over the tokens of the batch"):
        step(parts, None, loss)
