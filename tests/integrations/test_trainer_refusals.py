"""What cannot be private is refused by name, before anything has been built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.integrations.tiny import Texts, arguments, collate, llama

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from opacus.integrations.transformers import DPArguments, DPTrainer, DPTrainerMixin  # noqa: E402
from opacus.integrations.transformers.batches import ChunkedCollate  # noqa: E402
from opacus.integrations.transformers.placement import refuse_plugin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

PRIVACY = DPArguments(noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "exactly one of target_epsilon"),
        ({"target_epsilon": 1.0, "noise_multiplier": 1.0}, "exactly one of target_epsilon"),
        ({"target_epsilon": 0.0}, "target_epsilon must be finite and above 0"),
        ({"target_epsilon": float("inf")}, "target_epsilon must be finite"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be finite and at least 0"),
        (
            {"noise_multiplier": 1.0, "clipping_norm": 0.0},
            "clipping_norm must be finite and above 0",
        ),
        ({"noise_multiplier": 1.0, "delta": 1.0}, "delta must be below 1"),
        (
            {"noise_multiplier": 1.0, "expected_batch_size": 0},
            "expected_batch_size must be a whole",
        ),
        ({"noise_multiplier": 1.0, "expected_batch_size": 2.5}, "expected_batch_size must be a"),
        ({"noise_multiplier": 1.0, "grad_sample_mode": "fast"}, "grad_sample_mode must be one of"),
        ({"noise_multiplier": 1.0, "accountant": "none"}, "none"),
        ({"noise_multiplier": 1.0, "privacy_unit": "user"}, "privacy_unit must be one of .* users"),
        (
            {
                "noise_multiplier": 1.0,
                "grad_sample_mode": "hooks",
                "log_private_gradient_norms": True,
            },
            "log_private_gradient_norms",
        ),
    ],
)
def test_privacy_arguments(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DPArguments(**changes)


def test_privacy_arguments_are_frozen() -> None:
    with pytest.raises(AttributeError):
        PRIVACY.clipping_norm = 2.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="clipping_norm must be a number"):
        DPArguments(noise_multiplier=1.0, clipping_norm="1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auto_find_batch_size": True}, "other batches"),
        ({"dataloader_drop_last": True}, "Poisson"),
        ({"use_liger_kernel": True}, "fused"),
        ({"neftune_noise_alpha": 5.0}, "longest text"),
        ({"optim": "adalomo"}, "in the backward pass"),
        ({"train_sampling_strategy": "group_by_length"}, "drawn independently"),
        ({"train_sampling_strategy": "sequential"}, "drawn independently"),
        ({"accelerator_config": {"split_batches": True}}, "each process"),
    ],
)
def test_training_arguments(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    args = arguments(tmp_path)
    for name, value in changes.items():
        if name == "accelerator_config":
            args.accelerator_config.split_batches = True
        else:
            setattr(args, name, value)
    name = next(iter(changes))
    with pytest.raises(ValueError, match=rf"(?s){name}.*cannot be private: .*{reason}"):
        DPTrainer(llama(), args, train_dataset=Texts(), privacy=PRIVACY)


def test_half_precision_with_a_scaler(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.fp16 = True
    with pytest.raises(ValueError, match=r"fp16=True cannot be private.*bf16=True"):
        DPTrainer(llama(), args, train_dataset=Texts(), privacy=PRIVACY)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(Texts())


@pytest.mark.parametrize(
    ("data", "words"),
    [(None, "train_dataset is needed"), (Stream(), "map-style"), (Texts(0), "no examples"),
     (Texts(3), "expected to draw 4 examples")],
)  # fmt: skip
def test_data(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DPTrainer(llama(), arguments(tmp_path), train_dataset=data, privacy=PRIVACY)


def test_no_privacy_and_no_steps(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"privacy=DPArguments\(.*\) is needed, got NoneType"):
        DPTrainer(llama(), arguments(tmp_path), train_dataset=Texts())
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=0)
    privacy = DPArguments(target_epsilon=8.0)
    trainer = DPTrainer(
        llama(), args, train_dataset=Texts(), data_collator=collate, privacy=privacy
    )
    with pytest.raises(ValueError, match=r"no step would be taken .*num_train_epochs=0"):
        trainer.train()


def test_a_size_that_is_said_twice_or_cannot_be_drawn(tmp_path: Path) -> None:
    privacy = DPArguments(noise_multiplier=1.0, expected_batch_size=8)
    for args, words in (
        (arguments(tmp_path, gradient_accumulation_steps=2), "both say how many"),
        (arguments(tmp_path), "expected to draw 8 examples .* train_dataset has 7"),
    ):
        with pytest.raises(ValueError, match=words):
            DPTrainer(llama(), args, train_dataset=Texts(7), privacy=privacy)


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"privacy=DPArguments.*needed"):
        DPTrainer(llama(), arguments(tmp_path), train_dataset=Texts(), privacy=1.0)
    with pytest.raises(ValueError, match=r"delta=0.5 protects nobody among 12"):
        privacy = DPArguments(noise_multiplier=1.0, delta=0.5)
        DPTrainer(llama(), arguments(tmp_path), train_dataset=Texts(), privacy=privacy)
    with pytest.raises(TypeError, match="poisson_sampling must be True or False, got 'false'"):
        DPArguments(noise_multiplier=1.0, poisson_sampling="false")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no loss per example is known for LlamaModel|LlamaModel"):
        DPTrainer(llama().model, arguments(tmp_path), train_dataset=Texts(), privacy=PRIVACY)
    trainer = DPTrainer(llama(), arguments(tmp_path), train_dataset=Texts(), privacy=PRIVACY)
    with pytest.raises(NotImplementedError, match="each trial"):
        trainer.hyperparameter_search()


@pytest.mark.parametrize(
    "name", ["training_step", "get_train_dataloader", "get_batch_samples", "_get_train_sampler"]
)
def test_methods_that_would_be_left_out(tmp_path: Path, name: str) -> None:
    base = getattr(transformers.Trainer, name)
    mine = type("Mine", (transformers.Trainer,), {name: lambda self, *args: base(self, *args)})
    private = type("Private", (DPTrainerMixin, mine), {})
    with pytest.raises(TypeError, match=rf"Mine\.{name} would never run"):
        private(llama(), arguments(tmp_path), train_dataset=Texts(), privacy=PRIVACY)


def test_a_loader_of_ones_own(tmp_path: Path) -> None:
    class Mine(DPTrainer):
        def get_train_dataloader(self) -> Any:
            return transformers.Trainer.get_train_dataloader(self)

    trainer = Mine(
        llama(), arguments(tmp_path), train_dataset=Texts(), data_collator=collate, privacy=PRIVACY
    )
    with pytest.raises(TypeError, match=r"super\(\)\.get_train_dataloader\(\)"):
        trainer.train()


def test_collators_that_join_examples() -> None:
    flattening = transformers.DataCollatorWithFlattening()
    with pytest.raises(ValueError, match=r"made 1 rows of 2 examples"):
        ChunkedCollate(flattening, 4)([Texts()[0], Texts()[1]])


def test_padding_on_the_left() -> None:
    def left(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {k: v.flip(1) for k, v in collate(items).items()}

    data = Texts(lengths=(3, 5))
    ChunkedCollate(left, 1)([data[0], data[1]])  # each by itself has none
    with pytest.raises(ValueError, match=r"padding_side = 'right'"):
        ChunkedCollate(left, 2)([data[0], data[1]])


def test_chunks_are_of_nearly_equal_size() -> None:
    batch = ChunkedCollate(collate, 4)([Texts()[i] for i in range(9)])
    assert batch.sizes == [3, 3, 3] and [len(c["input_ids"]) for c in batch.chunks] == [3, 3, 3]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"fsdp_version": 1}, "fsdp_version=1"),
        ({"activation_checkpointing": True}, "gradient_checkpointing=True"),
        ({"cpu_ram_efficient_loading": True}, "first process alone"),
    ],
)
def test_settings_of_fsdp(setting: dict[str, Any], words: str) -> None:
    refuse_plugin(SimpleNamespace(fsdp_version=2))
    no = {"cpu_ram_efficient_loading": False}
    refuse_plugin(accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, **no))
    made = accelerate.FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **no, **setting})
    with pytest.raises(ValueError, match=words):
        refuse_plugin(made)
    with pytest.raises(ValueError, match=words):
        refuse_plugin(SimpleNamespace(**setting))
