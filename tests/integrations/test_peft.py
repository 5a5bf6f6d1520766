"""A parameter belongs to the module whose forward reads it: PEFT's layers, containers, ..."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.adapters import (
    CONFIGS,
    MODES,
    TokenLoss,
    adapted,
    logits,
    peft,
    private,
    texts,
)
from tests.helpers.oracle import CLIPPING_EPS, norms, per_sample_gradients, trainable
from tests.helpers.several_optimizers import ScheduleFree
from tests.integrations.tiny import VOCABULARY

# PEFT asks transformers in a way that it deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]

SAMPLES = 3


def check(
    model: nn.Module, mode: str, criterion: nn.Module, x: Tensor, y: Tensor, run: Any
) -> None:
    """The clipped mean of one step is that of the oracle, which clips every sample."""
    rows = per_sample_gradients(
        model, lambda m, batch: criterion(run(m, batch[0]), batch[1]), (x, y)
    )
    length = norms(rows)
    c = float(length.min()) / 2
    factors = c / (length + CLIPPING_EPS)
    assert (length > c).all()
    model = copy.deepcopy(model).double().train()
    x = x.double() if x.is_floating_point() else x
    wrapped, optimizer, loss = private(model, mode, criterion, c, len(x))
    loss(run(wrapped, x), y).backward()
    optimizer.step()
    for name, parameter in zip(*trainable(model), strict=True):
        expected = torch.einsum("b,b...->...", factors, rows[name]) / len(x)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=1e-8)


# --- PEFT ---


# Ordinary layers are all that the rules see of these; one mode is enough.
ORDINARY: dict[str, Callable[[], Any]] = {
    "rsLoRA": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_rslora=True),
    "PiSSA": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"),
    "biases": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all"),
    "saved modules": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]
    ),
    "OFT": lambda: peft.OFTConfig(r=2, oft_block_size=0, target_modules=["q_proj"]),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(
        target_r=2, init_r=3, total_step=10, target_modules=["q_proj"]
    ),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=10, target_modules=["q_proj"]),
    "SHiRA": lambda: peft.ShiraConfig(r=1, target_modules=["q_proj"]),  # a sparse tensor
    "VB-LoRA": lambda: peft.VBLoRAConfig(
        r=2, num_vectors=8, vector_length=4, topk=2, target_modules=["q_proj"]
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_are_exact(kind: str, mode: str) -> None:
    ids = texts(SAMPLES)
    check(adapted(CONFIGS[kind]()), mode, TokenLoss(), ids, ids.roll(1, 1), logits)


@pytest.mark.parametrize("kind", ORDINARY)
def test_adapters_of_ordinary_layers_are_exact(kind: str) -> None:
    ids = texts(SAMPLES)
    check(adapted(ORDINARY[kind]()), "ghost_bk", TokenLoss(), ids, ids.roll(1, 1), logits)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "count", "length"),
    [
        ("DoRA", 1, 5),
        ("prefix", 1, 5),
        ("prefix", 5, 5),
        ("prefix", 3, 6),
        ("prompt", 1, 5),
        ("prompt", 5, 5),
        ("p-tuning", 3, 6),
    ],
)
def test_batches_as_large_as_something_else(kind: str, count: int, length: int, mode: str) -> None:
    """One text; as many texts as tokens, or as virtual tokens."""
    ids = texts(count, length)
    check(adapted(CONFIGS[kind]()), mode, TokenLoss(), ids, ids.roll(1, 1), logits)


@pytest.mark.parametrize("mode", MODES)
def test_dora_whose_identity_has_as_many_rows_as_samples(mode: str) -> None:
    ids = torch.randint(1, VOCABULARY, (16, 5), generator=torch.Generator().manual_seed(4))
    check(adapted(CONFIGS["DoRA"]()), mode, TokenLoss(), ids, ids.roll(1, 1), logits)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_later_steps_are_exact(kind: str, mode: str) -> None:
    """Most passes are not followed after the first ones, and one sample may run without taps."""
    model, c = adapted(CONFIGS[kind]()).double().train(), 1e-2
    twin, (names, parameters) = copy.deepcopy(model), trainable(model)
    wrapped, optimizer, loss = private(model, mode, TokenLoss(), c, SAMPLES)
    for count in (4, 3, 4, 1, 16, 5, 1):
        ids = texts(count)
        rows = per_sample_gradients(
            twin, lambda m, batch: TokenLoss()(logits(m, batch[0]), batch[1]), (ids, ids.roll(1, 1))
        )
        factors = (c / (norms(rows) + CLIPPING_EPS)).clamp(max=1.0)
        optimizer.zero_grad()
        loss(logits(wrapped, ids), ids.roll(1, 1)).backward()
        optimizer.step()
        for name, parameter in zip(names, parameters, strict=True):
            expected = torch.einsum("b,b...->...", factors, rows[name]) / SAMPLES
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=1e-8)


def orthogonality(model: nn.Module) -> Tensor:
    """AdaLoRA's term, which PEFT adds to the loss that the model itself computes."""
    factors = [p for n, p in model.named_parameters() if "lora_A" in n or "lora_B" in n]
    covariances = [p @ p.T if len(p) < p.shape[1] else p.T @ p for p in factors]
    norms_ = [(c - torch.eye(len(c), dtype=c.dtype)).norm() for c in covariances]
    return 0.5 * torch.stack(norms_).mean()


@pytest.mark.parametrize("mode", MODES)
def test_a_penalty_is_added_after_the_noise(mode: str) -> None:
    model = adapted(ORDINARY["AdaLoRA"]()).double()
    ids = texts(SAMPLES)
    wrapped, optimizer, loss = private(model, mode, TokenLoss(), 1e6, len(ids))
    names, parameters = trainable(model)
    without = []
    for declared in (False, True):
        if declared:
            optimizer.add_penalty(lambda: orthogonality(model))
        optimizer.zero_grad()
        loss(logits(wrapped, ids), ids.roll(1, 1)).backward()
        optimizer.step()
        without.append([p.grad.clone() for p in parameters])
    added = torch.autograd.grad(orthogonality(model), parameters, allow_unused=True)
    for name, before, after, own in zip(names, *without, added, strict=True):
        assert (own is None) == ("lora_E" in name)
        torch.testing.assert_close(after, before if own is None else before + own)
    with pytest.raises(ValueError, match=r"must return one number .*got float"):
        optimizer.add_penalty(lambda: 1.0)


# --- other modules ---


class Lists(nn.Module):
    """Reads parameters in containers, also nested ones."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(6, 5) * 0.3, torch.randn(6) * 0.3])
        self.nested = nn.ModuleDict({"more": nn.ParameterDict({"gain": torch.ones(6)})})

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrices[0].T + self.matrices[1]) * self.nested["more"]["gain"]


class LowRank(nn.Module):
    """A parametrization with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def low_rank() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(5, 6), "weight", LowRank())


FIRST: dict[str, Callable[[], nn.Module]] = {
    "containers": Lists,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(5, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(5, 6)),
    "low rank": low_rank,
}


class Net(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Reader(Net):
    """Reads a parameter outside the module that runs with it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.first.matrices[0].T[:, :3]


def examples() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 5), torch.randint(0, 3, (6,))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", FIRST)
def test_modules_that_read_parameters_of_parts(kind: str, mode: str) -> None:
    torch.manual_seed(0)
    check(Net(FIRST[kind]()), mode, nn.CrossEntropyLoss(), *examples(), lambda m, x: m(x))


@pytest.mark.parametrize("mode", MODES)
def test_a_part_that_is_read_elsewhere_too_is_refused(mode: str) -> None:
    x, y = examples()
    model, optimizer, loss = private(Reader(Lists()), mode, nn.CrossEntropyLoss(), 0.1, len(x))
    with pytest.raises(RuntimeError, match=r"first\.matrices\.0.*not clipped"):
        loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_module_may_name_the_parts_that_it_reads(mode: str) -> None:
    class Names(Reader):
        reads_parameters_of = ("first",)

    torch.manual_seed(0)
    check(Names(Lists()), mode, nn.CrossEntropyLoss(), *examples(), lambda m, x: m(x))


class RowsOfNobody(nn.Module):
    """Uses a layer on rows that come from no input, for its weight; maybe with gradients."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.layer, self.detach = nn.Linear(5, 3, bias=False), detach

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer(torch.eye(5, dtype=x.dtype))
        weight = weight.detach() if self.detach else weight
        return self.layer(x) / weight.norm()


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_nobody_get_a_gradient_for_each_sample(mode: str, detach: bool) -> None:
    check(RowsOfNobody(detach), mode, nn.CrossEntropyLoss(), *examples(), lambda m, x: m(x))


# --- optimizers ---


def test_train_and_eval_reach_the_users_optimizer() -> None:
    model = nn.Linear(5, 3)
    x, _ = examples()
    loader = DataLoader(TensorDataset(x), batch_size=6)
    own = ScheduleFree(model.parameters(), lr=0.1)
    _, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=own, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    optimizer.train()
    assert own.training
    optimizer.eval()
    assert not own.training
    plain = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.original_optimizer = plain
    assert not hasattr(optimizer, "train")
