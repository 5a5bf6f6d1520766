"""Samples that depend on each other are refused before a step; usual models are left alone."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import opacus
from opacus import IsolationError, PrivacyEngine
from opacus.core.isolation.check import Isolation, Schedule
from opacus.core.isolation.probe import Probe
from opacus.core.isolation.undisturbed import undisturbed, without_dropout
from opacus.core.isolation.unit_slices import UnitRows, structure
from opacus.layers import DPLSTM

B, C = 8, 0.5
MODES = ["hooks", "functorch", "ghost", "ghost_bk"]
Loss = Callable[[Any, Any, Any], Any]


def private(model: nn.Module, mode: str, criterion: Any = None, **more: Any) -> Any:
    """Model, optimizer, criterion."""
    trained = [p for p in model.parameters() if p.requires_grad]
    out = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(trained, lr=0.1),
        criterion=criterion or nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.arange(4 * B)), batch_size=B),
        noise_multiplier=0.0, max_grad_norm=C, poisson_sampling=False, grad_sample_mode=mode,
        **more,
    )  # fmt: skip
    return out[0], out[1], out[2] if len(out) == 4 else criterion or nn.CrossEntropyLoss()


def plain(model: Any, criterion: Any, batch: Any) -> Any:
    return criterion(model(*batch[:-1]), batch[-1])


def step(parts: Any, batch: Any, loss: Loss = plain) -> None:
    model, optimizer, criterion = parts
    optimizer.zero_grad()
    loss(model, criterion, batch).backward()
    optimizer.step()


def vectors(rows: int = B, width: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, width) * torch.logspace(-1, 1, rows)[:, None], torch.arange(rows) % 3


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step of each comparison that is made, in order."""
    made: list[int] = []
    run = Probe.run

    def counted(self: Probe, *args: Any) -> Any:
        made.append(1)
        return run(self, *args)

    monkeypatch.setattr(Probe, "run", counted)
    return made


# --- what is refused ---


class Mixing(nn.Module):
    """Samples meet in the middle, in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "mean":
            h = h - 0.1 * h.mean(0, keepdim=True)
        elif self.how == "attention":
            h = h + (h @ h.T).softmax(1) @ h
        elif self.how == "capacity":
            h = h * (torch.arange(len(h)) < 4)[:, None]
        elif self.how == "scale":  # as of a tensorwise low-precision format
            scale = h.detach().abs().max() / 7
            h = h + ((h / scale).round() * scale - h).detach()
        return self.b(h.tanh())


class Auxiliary(nn.Module):
    """A load-balancing loss beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4, bias=False), nn.Linear(6, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).softmax(-1)
        out = (self.experts(x).view(-1, 4, 3) * p[..., None]).sum(1)
        share = F.one_hot(p.argmax(-1), 4).float().mean(0)
        return out, 4 * (share * p.mean(0)).sum()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.b(x).T


def in_batch(model: Any, criterion: Any, batch: Any) -> Any:
    return criterion(model(batch[0]), torch.arange(len(batch[0])))


def with_auxiliary(model: Any, criterion: Any, batch: Any) -> Any:
    out, auxiliary = model(batch[0])
    return criterion(out, batch[1]) + auxiliary


class Normalised(nn.Module):
    """Cross-entropy relative to the batch's mean."""

    reduction = "mean"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(x, y, reduction="none")
        losses = losses / losses.mean()
        return losses if self.reduction == "none" else losses.mean()


COUPLED: dict[str, tuple[Callable[[], nn.Module], Loss, Any]] = {
    **{how: ((lambda how=how: Mixing(how)), plain, None) for how in ("mean", "attention")},
    **{how: ((lambda how=how: Mixing(how)), plain, None) for how in ("capacity", "scale")},
    "auxiliary loss": (Auxiliary, with_auxiliary, None),
    "contrast": (Pair, in_batch, None),
}


@pytest.fixture
def unfollowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trail of rows says nothing: what is found is found by running units alone."""
    monkeypatch.setattr("opacus.core.record.whose.can_follow", lambda *a: False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", COUPLED)
@pytest.mark.usefixtures("unfollowed")
def test_samples_that_depend_on_each_other(kind: str, mode: str) -> None:
    make, loss, criterion = COUPLED[kind]
    torch.manual_seed(0)
    model = make()
    before = [p.clone() for p in model.parameters()]
    parts = private(model, mode, criterion)
    # A loss of the whole batch is refused where it is added to our criterion's.
    refused = ValueError if kind == "auxiliary loss" and "ghost" in mode else IsolationError
    with pytest.raises(refused, match=r"layer|loss"):
        step(parts, vectors(), loss)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None or not p.grad.any()


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_a_criterion_that_mixes_samples(mode: str) -> None:
    with pytest.raises(IsolationError, match="the criterion mixes samples"):
        step(private(mlp(), mode, Normalised()), vectors())


@pytest.mark.usefixtures("unfollowed")
@pytest.mark.parametrize("mode", MODES)
def test_the_message_says_where_and_what(mode: str) -> None:
    with pytest.raises(IsolationError) as caught:
        step(private(Pair(), mode), vectors(), in_batch)
    text = str(caught.value)
    assert "layer 'a' (Linear), parameter 'a.weight'" in text
    assert "contrastive" in text
    assert "Nothing was released" in text


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_a_refused_batch_is_left(mode: str) -> None:
    parts = private(mlp(), mode)
    model = parts[0]
    isolation = model.isolation
    isolation._probe._differences = lambda *a: []
    step(parts, vectors())
    del isolation._probe._differences
    isolation.schedule.known.clear()
    isolation._refusal = "something is wrong with a layer"
    released = [p.clone() for p in model.parameters()]
    with pytest.raises(IsolationError, match="something is wrong"):
        step(parts, vectors())
    for p, old in zip(model.parameters(), released, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None
        assert getattr(p, "grad_sample", None) is None
        assert getattr(p, "summed_grad", None) is None
    step(parts, vectors())  # the next batch is as good as any


@pytest.mark.usefixtures("unfollowed")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failing", [2, 3])  # the run on some samples, the first on one
def test_running_out_of_memory_says_nothing_of_the_model(mode: str, failing: int) -> None:
    class Large(nn.Module):
        runs = 0

        def forward(self, input: Tensor) -> Tensor:
            type(self).runs += 1
            if type(self).runs == failing:
                raise torch.OutOfMemoryError("no room")
            return input * 1.0

    parts = private(nn.Sequential(nn.Linear(6, 3), Large()), mode)
    released = [p.clone() for p in parts[0].parameters()]
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        step(parts, vectors())
    for p, old in zip(parts[0].parameters(), released, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None
    step(parts, vectors())  # it is checked, and trains
    assert not torch.equal(next(iter(parts[0].parameters())), released[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_rule_is_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the norms of two samples are swapped in one layer."""
    from opacus.core.norms.ledger import NormLedger

    add = NormLedger.add

    def swapped(self: Any, record: Any) -> None:
        if record.spec.name == "2":
            record.backprops = record.backprops.flip(0)
        add(self, record)

    monkeypatch.setattr(NormLedger, "add", swapped)
    # The second backward pass of "ghost" finds it first.
    with pytest.raises(RuntimeError, match="layer '2'"):
        step(private(mlp(), mode), vectors())


class Checkpointed(nn.Module):
    def __init__(self, preserve: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(6, 32), nn.Linear(32, 6), nn.Linear(6, 3)
        self.how = {"preserve_rng_state": preserve, "use_reentrant": reentrant}

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return self.b(F.dropout(self.a(x).relu(), 0.5, self.training))

        return self.h(checkpoint(block, x.clone().requires_grad_(), **self.how))


# --- what is warned of ---


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_draws_random_numbers(mode: str) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x + torch.randn_like(x))

    parts = private(Noisy(), mode)
    with pytest.warns(UserWarning, match="random numbers of its own"):
        step(parts, vectors())
    step(parts, vectors())  # once


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.h(self.e(ids))


def labels(even: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(0, 12, (B, 10))
    targets = ids.clone()
    if not even:
        targets[2:5, 3:] = -100
    return ids, targets


def over_tokens(model: Any, criterion: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def test_means_over_the_tokens_of_the_batch() -> None:
    parts = private(Tokens(), "hooks")
    with pytest.warns(UserWarning, match="mean over the tokens of the batch"):
        step(parts, labels(even=False), over_tokens)
    step(private(Tokens(), "hooks"), labels(even=True), over_tokens)


def test_means_over_class_weights() -> None:
    def weighted(model: Any, criterion: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 5.0, 20.0]))

    with pytest.warns(UserWarning, match="class weights"):
        step(private(mlp(), "hooks"), vectors(), weighted)


@pytest.mark.usefixtures("unfollowed")
def test_the_check_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    monkeypatch.setattr(Isolation, "_warned", False)
    with pytest.warns(UserWarning, match="OPACUS_ISOLATION_CHECK=0"):
        parts = private(Pair(), "ghost_bk")
    step(parts, vectors(), in_batch)
    private(Pair(), "ghost_bk")  # once
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1"):
        private(Pair(), "ghost_bk")


# --- usual models ---


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


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, 1, 8, 8), torch.arange(B) % 3


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.3),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.LayerNorm(16), nn.GELU())
    return nn.Sequential(layer, nn.Linear(16, 3))


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


# --- when, and without a trace ---


def test_when_checks_are_made(checks: list[int]) -> None:
    parts = private(mlp(), "ghost_bk")
    parts[0].isolation.interval = 10
    made = []
    for number in range(25):
        before = len(checks)
        step(parts, vectors(B + number % 3))  # Poisson sampling draws another number each time
        made += [number] * (len(checks) - before)
    assert made == [0, 10, 20]
    with pytest.raises(ValueError, match="interval must be"):
        parts[0].isolation.interval = 0


def test_a_new_structure_is_checked(checks: list[int]) -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(6, 3)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return self.l(x if scale is None else x * scale)

    parts = private(Optional(), "hooks")
    x, y = vectors()
    for batch in ((x, y), (x, y), (x, torch.ones(B, 1), y), (x, torch.ones(B, 1), y)):
        step(parts, batch)
    assert len(checks) == 2


def test_many_structures_take_little_time() -> None:
    schedule = Schedule()
    made = 0
    for number in range(10_000):
        if schedule.due(number):  # each batch is another
            schedule.note(number)
            made += 1
        schedule.steps += 1
    assert 8 < made < 45


@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_with_and_without(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights after three steps, buffers, and the random states, bit for bit."""
    ends = []
    for on in ("1", "0"):
        monkeypatch.setenv("OPACUS_ISOLATION_CHECK", on)
        monkeypatch.setattr(Isolation, "_warned", True)
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        model.register_buffer("seen", torch.zeros(()))
        model.register_forward_hook(lambda m, i, o: m.seen.add_(1.0) and None)
        parts = private(model, mode)
        for _ in range(3):
            step(parts, vectors())
        state = [*model.state_dict().values(), torch.get_rng_state(), torch.rand(3)]
        ends.append(([t.clone() for t in state], random.random(), model.training))
    (one, *rest), (two, *others) = ends
    assert rest == others
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


def test_undisturbed_puts_everything_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    model(torch.randn(4, 2)).sum().backward()
    grad, mean = model[0].weight.grad, model[2].running_mean
    kept, count = mean.clone(), model[2].num_batches_tracked.clone()
    assert grad is not None
    state = torch.get_rng_state()
    with undisturbed(model), without_dropout(model):
        assert model[0].weight.grad is None
        ones = torch.ones(8, 2)
        assert torch.equal(model[1](ones), ones)
        assert torch.equal(F.dropout(ones, 0.9), ones)
        q = torch.randn(1, 1, 4, 2)
        got = F.scaled_dot_product_attention(q, q, q, None, 0.9)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, q, q))
        model(torch.randn(4, 2)).sum().backward()
        model[0].calls = 1
        torch.rand(5)
    assert model[0].weight.grad is grad
    assert not hasattr(model[0], "calls")
    assert model[1].training
    assert model[2].running_mean is mean
    assert torch.equal(mean, kept)
    assert torch.equal(model[2].num_batches_tracked, count)
    assert torch.equal(torch.get_rng_state(), state)


# --- check_isolation ---


def test_check_isolation_of_an_ordinary_model() -> None:
    model, batch = encoder(), vectors()
    state = torch.get_rng_state()
    opacus.check_isolation(model, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None and not hasattr(p, "grad_sample") for p in model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_check_isolation_sees_the_whole_loss(mode: str) -> None:
    model, _, criterion = private(mlp(), mode)
    batch = vectors()
    opacus.check_isolation(model, batch, lambda m, b: criterion(m(b[0]), b[1]))

    def spread(m: Any, b: Any) -> Tensor:
        out = m(b[0])
        return F.cross_entropy(out, b[1]) + out.std(0, correction=0).sum()

    with pytest.raises(IsolationError, match="layer '0'"):
        opacus.check_isolation(model, batch, spread)


def test_check_isolation_says_what_it_cannot_do() -> None:
    x, y = vectors()

    def loss(m: Any, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]), b[1])

    with pytest.raises(ValueError, match="at least two samples"):
        opacus.check_isolation(mlp(), (x[:1], y[:1]), loss)
    with pytest.raises(ValueError, match="eval mode"):
        opacus.check_isolation(mlp().eval(), (x, y), loss)
    with pytest.raises(ValueError, match="cannot be checked"):
        opacus.check_isolation(mlp(), (x, y), lambda m, b: m(b[0].view(8, 6)).sum())
    with pytest.raises(
        ValueError, match=r"cannot be checked: it is called as loss\(model, batch\)"
    ):
        opacus.check_isolation(mlp(), (x, y), lambda outputs: outputs.sum(1))


def test_structures_and_rows() -> None:
    def key(rows: int, length: int) -> Any:
        inputs = {"ids": torch.zeros(rows, length).long(), "mask": None}
        return structure(inputs, rows, sizes=True, training=True)

    assert key(5, 7) == key(6, 9)
    assert key(5, 5) != key(5, 7)  # as many rows as positions
    rows = UnitRows(3)
    mask = torch.eye(3)
    one = rows.select({"x": torch.arange(6.0).view(3, 2), "mask": mask, "k": 2}, [2])
    assert one["x"].tolist() == [[4.0, 5.0]] and one["k"] == 2
    assert UnitRows(3, squares=False).select((mask,), [2])[0] is mask


# --- outputs and inputs in containers that torch's pytrees do not open ---


@dataclass
class Held:
    x: Any


class Coupled(nn.Module):
    """The gradient of each sample depends on the sign of a sum over all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch: Any) -> Any:
        x = batch if isinstance(batch, Tensor) else batch.x
        output = self.net(x)
        output = output * (output.detach() * x[:, :1]).sum().sign()
        return output if isinstance(batch, Tensor) else Held(output)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", [Held, lambda x: x])
def test_outputs_in_a_dataclass_are_checked(wrap: Any, mode: str) -> None:
    torch.manual_seed(0)
    parts, (x, y) = private(Coupled(), mode), vectors()

    def loss(model: Any, criterion: Any, batch: Any) -> Any:
        output = model(batch[0])
        return criterion(getattr(output, "x", output), batch[1])

    with pytest.raises((IsolationError, ValueError), match="sample"):
        step(parts, (wrap(x), y), loss)


class Aside(nn.Module):
    """What it takes and gives cannot be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch: Any) -> Any:
        self.output = self.net(batch() if callable(batch) else batch)


@pytest.mark.parametrize(
    ("wrap", "what"),
    [(lambda x: x, "returned NoneType"), (lambda x: lambda: x, "was called with no tensor")],
)
def test_what_cannot_be_looked_into_is_told_once(wrap: Any, what: str) -> None:
    (model, optimizer, criterion), (x, y) = private(Aside(), "hooks"), vectors()
    with pytest.warns(UserWarning, match=what) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            model(wrap(x))
            criterion(model.output, y).backward()
            optimizer.step()
    assert len([one for one in seen if "nothing checks" in str(one.message)]) == 1
