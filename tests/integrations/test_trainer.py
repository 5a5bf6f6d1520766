"""DPTrainer in one process: exact against the plain Trainer, and against the oracle."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import oracle
from tests.integrations.steps import FIXED, HUGE, check_steps, differ
from tests.integrations.tiny import Texts, arguments, bert, collate, llama, watched, weights

transformers = pytest.importorskip("transformers")

from opacus.integrations.transformers import DPArguments, DPTrainer, DPTrainerMixin  # noqa: E402
from opacus.integrations.transformers.batches import LogicalBatch  # noqa: E402
from opacus.losses import without_logits  # noqa: E402
from opacus.optimizers import JointOptimizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


Watched = watched(DPTrainer)


def trained(
    cls: Any, model: Any, folder: Path, data: Any, privacy: Any = None, **changes: Any
) -> Any:
    more = {} if privacy is None else {"privacy": privacy}
    kept = ("compute_loss_func", "eval_dataset", "optimizers")
    init = {k: changes.pop(k) for k in kept if k in changes}
    trainer = cls(
        model, arguments(folder, **changes), train_dataset=data, data_collator=collate,
        **init, **more,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost", "ghost_bk"])
def test_without_noise_it_is_the_plain_trainer(tmp_path: Path, mode: str) -> None:
    plain = trained(transformers.Trainer, llama(), tmp_path, Texts(), max_grad_norm=0, **FIXED)
    privacy = DPArguments(**HUGE, grad_sample_mode=mode)
    ours = trained(DPTrainer, llama(), tmp_path, Texts(), privacy, **FIXED, **SPLIT)
    before = weights(llama())
    assert differ(weights(plain.model), before) > 1e-2  # something was trained
    assert differ(weights(plain.model), weights(ours.model)) < 1e-6
    losses = [[h["loss"] for h in t.state.log_history if "loss" in h] for t in (plain, ours)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert len(ours.privacy_engine.accountant) == ours.state.global_step == 3
    assert plain.state.total_flos == ours.state.total_flos > 0


def test_a_model_in_eval_mode_as_from_pretrained_gives_it(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "llama")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    assert not model.training
    ours = trained(DPTrainer, model, tmp_path, Texts(), DPArguments(**HUGE), **FIXED, **SPLIT)
    plain = trained(transformers.Trainer, llama(), tmp_path, Texts(), max_grad_norm=0, **FIXED)
    assert differ(weights(plain.model), weights(ours.model)) < 1e-6


def test_a_model_without_logits_is_the_plain_trainer_too(tmp_path: Path) -> None:
    data = Texts(lengths=(6,))
    plain = trained(transformers.Trainer, llama(), tmp_path, data, max_grad_norm=0, **FIXED)
    privacy = DPArguments(**HUGE, grad_sample_mode="ghost_bk")
    model = copy.deepcopy(without_logits(llama()))
    ours = trained(DPTrainer, model, tmp_path, data, privacy, **FIXED, **SPLIT, eval_dataset=data)
    assert differ(weights(plain.model), weights(ours.model)) < 1e-6
    model.train()
    tokens = torch.tensor([data[0]["input_ids"], data[1]["input_ids"]])
    out = model(input_ids=tokens, labels=tokens)
    assert out.loss.shape == (2,) and out.logits.shape == (2, 6)
    assert model(input_ids=tokens).logits.shape == (2, 6, 23)
    losses = [t.evaluate(data)["eval_loss"] for t in (plain, ours)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    model.train()
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        trained(DPTrainer, model, tmp_path, data, privacy, label_smoothing_factor=0.1)
    model.lm_head.register_forward_hook(lambda layer, args, output: output * 2)
    with pytest.raises(ValueError, match="a cap or a scale"):
        model(input_ids=tokens, labels=tokens)


HEADS = {
    "BertForSequenceClassification": {"classes": 3},
    "BertForTokenClassification": {"lengths": (6,)},
    "BertForMaskedLM": {"lengths": (6,)},
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", list(HEADS))
def test_heads_of_bert(tmp_path: Path, head: str, smoothing: float) -> None:
    labels = 3 if head == "BertForSequenceClassification" else 23
    data, more = Texts(**HEADS[head]), {**FIXED, "label_smoothing_factor": smoothing}
    plain = trained(
        transformers.Trainer, bert(head, num_labels=labels), tmp_path, data, max_grad_norm=0, **more
    )
    ours = trained(
        DPTrainer,
        bert(head, num_labels=labels),
        tmp_path,
        data,
        DPArguments(**HUGE),
        **more,
        **SPLIT,
    )
    assert differ(weights(plain.model), weights(bert(head, num_labels=labels))) > 1e-3
    assert differ(weights(plain.model), weights(ours.model)) < 2e-6


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_clipped_sums_of_texts_of_any_length(tmp_path: Path, mode: str) -> None:
    """Padding by chunk, a loss by example, Poisson batches with empty ones among them."""
    privacy = DPArguments(noise_multiplier=0.0, clipping_norm=0.3, grad_sample_mode=mode)
    data = Texts(lengths=(3, 9, 5, 2))
    trainer = trained(
        Watched, llama(), tmp_path, data, privacy, max_steps=20, per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    norms = check_steps(trainer, llama(), 0.3)
    assert min(norms) > 0.3  # all clipped
    sizes = [batch.size for batch, _ in trainer.seen]
    assert len(set(sizes)) > 1 and max(sizes) > 1
    assert len(trainer.privacy_engine.accountant) == 20


def test_a_size_of_ones_own_and_room_for_larger_draws(tmp_path: Path) -> None:
    """The noise multiplier counts on the rate, the update divides by the size, C is passed."""
    privacy = DPArguments(noise_multiplier=0.0, clipping_norm=0.3, expected_batch_size=3)
    trainer = trained(
        Watched, llama(), tmp_path, Texts(), privacy, max_steps=16, per_device_train_batch_size=12
    )
    assert min(check_steps(trainer, llama(), 0.3)) > 0.3
    assert trainer.privacy_engine.accountant.history == [(0.0, 3 / 12, 16)]
    assert all(len(batch.chunks) == 1 for batch, _ in trainer.seen)  # 12 have room
    assert len({batch.size for batch, _ in trainer.seen}) > 1
    assert trainer.guarantee().expected_batch == 3


@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
def test_a_step_without_examples_releases_noise_alone(tmp_path: Path, mode: str) -> None:
    class Empty(Watched):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
            return super().training_step(model, LogicalBatch([], []), *args)

    privacy = DPArguments(noise_multiplier=0.0, clipping_norm=0.3, grad_sample_mode=mode)
    trainer = trained(Empty, llama(), tmp_path, Texts(), privacy)
    assert differ(weights(trainer.model), weights(llama())) == 0.0
    assert len(trainer.privacy_engine.accountant) == 2
    privacy = DPArguments(noise_multiplier=2.0, clipping_norm=0.3, grad_sample_mode=mode)
    noisy = trained(Empty, llama(), tmp_path, Texts(), privacy)
    before, after = weights(llama()), weights(noisy.model)
    moved = torch.cat([(after[n] - before[n]).flatten() for n in before])
    std = 0.5 * 2.0 * 0.3 / 4 * 2**0.5  # rate, sigma, C, expected batch, two steps
    assert float(moved.std()) == pytest.approx(std, rel=0.08)  # 5168 numbers


def test_classification_against_the_oracle(tmp_path: Path) -> None:
    privacy = DPArguments(noise_multiplier=0.0, clipping_norm=0.2)
    data = Texts(lengths=(3, 9, 5), classes=3)
    trainer = trained(Watched, bert(num_labels=3), tmp_path, data, privacy, max_steps=4, **SPLIT)
    assert min(check_steps(trainer, bert(num_labels=3), 0.2, oracle.classes)) > 0.2


def test_checkpointing_of_activations(tmp_path: Path) -> None:
    privacy = DPArguments(noise_multiplier=0.0, clipping_norm=0.3)
    data = Texts(lengths=(3, 9, 5))
    trainer = trained(
        Watched, llama(), tmp_path, data, privacy, max_steps=4, gradient_checkpointing=True, **SPLIT
    )
    assert min(check_steps(trainer, llama(), 0.3)) > 0.3


def test_bf16(tmp_path: Path) -> None:
    data, dtypes = Texts(), []

    class Seeing(DPTrainer):
        def per_sample_loss(self, outputs: Any, inputs: Any) -> Tensor:
            dtypes.append(outputs["logits"].dtype)
            return super().per_sample_loss(outputs, inputs)

    ours = trained(DPTrainer, llama(), tmp_path, data, DPArguments(**HUGE), **FIXED)
    half = trained(Seeing, llama(), tmp_path, data, DPArguments(**HUGE), **FIXED, bf16=True)
    assert set(dtypes) == {torch.bfloat16}
    assert 0 < differ(weights(ours.model), weights(half.model)) < 2e-2


def test_a_loss_function_of_ones_own(tmp_path: Path) -> None:
    """Trainer's compute_loss_func returns one loss: it is called for each example alone."""

    def function(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs.logits[:, :-1].float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    more = {**FIXED, "compute_loss_func": function}
    plain = trained(DPTrainer, llama(), tmp_path, Texts(), DPArguments(**HUGE), **FIXED)
    ours = trained(DPTrainer, llama(), tmp_path, Texts(), DPArguments(**HUGE), **more, **SPLIT)
    assert differ(weights(plain.model), weights(ours.model)) < 1e-6


@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    """Blocks are compiled, in place; activations are checkpointed around them."""
    more = {**FIXED, "torch_compile": True, "torch_compile_backend": "aot_eager",
            "gradient_checkpointing": True}  # fmt: skip
    runs = []
    for changes in (FIXED, more):
        torch._dynamo.reset()
        model = llama()
        runs.append(trained(DPTrainer, model, tmp_path, Texts(), DPArguments(**HUGE), **changes))
    assert all(block._compiled_call_impl is not None for block in model.model.layers)
    assert runs[0].state.log_history[0]["loss"] == pytest.approx(
        runs[1].state.log_history[0]["loss"], abs=1e-6
    )
    assert differ(weights(runs[0].model), weights(llama())) > 1e-3
    assert differ(weights(runs[0].model), weights(runs[1].model)) < 1e-6
    assert not any("_orig_mod" in name for name in model.state_dict())


class ScheduleFree(torch.optim.SGD):
    """Evaluates at the mean of all steps' weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5)
        self.modes: list[bool] = []
        self.sums: list[Tensor] = []
        self.own: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        every = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.sums = [a + b for a, b in zip(self.sums, every, strict=True)] if self.sums else every
        self.modes.append(True)
        return loss

    def eval(self) -> None:
        every = self.param_groups[0]["params"]
        self.own = [p.detach().clone() for p in every]
        for p, total in zip(every, self.sums, strict=True):
            p.data.copy_(total / len(self.modes))

    def train(self) -> None:
        for p, own in zip(self.param_groups[0]["params"], self.own, strict=False):
            p.data.copy_(own)
        self.own = []


def muon_and_sgd(parameters: list[Any]) -> Any:
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    return JointOptimizer([torch.optim.Muon(matrices, lr=0.01), torch.optim.SGD(rest, lr=0.5)])


@pytest.mark.parametrize("make", [ScheduleFree, muon_and_sgd])
def test_optimizers_of_other_kinds(tmp_path: Path, make: Any) -> None:
    """Schedule-free ones are told of training and evaluation; several take one step."""
    runs = []
    for cls, privacy in ((transformers.Trainer, None), (DPTrainer, DPArguments(**HUGE))):
        model = llama()
        more = {**FIXED, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": Texts(5)}
        optimizers = (make(list(model.parameters())), None)
        run = trained(
            cls, model, tmp_path, Texts(), privacy, max_grad_norm=0, optimizers=optimizers, **more
        )
        runs.append([h["eval_loss"] for h in run.state.log_history if "eval_loss" in h])
    assert len(runs[0]) == 3 and len(set(runs[0])) == 3
    assert runs[0] == pytest.approx(runs[1], abs=2e-4)


def test_a_loss_that_joins_examples_is_found(tmp_path: Path) -> None:
    class Joined(DPTrainer):
        def per_sample_loss(self, outputs: Any, inputs: Any) -> Tensor:
            losses = super().per_sample_loss(outputs, inputs)
            return losses - losses.mean() * 0.5

    with pytest.raises(Exception, match="alone"):
        trained(Joined, llama(), tmp_path, Texts(), DPArguments(**HUGE), **FIXED)


def test_a_subclass_of_ones_own(tmp_path: Path) -> None:
    class Mine(transformers.Trainer):
        def create_optimizer(self, *args: Any) -> Any:
            self.made = True
            return super().create_optimizer(*args)

    class Private(DPTrainerMixin, Mine):
        pass

    trainer = trained(Private, llama(), tmp_path, Texts(), DPArguments(noise_multiplier=1.0))
    assert trainer.made and trainer.state.global_step == 2


def test_a_loss_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    class Mine(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class Private(DPTrainerMixin, Mine):
        pass

    with pytest.raises(TypeError, match=r"Mine.compute_loss .* per_sample_loss"):
        trained(Private, llama(), tmp_path, Texts(), DPArguments(noise_multiplier=1.0))


def test_the_trainers_seed_says_nothing_of_noise_and_draws(tmp_path: Path) -> None:
    """Trainer seeds the global generator with 42."""
    privacy = DPArguments(noise_multiplier=1.0)
    runs = [trained(Watched, llama(), tmp_path, Texts(40), privacy, seed=42) for _ in range(2)]
    assert differ(weights(runs[0].model), weights(runs[1].model)) > 1e-3
    drawn = [[batch.chunks[0]["input_ids"].tolist() for batch, _ in run.seen] for run in runs]
    assert drawn[0] != drawn[1]


def test_max_grad_norm_of_the_trainer_changes_nothing(tmp_path: Path) -> None:
    runs = [
        trained(
            DPTrainer, llama(), tmp_path, Texts(), DPArguments(**HUGE), **FIXED, max_grad_norm=m
        )
        for m in (1e-4, 0.0)
    ]
    assert differ(weights(runs[0].model), weights(runs[1].model)) == 0.0
    assert not any("grad_norm" in entry for entry in runs[0].state.log_history)


def test_epsilon_in_logs_and_card(tmp_path: Path) -> None:
    privacy = DPArguments(target_epsilon=3.0, delta=1e-3, log_private_gradient_norms=True)
    trainer = trained(DPTrainer, llama(), tmp_path, Texts(40), privacy, max_steps=5)
    spent = [h["epsilon"] for h in trainer.state.log_history if "epsilon" in h]
    assert spent == sorted(spent) and 2.8 < spent[-1] <= 3.0
    assert spent[-1] == pytest.approx(trainer.privacy_engine.get_epsilon(1e-3))
    norms = [h for h in trainer.state.log_history if "private/grad_norm_p50" in h]
    assert norms and norms[0]["private/grad_norm_p10"] <= norms[0]["private/grad_norm_p90"]
    trainer.save_model(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text()
    for words in (
        "epsilon | 2.9",
        "0.001",
        "example",
        "prv, 5 steps",
        "Poisson, rate 0.1",
        "ghost_bk",
    ):
        assert words in card, words
    trainer.save_model(str(tmp_path / "model"))  # the section is replaced, not repeated
    assert (tmp_path / "model" / "README.md").read_text() == card
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert differ(weights(trainer.model), weights(reloaded)) == 0.0


def test_a_second_training_does_not_pass_the_budget(tmp_path: Path) -> None:
    privacy = DPArguments(target_epsilon=3.0, delta=1e-3)
    trainer = trained(DPTrainer, llama(), tmp_path, Texts(40), privacy, max_steps=5)
    with pytest.raises(ValueError, match="above target_epsilon=3"):
        trainer.train()
    assert len(trainer.privacy_engine.accountant) == 5


def test_a_training_set_that_is_exchanged(tmp_path: Path) -> None:
    """A curriculum: what is expected of a step, rate and delta are those of the second stage."""
    trainer = trained(DPTrainer, llama(), tmp_path, Texts(8), DPArguments(noise_multiplier=1.0))
    trainer.train_dataset = Texts(40)
    trainer.train()
    assert trainer.privacy_engine.accountant.history == [(1.0, 0.5, 2), (1.0, 0.1, 2)]
    assert trainer.guarantee().examples == 40 and trainer.delta == 0.1 / 40
    trainer.train_dataset = Texts(3)
    with pytest.raises(ValueError, match=r"expected to draw 4 examples .* train_dataset has 3"):
        trainer.train()


def test_evaluation_and_schedule(tmp_path: Path) -> None:
    privacy = DPArguments(**HUGE)
    more = {**FIXED, "eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_type": "linear",
            "warmup_steps": 1, "eval_dataset": Texts(5, (4, 7))}  # fmt: skip
    plain = trained(transformers.Trainer, llama(), tmp_path, Texts(), max_grad_norm=0, **more)
    ours = trained(DPTrainer, llama(), tmp_path, Texts(), privacy, **more, **SPLIT)
    for name in ("eval_loss", "learning_rate"):
        want, got = ([h[name] for h in t.state.log_history if name in h] for t in (plain, ours))
        assert len(want) == 3 and want == pytest.approx(got, abs=1e-5), name
    assert differ(weights(plain.model), weights(ours.model)) < 1e-6
    assert not ours.model._forward_hooks and not ours.model._forward_pre_hooks


def test_workers_columns_and_counts(tmp_path: Path) -> None:
    """A data set with a column that the model does not know, two workers, tokens counted."""
    datasets = pytest.importorskip("datasets")
    texts = Texts(12, (3, 6))
    rows = [{**texts[i], "title": f"text {i}"} for i in range(len(texts))]
    more = {**FIXED, "include_num_input_tokens_seen": "non_padding", "dataloader_num_workers": 2}
    data = datasets.Dataset.from_list(rows)
    trainer = trained(DPTrainer, llama(), tmp_path, data, DPArguments(**HUGE), **more, **SPLIT)
    assert trainer.state.num_input_tokens_seen == sum(len(row["input_ids"]) for row in rows)
    assert trainer.state.total_flos > 0
    same = trained(DPTrainer, llama(), tmp_path, texts, DPArguments(**HUGE), **FIXED)
    assert differ(weights(trainer.model), weights(same.model)) < 1e-6


@pytest.mark.parametrize("filters", [True, False])
def test_losses_that_are_not_finite_are_filtered_as_by_the_plain_trainer(
    tmp_path: Path, filters: bool
) -> None:
    given = [2.0, math.nan, math.inf, 3.0]

    def logged(cls: Any, *privacy: Any) -> float:
        class Given(cls):
            def training_step(self, *args: Any) -> Tensor:
                super().training_step(*args)
                loss = torch.tensor(given[self.state.global_step])
                return self._filtered(loss) if privacy else loss

        more = {**FIXED, "max_steps": 4, "logging_steps": 4, "logging_nan_inf_filter": filters}
        trainer = trained(Given, llama(), tmp_path, Texts(), *privacy, max_grad_norm=0, **more)
        return trainer.state.log_history[0]["loss"]

    ours, plain = logged(DPTrainer, DPArguments(**HUGE)), logged(transformers.Trainer)
    assert ours == pytest.approx(plain, nan_ok=True) and math.isfinite(plain) == filters
