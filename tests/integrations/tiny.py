"""Tiny models, data and arguments for Trainers."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.helpers.distributed import preload

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

# Seconds a rank, unless the server that ranks are forked from has imported them.
preload("opacus.integrations.transformers.trainer", "transformers.models.llama.modeling_llama")

VOCABULARY, WIDTH, SAMPLES = 23, 16, 12


def llama(**changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
        tie_word_embeddings=False, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(head: str = "BertForSequenceClassification", **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **changes,
    )  # fmt: skip
    return getattr(transformers, head)(config)


class Texts(Dataset[dict[str, Any]]):
    """Texts of random tokens; ``lengths`` of each in turn."""

    def __init__(self, count: int = SAMPLES, lengths: Sequence[int] = (6,), classes: int = 0):
        draw = torch.Generator().manual_seed(1)
        self.items = []
        for i in range(count):
            length = lengths[i % len(lengths)]
            ids = torch.randint(1, VOCABULARY, (length,), generator=draw).tolist()
            labels = int(ids[0] % classes) if classes else list(ids)
            self.items.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        item = self.items[int(index)]
        return {k: list(v) if isinstance(v, list) else v for k, v in item.items()}


def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded on the right, with a mask; labels -100 there."""
    longest = max(len(i["input_ids"]) for i in items)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([i[name] + [value] * (longest - len(i[name])) for i in items])

    batch = {"input_ids": padded("input_ids", 0)}
    sizes = torch.tensor([[len(i["input_ids"])] for i in items])
    batch["attention_mask"] = (torch.arange(longest) < sizes).long()
    lists = isinstance(items[0]["labels"], list)
    batch["labels"] = (
        padded("labels", -100) if lists else torch.tensor([i["labels"] for i in items])
    )
    return batch


def arguments(folder: Path | str, kind: str = "TrainingArguments", **changes: Any) -> Any:
    if kind == "TrainingArguments":
        from transformers import TrainingArguments as cls
    else:
        import trl

        cls = getattr(trl, kind)
    settings: dict[str, Any] = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1,
        "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant",
        "bf16": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    return cls(output_dir=str(folder), **{**settings, **changes})


def weights(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def watched(cls: Any) -> Any:
    """A private Trainer that keeps what each step starts from."""

    class Watched(cls):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
            self.__dict__.setdefault("seen", []).append(
                (copy.deepcopy(inputs), weights(self.model))
            )
            return super().training_step(model, inputs, *args)

    return Watched
