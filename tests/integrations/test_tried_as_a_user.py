"""What users of other tools do first: where each is tested, and the tests that fit nowhere else."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from opacus import PrivacyEngine
from opacus.core.privacy.key import RunKey
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from tests.helpers.adapters import MODES, TokenLoss, logits, private, texts
from tests.helpers.oracle import trainable
from tests.integrations.tiny import llama

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours
TESTS = Path(__file__).parents[1]

# What was tried: the test, or why there is none. Names are files of tests/ and functions in them.
ROWS: dict[str, str] = {
    "a model's own loss, padded, in hooks": "core/isolation/test_usual_models.py::test_a_loss_inside_the_model",
    "Trainer saves and resumes": "integrations/test_trainer_checkpoints.py::test_killed_and_resumed",
    "Trainer's seed": (
        "integrations/test_trainer.py::test_the_trainers_seed_says_nothing_of_noise_and_draws"
    ),
    "Trainer under torchrun": (
        "integrations/test_trainer_ranks.py::test_clipped_sums_on_two_ranks"
    ),
    "model given to several ranks as it is": (
        "distributed/test_one_process_optimizer.py::test_first_step_is_refused_unless_meant"
    ),
    "accelerate.prepare after make_private": (
        "distributed/test_one_process_optimizer.py::test_first_step_is_refused_unless_meant"
    ),
    "Lightning's DDP after make_private": (
        "distributed/test_one_process_optimizer.py::test_first_step_is_refused_unless_meant"
    ),
    "private loader not used": (
        "engine/test_items_and_samples.py::test_loader_that_is_not_used_is_told_once"
    ),
    "documents flattened into one row": (
        "integrations/test_trainer_refusals.py::test_collators_that_join_examples"
    ),
    "max_grad_norm of Trainer": "engine/test_trainers.py::test_trainers_own_clipping_is_refused",
    "max_grad_norm of DPTrainer": (
        "integrations/test_trainer.py::test_max_grad_norm_of_the_trainer_changes_nothing"
    ),
    "empty Poisson batch": (
        "integrations/test_trainer.py::test_a_step_without_examples_releases_noise_alone"
    ),
    "empty batch in any model": (
        "engine/test_trainers.py::test_a_view_that_an_empty_batch_does_not_allow"
    ),
    "Trainer in all modes": (
        "integrations/test_trainer.py::test_without_noise_it_is_the_plain_trainer"
    ),
    "Trainer's own loss in ghost modes": (
        "engine/test_trainers.py::test_trainer_with_the_models_own_loss_in_ghost_modes"
    ),
    "gradient accumulation, Poisson": (
        "engine/test_trainers.py::test_trainer_accumulating_poisson_batches"
    ),
    "gradient accumulation in DPTrainer": (
        "integrations/test_trainer.py::test_clipped_sums_of_texts_of_any_length"
    ),
    "private optimizer forgotten": "none: DPTrainer makes it itself",
    "gradient checkpointing": ("integrations/test_trainer.py::test_checkpointing_of_activations"),
    "bf16": "integrations/test_trainer.py::test_bf16",
    "evaluation, schedules": "integrations/test_trainer.py::test_evaluation_and_schedule",
    "the best model": "integrations/test_trainer_checkpoints.py::test_the_best_model",
    "label smoothing": "integrations/test_trainer.py::test_heads_of_bert",
    "NEFTune": "integrations/test_trainer_refusals.py::test_training_arguments",
    "epsilon in logs": "integrations/test_trainer.py::test_epsilon_in_logs_and_card",
    "torch_compile=True": "integrations/test_trainer.py::test_compiled",
    "torch.compile of the model": (
        "integrations/test_model_zoo.py::test_a_whole_model_that_is_compiled"
    ),
    "compiled blocks": ("engine/test_compiled.py::test_compiled_blocks_give_what_eager_ones_give"),
    "compiled blocks, two passes": (
        "engine/test_compiled.py::test_two_passes_through_graphs_that_torch_makes_for_one"
    ),
    "Trainer with FSDP2": "integrations/test_trainer_ranks.py::test_clipped_sums_on_two_ranks",
    "SFTTrainer": "integrations/test_trl.py::test_sft_clipped_sums",
    "packing": "integrations/test_trl.py::test_sft_refusals",
    "DPOTrainer": "integrations/test_trl.py::test_dpo_clips_pairs",
    "Lightning": "engine/test_trainers.py::test_lightning",
    "Lightning's ModelParallelStrategy": (
        "distributed/test_other_loops.py::test_orders_of_two_ranks_are_right_or_refused"
    ),
    "accelerate.prepare before make_private": (
        "distributed/test_other_loops.py::test_orders_of_two_ranks_are_right_or_refused"
    ),
    "accelerate's FSDP2, then make_private": (
        "distributed/test_other_loops.py::test_orders_of_two_ranks_are_right_or_refused"
    ),
    "torch.distributed.checkpoint, FSDP2": (
        "distributed/test_other_loops.py::test_orders_of_two_ranks_are_right_or_refused"
    ),
    "FSDP2 by hand, checkpointing, compiled": (
        "distributed/test_compiled_blocks.py::test_compiled_blocks_under_fsdp2"
    ),
    "clip_grad_norm_": ("engine/test_changed_gradients.py::test_changed_sum_is_refused_by_name"),
    "torch.distributed.checkpoint": (
        "integrations/test_tried_as_a_user.py::test_state_dicts_of_torch_distributed"
    ),
    "LoRA and its variants": (
        "integrations/test_peft.py::test_adapters_of_ordinary_layers_are_exact"
    ),
    "DoRA, embeddings, tokens, IA3, VeRA, LoHa, prefixes": (
        "integrations/test_peft.py::test_adapters_are_exact"
    ),
    "the same under FSDP2": (
        "distributed/test_peft_sharded.py::test_two_ranks_give_the_sum_of_all_samples"
    ),
    "prompt tuning": "integrations/test_peft.py::test_adapters_are_exact",
    "prompt tuning, FSDP2": (
        "distributed/test_peft_sharded.py::test_two_ranks_give_the_sum_of_all_samples"
    ),
    "prefix tuning, as many texts as tokens": (
        "integrations/test_peft.py::test_batches_as_large_as_something_else"
    ),
    "adapters saved, loaded": "integrations/test_trainer_checkpoints.py::test_adapters",
    "adapters merged": (
        "examples/test_train_text_fsdp.py::test_adapters_are_trained_saved_and_merged"
    ),
    "generate in the middle, export": (
        "integrations/test_tried_as_a_user.py::test_text_is_generated_and_the_model_exported"
    ),
    "datasets, workers": "integrations/test_trainer.py::test_workers_columns_and_counts",
    "streams, Poisson": "integrations/test_trainer_refusals.py::test_data",
    "streams, not Poisson": (
        "integrations/test_tried_as_a_user.py::test_streams_are_refused_without_poisson_sampling"
    ),
    "tied embeddings": ("engine/test_modes_match_oracle.py::test_clipped_gradient_equals_oracle"),
    "quantised bases": "integrations/test_tried_as_a_user.py::test_adapters_of_a_quantised_base",
    "quantised bases, FSDP2": (
        "distributed/test_peft_sharded.py::test_adapters_of_a_quantised_base_on_two_ranks"
    ),
    "nf4 and int8 of bitsandbytes": "none: not among the packages of the tests; right by hand, 0.50.2",
    "low-bit and other optimizers": (
        "engine/test_several_optimizers.py::test_other_optimizers_step_as_without_privacy"
    ),
    "Muon with AdamW": (
        "engine/test_several_optimizers.py::test_muon_and_adamw_step_on_one_clipped_sum"
    ),
    "schedule-free": "integrations/test_trainer.py::test_optimizers_of_other_kinds",
    "data sets that need an int": (
        "integrations/test_tried_as_a_user.py::test_items_are_asked_for_by_int_on_ranks_too"
    ),
    "families of models": "integrations/test_model_zoo.py::test_family",
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_test_or_a_reason(row: str) -> None:
    file, _, name = ROWS[row].partition("::")
    if file.startswith("none: "):
        return
    tree = ast.parse((TESTS / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mode", MODES)
def test_adapters_of_a_quantised_base(mode: str) -> None:
    """Exact against plain training: the base has no float64, so there is no finer oracle."""
    quantization = pytest.importorskip("torchao.quantization")
    model: Any = llama()
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(2)
    for parameter in trainable(model)[1]:
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.train()
    ids, labels = texts(4), texts(4).roll(1, 1)
    rows = [
        torch.autograd.grad(TokenLoss()(logits(model, x[None]), y[None]), trainable(model)[1])
        for x, y in zip(ids, labels, strict=True)
    ]
    norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])
    c = float(norms.min()) / 2
    wrapped, optimizer, loss = private(model, mode, TokenLoss(), c, 4)
    loss(logits(wrapped, ids), labels).backward()
    optimizer.step()
    for place, parameter in enumerate(trainable(model)[1]):
        want = sum(row[place] * c / norm for row, norm in zip(rows, norms, strict=True)) / 4
        torch.testing.assert_close(parameter.grad, want, rtol=1e-3, atol=c * 1e-5)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_text_is_generated_and_the_model_exported(tmp_path: Path, mode: str) -> None:
    """Generating between forward and backward changes nothing; what is saved is a plain model."""
    transformers = pytest.importorskip("transformers")
    ids, results = texts(3), []
    for generates in (False, True):
        model: Any = llama()
        wrapped, optimizer, loss = private(model, mode, TokenLoss(), 0.1, 3)
        value = loss(logits(wrapped, ids), ids.roll(1, 1))
        if generates:
            model.eval()
            made = wrapped.generate(ids[:, :2], max_new_tokens=3, do_sample=False)
            model.train()
            assert made.shape == (3, 5)
        value.backward()
        optimizer.step()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    wrapped.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = wrapped.to_standard_module()
    assert type(plain) is type(model) and not any(m._forward_hooks for m in plain.modules())
    for a, b in zip(loaded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_dicts_of_torch_distributed() -> None:
    """A new optimizer gets its state without a private step, and what is loaded is the same."""
    from torch.distributed.checkpoint import state_dict as dcp

    def fresh() -> tuple[Any, Any, Any, Any]:
        model = llama()
        parameters = list(model.parameters())
        engine = PrivacyEngine()
        data = DataLoader(TensorDataset(torch.zeros(3, 1)), batch_size=3)
        wrapped, optimizer, loss, _ = engine.make_private(
            module=model, optimizer=torch.optim.AdamW(parameters), criterion=TokenLoss(),
            data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
            grad_sample_mode="ghost_bk",
        )  # fmt: skip
        return engine, wrapped, optimizer, loss

    engine, wrapped, optimizer, loss = fresh()
    loss(logits(wrapped, texts(3)), texts(3).roll(1, 1)).backward()
    optimizer.step()
    saved = copy.deepcopy(dcp.get_state_dict(wrapped, optimizer))
    other, again, second, _ = fresh()
    dcp.set_state_dict(again, second, model_state_dict=saved[0], optim_state_dict=saved[1])
    assert len(engine.accountant) == 1 and len(other.accountant) == 0
    for a, b in zip(wrapped.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg"], second.state[b]["exp_avg"])


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(torch.zeros(4, 5))


def test_streams_are_refused_without_poisson_sampling() -> None:
    model = torch.nn.Linear(5, 3)
    with pytest.raises(ValueError, match="IterableDataset"):
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(Stream(), batch_size=2), noise_multiplier=1.0,
            max_grad_norm=1.0, poisson_sampling=False,
        )  # fmt: skip


class Seeded(Dataset[Tensor]):
    """Items are made by ``manual_seed``, which takes an int and no tensor."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(5, generator=torch.Generator().manual_seed(index))


def test_items_are_asked_for_by_int_on_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    coins = torch.Generator().manual_seed(0)
    monkeypatch.setattr(RunKey, "agree", lambda self: None)
    sampler = DistributedUniformWithReplacementSampler(
        total_size=8, sample_rate=0.9, generator=coins
    )
    batches = list(sampler)
    assert batches[0] and all(isinstance(index, int) for batch in batches for index in batch)
    assert len(list(DataLoader(Seeded(), batch_sampler=batches))) == len(sampler)
