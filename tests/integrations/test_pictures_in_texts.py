"""A language model that sees: features of pictures are put among tokens, where a mask says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opacus.core.record.trail import placed
from opacus.core.record.trail.mode import Trail
from tests.helpers.losses_of_tokens import next_token_losses, private
from tests.helpers.oracle import CLIPPING_EPS, trainable

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

B, T, VOCABULARY, PICTURE = 4, 12, 32, 31
PATCHES = 4  # of a picture, each a token


def build(trained: str) -> Any:
    """``trained``: what the names of trained parameters contain."""
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=PICTURE, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(config).double().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return model


def batch(counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Tokens ``[B, T]`` in which sample i has ``counts[i]`` pictures, and those."""
    tokens = torch.randint(1, 30, (B, T))
    for row, count in zip(tokens, counts, strict=True):
        row[1 : 1 + PATCHES * count] = PICTURE
    return tokens, torch.randn(sum(counts), 3, 8, 8, dtype=torch.float64)


def per_sample_loss(model: Any, tokens: Tensor, pictures: Tensor | None) -> Tensor:
    return next_token_losses(model(input_ids=tokens, pixel_values=pictures).logits, tokens)


def expected(model: Any, tokens: Tensor, pictures: Tensor, c: float) -> list[Tensor]:
    """The clipped mean, one sample with its own pictures at a time."""
    parameters = trainable(model)[1]
    sums = [torch.zeros_like(p) for p in parameters]
    begin = 0
    for row in tokens:
        end = begin + int((row == PICTURE).sum()) // PATCHES
        own = pictures[begin:end] if end > begin else None
        loss = per_sample_loss(model, row[None], own).sum()
        grads = torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)
        norm = torch.stack([g.norm() for g in grads]).norm()
        assert norm > c
        for total, grad in zip(sums, grads, strict=True):
            total += grad * c / (norm + CLIPPING_EPS) / B
        begin = end
    return sums


def step(made: Any, tokens: Tensor, pictures: Tensor) -> None:
    model, optimizer, criterion = made
    optimizer.zero_grad()
    criterion(per_sample_loss(model, tokens, pictures)).backward()
    optimizer.step()


ONE_EACH, OTHERS = (1, 1, 1, 1), (2, 0, 1, 1)


@pytest.mark.parametrize("trained", ["", "projector", "language_model"])
def test_one_picture_each(trained: str) -> None:
    model = build(trained)
    batches = [batch(ONE_EACH) for _ in range(4)]
    right = [expected(model, *one, 1e-3) for one in batches]
    made = private(model, 1e-3, "ghost_bk", B)
    for one, sums in zip(batches, right, strict=True):
        step(made, *one)
        for parameter, total in zip(trainable(model)[1], sums, strict=True):
            assert float((parameter.grad - total).abs().max()) < 1e-10


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("trained", ["", "projector"])
def test_as_many_pictures_as_samples_but_not_one_each(trained: str, before: int) -> None:
    """Row 1 of what sees is of sample 0: it would be clipped as sample 1's."""
    model = build(trained)
    made = private(model, 1e-3, "ghost_bk", B)
    for _ in range(before):
        step(made, *batch(ONE_EACH))
    with pytest.raises(ValueError, match="of no single sample"):
        step(made, *batch(OTHERS))
    assert all(p.grad is None or not p.grad.any() for p in trainable(model)[1])


@pytest.mark.parametrize("trained", ["", "projector"])
def test_few_passes_are_followed(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[int] = []
    enter = Trail.__enter__
    monkeypatch.setattr(Trail, "__enter__", lambda t: (followed.append(1), enter(t))[1])
    made = private(build(trained), 1e-3, "ghost_bk", B)
    counts = []
    for _ in range(6):
        step(made, *batch(ONE_EACH))
        counts.append(len(followed))
    assert counts[-1] == counts[2] > 0


def test_masks_that_were_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made = private(build("projector"), 1e-3, "ghost_bk", B)
    for _ in range(3):
        step(made, *batch(ONE_EACH))
    monkeypatch.setattr(placed, "_CALLS", frozenset())  # as if it were called by another name
    with pytest.raises(RuntimeError, match="masked_scatter has other rows"):
        step(made, *batch(ONE_EACH))
    step(made, *batch(ONE_EACH))  # is followed


@pytest.mark.parametrize("counts", [OTHERS, (2, 0, 0, 1)])
def test_any_pictures_where_only_the_language_model_is_trained(counts: tuple[int, ...]) -> None:
    model = build("language_model")
    one = batch(counts)
    right = expected(model, *one, 1e-3)
    made = private(model, 1e-3, "ghost_bk", B)
    for _ in range(2):
        step(made, *one)
    for parameter, total in zip(trainable(model)[1], right, strict=True):
        assert float((parameter.grad - total).abs().max()) < 1e-10
