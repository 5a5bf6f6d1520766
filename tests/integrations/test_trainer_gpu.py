"""DPTrainer on a GPU, with the settings that it has there: compiled blocks, TF32, bf16."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.steps import HUGE, check_steps, differ
from tests.integrations.tiny import Texts, arguments, collate, llama, weights

transformers = pytest.importorskip("transformers")

from opacus.integrations.transformers import DPArguments, DPTrainer  # noqa: E402

# Of two cards a Trainer in one process would make nn.DataParallel.
ONE = pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one GPU")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.gpu, ONE]

CLIPPING_NORM = 0.3


class Watched(DPTrainer):
    """Keeps what each step starts from."""

    seen: list[tuple[Any, dict[str, Tensor]]]

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
        before = {name: w.cpu() for name, w in weights(self.model).items()}
        self.seen.append((copy.deepcopy(inputs), before))
        return super().training_step(model, inputs, *args)


def trained(folder: Path, privacy: DPArguments, **changes: Any) -> Watched:
    torch._dynamo.reset()
    settings = {"use_cpu": False, "max_steps": 4, "per_device_train_batch_size": 2, **changes}
    trainer = Watched(
        llama(), arguments(folder, **settings), train_dataset=Texts(lengths=(3, 9, 5, 2)),
        data_collator=collate, privacy=privacy,
    )  # fmt: skip
    trainer.seen = []
    trainer.train()
    trainer.model.cpu()
    return trainer


COMPILED = {"torch_compile": True, "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("mode", "changes"),
    [("auto", {}), ("ghost_bk", {}), ("hooks", {}), ("auto", COMPILED)],
    ids=["auto", "ghost_bk", "hooks", "compiled"],
)
def test_clipped_sums(tmp_path: Path, mode: str, changes: dict[str, Any]) -> None:
    privacy = DPArguments(
        noise_multiplier=0.0,
        clipping_norm=CLIPPING_NORM,
        expected_batch_size=4,
        grad_sample_mode=mode,
    )
    trainer = trained(tmp_path, privacy, tf32=False, **changes)
    assert min(check_steps(trainer, llama(), CLIPPING_NORM)) > CLIPPING_NORM


@pytest.mark.parametrize("changes", [{"tf32": True}, {"bf16": True, "torch_compile": True}])
def test_precision_as_trainers_set_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    exact = trained(tmp_path, DPArguments(**HUGE), tf32=False, max_steps=1)
    rough = trained(tmp_path, DPArguments(**HUGE), max_steps=1, **changes)
    moved = differ(weights(exact.model), weights(llama()))
    assert moved > 1e-2
    assert differ(weights(exact.model), weights(rough.model)) < 0.05 * moved
