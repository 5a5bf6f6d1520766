"""Trainers compute a language model's loss without its logits, where it is the same loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.steps import FIXED, HUGE, check_steps, differ
from tests.integrations.tiny import VOCABULARY, Texts, arguments, collate, llama, weights

transformers = pytest.importorskip("transformers")

from opacus.integrations.transformers import DPArguments, DPTrainer  # noqa: E402
from opacus.integrations.transformers.logits import drop_logits  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours


class Watched(DPTrainer):
    """Keeps batches, weights before them, and the sizes of what the loss was computed from."""

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
        self.__dict__.setdefault("seen", []).append((inputs, weights(self.model)))
        return super().training_step(model, inputs, *args)

    def _losses(self, **named: Any) -> Tensor:
        self.__dict__.setdefault("shapes", set()).update(
            named["output_logits"].shape[2:]  # [B, T, V], or the losses [B, T]
        )
        return super()._losses(**named)


def train(cls: Any, model: Any, folder: Path, data: Any = None, **changes: Any) -> Any:
    init = {k: changes.pop(k) for k in ("privacy", "compute_loss_func") if k in changes}
    trainer = cls(
        model=model, args=arguments(folder, **changes), train_dataset=data or Texts(),
        data_collator=collate, **init,
    )  # fmt: skip
    trainer.train()
    return trainer


def gemma(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
        pad_token_id=0, attn_implementation="eager", **changes,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_sums_are_the_oracles_and_logits_are_not_formed(tmp_path: Path, tied: bool) -> None:
    model = llama()
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    before = set(vars(model)), set(vars(model.lm_head)), len(model._forward_pre_hooks)
    privacy = DPArguments(noise_multiplier=0.0, clipping_norm=0.3)
    data = Texts(lengths=(3, 9, 5, 2))
    trainer = train(Watched, model, tmp_path, data, privacy=privacy, max_steps=6)
    assert trainer.shapes == set()
    after = set(vars(model)), set(vars(model.lm_head)), len(model._forward_pre_hooks)
    assert before == after
    exact = llama()
    if tied:
        exact.lm_head.weight = exact.model.embed_tokens.weight
    assert min(check_steps(trainer, exact, 0.3)) > 0.3


def test_label_smoothing_is_that_of_the_plain_trainer(tmp_path: Path) -> None:
    more = {**FIXED, "label_smoothing_factor": 0.2}
    plain = train(transformers.Trainer, llama(), tmp_path, max_grad_norm=0, **more)
    ours = train(Watched, llama(), tmp_path, privacy=DPArguments(**HUGE), **more)
    sharp = train(Watched, llama(), tmp_path, privacy=DPArguments(**HUGE), **FIXED)
    assert ours.shapes == set()
    assert differ(weights(plain.model), weights(ours.model)) < 1e-6
    assert differ(weights(sharp.model), weights(ours.model)) > 1e-3


class RaisedForCausalLM(transformers.LlamaForCausalLM):
    """A loss with a term more."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if out.loss is not None:
            out.loss = out.loss + 0.0 * out.logits.sum()
        return out


def scaled() -> Any:
    model = llama()
    model.lm_head.register_forward_hook(lambda layer, args, output: output * 2)
    return model


def wrapped() -> Any:
    model = llama()
    model.lm_head = nn.Sequential(model.lm_head)
    return model


OTHERS = {
    "capped": lambda: gemma(final_logit_softcapping=5.0),
    "hooked": scaled,
    "with a term": lambda: RaisedForCausalLM(llama().config),
    "head of two layers": wrapped,
}


@pytest.mark.parametrize("kind", list(OTHERS))
def test_other_losses_come_from_logits(kind: str) -> None:
    model = OTHERS[kind]().train()
    before = set(vars(model)), len(model._forward_pre_hooks), len(model._forward_hooks)
    assert drop_logits(model, model, torch.device("cpu"), 0.0) is None
    assert (set(vars(model)), len(model._forward_pre_hooks), len(model._forward_hooks)) == before
    assert model.training
    plain = gemma(final_logit_softcapping=None) if kind == "capped" else llama()
    inside = drop_logits(plain, plain, torch.device("cpu"), 0.0)
    assert inside is not None
    inside.undo()


def test_a_capped_model_trains_on_its_logits(tmp_path: Path) -> None:
    privacy = DPArguments(noise_multiplier=0.0, clipping_norm=0.3)
    model, exact = (gemma(final_logit_softcapping=1.0) for _ in range(2))
    trainer = train(Watched, model, tmp_path, privacy=privacy, max_steps=4)
    assert trainer.shapes == {VOCABULARY}
    assert min(check_steps(trainer, exact, 0.3)) > 0.3


def test_a_loss_of_ones_own_is_given_logits(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.float().square().mean((1, 2))

    trainer = train(Watched, llama(), tmp_path, compute_loss_func=loss, privacy=DPArguments(**HUGE))
    assert trainer.shapes == {VOCABULARY}
