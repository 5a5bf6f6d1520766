"""Collators and losses in which an example depends on others of its batch are found beforehand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.integrations.texts import texts, tokenizer
from tests.integrations.tiny import Texts, arguments, bert, collate, llama, weights

transformers = pytest.importorskip("transformers")

from opacus.integrations.transformers import DPArguments, DPTrainer  # noqa: E402
from opacus.integrations.transformers.batches import ChunkedCollate  # noqa: E402
from opacus.integrations.transformers.lone_examples import refuse_mixing  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

CLIPPING_NORM, LR = 0.05, 0.5


def pooling(over_padding: bool) -> type:
    class Pooling(DPTrainer):
        """A loss of one's own: of the mean of a text's hidden states."""

        def per_sample_loss(self, outputs: Any, inputs: Any) -> Tensor:
            mask = inputs["attention_mask"][..., None].float()
            mask = torch.ones_like(mask) if over_padding else mask
            mean = (outputs.logits * mask).sum(1) / mask.sum(1)
            return F.cross_entropy(mean, inputs["labels"], reduction="none")

    return Pooling


def trained_for_long(head: str) -> Any:
    """A model whose weights are not those of a beginning, near zero."""
    model = bert(head, num_labels=2)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.mul_(20)
        model.classifier.weight.mul_(20)
    return model


def trained(
    folder: Path, model: Any, data: Any, cls: Any = DPTrainer, collator: Any = collate,
    **changes: Any,
) -> Any:  # fmt: skip
    size = changes.get("per_device_train_batch_size", 4)
    privacy = DPArguments(
        noise_multiplier=0.0, clipping_norm=CLIPPING_NORM, poisson_sampling=False,
        expected_batch_size=changes.pop("expected", size),
    )  # fmt: skip
    trainer = cls(
        model, arguments(folder, **{"max_steps": 1, "learning_rate": LR, **changes}),
        train_dataset=data, data_collator=collator, privacy=privacy,
    )  # fmt: skip
    trainer.train()
    return trainer


def moved_by_a_long_text(folder: Path, over_padding: bool, **changes: Any) -> float:
    """How far the clipped sum of short texts moves, in C, if a long one joins them."""
    short = [{"input_ids": [3, 4, 5], "labels": 0}] * 16
    sums = []
    for data in (short, [*short, {"input_ids": [7] * 30, "labels": 1}]):
        model = trained_for_long("BertForTokenClassification")
        before = weights(model)
        size = {"per_device_train_batch_size": len(data), **changes}
        trained(folder, model, data, pooling(over_padding), expected=len(data), **size)
        after = weights(model)
        sums.append(torch.cat([(before[n] - after[n]).flatten() for n in before]) * len(data) / LR)
    return float((sums[0] - sums[1]).norm()) / CLIPPING_NORM


def test_a_mean_over_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"depends on its padding: .* set per_device_train"):
        moved_by_a_long_text(tmp_path, over_padding=True)
    assert moved_by_a_long_text(tmp_path, over_padding=False) < 1.0 + 1e-3
    one = {"per_device_train_batch_size": 1}  # then nothing is padded
    assert moved_by_a_long_text(tmp_path, over_padding=True, **one) < 1.0 + 1e-3
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    assert moved_by_a_long_text(tmp_path, over_padding=True) > 3.0


def test_attention_without_a_mask(tmp_path: Path) -> None:
    def maskless(items: list[Any]) -> dict[str, Tensor]:
        return {k: v for k, v in collate(items).items() if k != "attention_mask"}

    model = trained_for_long("BertForSequenceClassification")
    with pytest.raises(ValueError, match="depends on its padding"):
        trained(tmp_path, model, Texts(20, (3, 9), classes=2), collator=maskless)
    trained(tmp_path, model, Texts(20, (6,), classes=2), collator=maskless)
    trained(tmp_path, llama(), Texts(20, (3, 9)), collator=maskless)  # sees what is before


def with_neighbours(items: list[Any]) -> dict[str, Tensor]:
    batch = collate(items)
    half = batch["input_ids"].shape[1] // 2
    batch["input_ids"][:, half:] = batch["input_ids"][:, half:].roll(1, 0)
    return batch


def mixup(items: list[Any]) -> dict[str, Tensor]:
    batch = collate(items)
    others = batch["input_ids"][torch.randperm(len(items))]
    keep = torch.rand(batch["input_ids"].shape) < 0.5
    return {**batch, "input_ids": torch.where(keep, batch["input_ids"], others)}


@pytest.mark.parametrize("collator", [with_neighbours, mixup])
def test_collators_that_mix_examples(tmp_path: Path, collator: Any) -> None:
    with pytest.raises(ValueError, match="data_collator: input_ids of an example changes with"):
        trained(tmp_path, llama(), Texts(20), collator=collator)


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_collators_with_random_numbers(seed: int | None) -> None:
    """Those of the run, and those of a collator itself."""
    words = tokenizer()
    words.add_special_tokens({"mask_token": "<mask>"})
    masking = transformers.DataCollatorForLanguageModeling(words, mlm=True, seed=seed)
    refuse_mixing(
        ChunkedCollate(masking, 8), [{"input_ids": [3, 4, *range(3, n)]} for n in (4, 6, 8)]
    )


def transformed(how: Any) -> Any:
    """Texts that the data set makes in view of all that a batch draws, as ``set_transform`` does."""
    data = texts(20, (3, 9))

    def transform(rows: Any) -> dict[str, Tensor]:
        batch = tokenizer()(rows["text"], padding=True, return_tensors="pt")
        return how({"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]})

    data.set_transform(transform)
    return data


def of_next_tokens(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def of_neighbours(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "labels": batch["input_ids"].roll(1, 0)}


def of_two_classes(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "labels": batch["input_ids"][:, 0] % 2}


@pytest.mark.parametrize("limit", [1, 4])
def test_transforms_of_a_whole_draw(tmp_path: Path, limit: int) -> None:
    more = {
        "collator": transformers.default_data_collator, "remove_unused_columns": False,
        "per_device_train_batch_size": limit, "expected": 4,
    }  # fmt: skip
    trained(tmp_path, llama(), transformed(of_next_tokens), **more)  # padded by the data set
    with pytest.raises(ValueError, match="labels of an example changes with"):
        trained(tmp_path, llama(), transformed(of_neighbours), **more)
    model, data = trained_for_long("BertForTokenClassification"), transformed(of_two_classes)
    trained(tmp_path, model, data, pooling(over_padding=False), **more)
    with pytest.raises(ValueError, match="depends on its padding"):
        trained(tmp_path, model, data, pooling(over_padding=True), **more)


def test_nothing_is_drawn_from_the_runs_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    class Drawing(DPTrainer):
        def training_step(self, *args: Any) -> Tensor:
            drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
            return super().training_step(*args)

    for on in ("1", "0"):
        monkeypatch.setenv("OPACUS_ISOLATION_CHECK", on)
        trained(tmp_path, bert(), Texts(20, (3, 9), classes=2), Drawing)
    assert drawn[0] == drawn[1]


def test_precision_of_products_as_trainers_set_it(tmp_path: Path) -> None:
    # With tf32 or torch_compile; torch.get_float32_matmul_precision() raises from then on.
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        trained(tmp_path, llama(), Texts(8))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_products_are_exact_if_tf32_is_refused(tmp_path: Path) -> None:
    # accelerate allows tf32 for compiled models, whatever the arguments say.
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        trained(tmp_path, llama(), Texts(8), tf32=False)
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
