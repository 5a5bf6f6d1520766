"""Loops that others wrote: Hugging Face's Trainer, accelerate, Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from opacus import PrivacyEngine
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from tests.helpers.modes import B, assert_close, oracle, private, trainable
from tests.helpers.problems import PROBLEMS, SequenceLoss, build, criterion

VOCABULARY, LENGTH, SAMPLES = 17, 6, 12

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


def gpt2_with_adapters(tied: bool) -> nn.Module:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tied,
    )  # fmt: skip
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)


def run_trainer(
    folder: Path,
    mode: str,
    wrap: bool,
    *,
    tied: bool = True,
    accumulate: int = 1,
    max_grad_norm: float = 0.0,
) -> tuple[PrivacyEngine, Any, bool]:
    """Trainer over the private loader and optimizer; whether the adapters moved."""
    transformers = pytest.importorskip("transformers")
    model, engine = gpt2_with_adapters(tied), PrivacyEngine()
    out = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(trainable(model), lr=1e-2),
        criterion=SequenceLoss(),
        data_loader=DataLoader(Sentences(), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        wrap_model=wrap,
    )
    loss_fn = out[2] if len(out) == 4 else None

    class Private(transformers.Trainer):  # type: ignore[name-defined, misc]
        def get_train_dataloader(self) -> Any:
            return out[-1]

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if loss_fn is None:
                return super().compute_loss(model, inputs, *args, **kwargs)
            logits = model(input_ids=inputs["input_ids"]).logits
            return loss_fn(logits[:, :-1], inputs["labels"][:, 1:])

    before = [p.detach().clone() for p in trainable(model)]
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=2, report_to=[], use_cpu=True, save_strategy="steps",
        save_steps=4, logging_steps=2, disable_tqdm=True, gradient_accumulation_steps=accumulate,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip
    trainer = Private(
        model=out[0] if wrap else model,
        args=arguments,
        train_dataset=Sentences(),
        optimizers=(out[1], None),
    )
    trainer.train()
    moved = any(not torch.equal(a, b) for a, b in zip(before, trainable(model), strict=True))
    return engine, trainer, moved


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_trainer(tmp_path: Path, mode: str, wrap: bool) -> None:
    # A wrapper is no PreTrainedModel: Trainer saves its weights, and safetensors no tied ones.
    engine, trainer, moved = run_trainer(tmp_path, mode, wrap, tied=not wrap)
    assert moved and len(engine.accountant) == trainer.state.global_step == 6
    assert (tmp_path / "checkpoint-4").is_dir()
    if not wrap:
        assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_trainers_own_clipping_is_refused(tmp_path: Path, mode: str) -> None:
    with pytest.raises(RuntimeError, match=r"changed or added .* set max_grad_norm=0"):
        run_trainer(tmp_path, mode, wrap=False, max_grad_norm=1e-3)
    engine, trainer, moved = run_trainer(tmp_path, "hooks", wrap=False, max_grad_norm=1e-3)
    assert moved and len(engine.accountant) == trainer.state.global_step


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_trainer_accumulating_poisson_batches(tmp_path: Path, mode: str) -> None:
    """Two draws may hold the same sample: its gradient would count twice, up to 2 C."""
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1"):
        run_trainer(tmp_path, mode, wrap=False, accumulate=2)


def test_trainer_with_the_models_own_loss_in_ghost_modes(tmp_path: Path) -> None:
    model = gpt2_with_adapters(True)
    out = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(trainable(model), lr=0.1),
        criterion=SequenceLoss(), data_loader=DataLoader(Sentences(), batch_size=4),
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="ghost",
    )  # fmt: skip
    ids = torch.stack([Sentences()[i]["input_ids"] for i in range(3)])
    out[0](input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(RuntimeError, match="criterion that make_private returned"):
        out[1].step()


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_accelerate(mode: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    inputs, targets = PROBLEMS["mlp"].batch(B)
    want, _ = oracle("mlp", inputs, targets, 0.5)
    model, optimizer, loss_fn = private("mlp", mode, 0.5)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        prepared_optimizer.zero_grad()
        weights = [p.detach().clone() for p in trainable(model)]
        loss = loss_fn(prepared(inputs), targets)
        accelerator.backward(loss)
        assert float(accelerator.gather(loss.detach())) == pytest.approx(float(loss))
        prepared_optimizer.step()
        assert_close([p.grad for p in trainable(model)], [w / B for w in want])
        with torch.no_grad():
            for p, w in zip(trainable(model), weights, strict=True):
                p.copy_(w)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_accelerate_accumulating_poisson_batches(mode: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inputs, targets = build("mlp"), *PROBLEMS["mlp"].batch(B)
    out = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion("mlp"), data_loader=DataLoader(TensorDataset(inputs, targets), 2),
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip
    loss_fn = out[2] if len(out) == 4 else criterion("mlp")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(out[0], out[1])
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1"):
        for _ in range(2):
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_fn(prepared(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_lightning(mode: str, precision: str) -> None:
    """Lightning insists on a tensor for a loss, and unscales by itself in 16-mixed."""
    lightning = pytest.importorskip("pytorch_lightning")
    plugins = pytest.importorskip("pytorch_lightning.plugins")
    model, optimizer, loss_fn = private("mlp", mode, 0.5)
    inputs, targets = PROBLEMS["mlp"].batch(B)
    want, _ = oracle("mlp", inputs, targets, 0.5)

    class Task(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return loss_fn(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

    half = precision == "16-mixed"
    trainer = lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[plugins.MixedPrecision(precision, "cpu")] if half else None,
    )
    trainer.fit(Task(), DataLoader(TensorDataset(inputs, targets), batch_size=B))
    assert_close([p.grad for p in trainable(model)], [w / B for w in want], 2e-2 if half else 1e-5)


def data_module(how: Mapping[str, Any] = MappingProxyType({})) -> Any:
    lightning = pytest.importorskip("pytorch_lightning")
    from opacus.lightning import DPLightningDataModule

    class Plain(lightning.LightningDataModule):  # type: ignore[name-defined, misc]
        data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.data, **{"batch_size": 10, **how})

    return DPLightningDataModule(Plain())


def test_steps_are_compared_with_the_draws_of_a_data_module(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, model = data_module(), nn.Linear(6, 3)
    private_model, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=module.train_dataloader(), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(private_model(x), y).backward()
        optimizer.step()

    batches = [batch for batch in module.train_dataloader() if len(batch[0]) > 1]
    assert len(batches) > 1
    for x, y in batches[:-1]:
        step(x, y)
    assert "has not been iterated" not in caplog.text
    with pytest.raises(RuntimeError, match="the data loader drew"):
        step(batches[-1][0][1:], batches[-1][1][1:])


@pytest.mark.parametrize("samples", [None, 40, 100])
def test_a_data_module_has_one_loader_for_each_data_set(samples: int | None) -> None:
    """Also where its sampler, of another length, is replaced."""
    how: dict[str, Any] = {}
    if samples is not None:
        how["sampler"] = WeightedRandomSampler([1.0] * 40, samples)
    module = data_module(how)
    known = module.train_dataloader()
    assert module.train_dataloader() is known
    how["batch_size"] = 4
    changed = module.train_dataloader()
    assert changed is not known and module.train_dataloader() is changed


def test_ranks_draw_their_own_items_of_a_data_module() -> None:
    """Drawn by several ranks, an item would be in the sum as often."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    module = data_module()
    module.train_dataloader()  # for a schedule, say: the ranks have not met yet
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sampler = module.train_dataloader().batch_sampler
    finally:
        dist.destroy_process_group()
    assert isinstance(sampler, DistributedUniformWithReplacementSampler)
    drawn = {int(item) for _ in range(10) for batch in sampler for item in batch}
    assert 15 < len(drawn) <= 20  # of 40 items


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "no_op", "ghost", "ghost_bk"])
def test_a_view_that_an_empty_batch_does_not_allow(mode: str) -> None:
    class Flattening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(x).view(x.shape[0], -1))

    model = Flattening()
    data = DataLoader(TensorDataset(torch.randn(8, 2, 3), torch.zeros(8)), batch_size=4)
    out = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data,
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip
    assert F.relu(out[0](torch.randn(2, 2, 3))).shape == (2, 3)
    if mode == "no_op":  # which has no recorder, so no made-up row
        with pytest.raises(RuntimeError, match=r"empty batch.*flatten\(1\)"):
            out[0](torch.randn(0, 2, 3))
    else:
        assert out[0](torch.randn(0, 2, 3)).shape == (0, 3)
