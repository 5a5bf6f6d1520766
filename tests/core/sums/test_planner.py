"""What a single backward pass keeps of each layer, and that the choice changes no number."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.platform.held import HeldModule
from opacus.core.record.layers import Layer
from opacus.core.record.passes import Generation
from opacus.core.record.record import Record
from opacus.core.rules import rule_for
from opacus.core.sums import choice as choosing
from opacus.core.sums.planner import Planner
from opacus.core.sums.rates import Rates
from tests.core.rules.cases import spec_of
from tests.helpers.oracle import relative_error

FAST_MATH = Rates(multiply_adds=1e18, bytes=1e9)  # products cost nothing
FAST_MEMORY = Rates(multiply_adds=1e9, bytes=1e18)  # memory costs nothing


def record(batch: int, tokens: int, d: int, p: int) -> Record:
    module = nn.Linear(d, p, bias=False)
    layer = Layer(
        HeldModule(module), spec_of("head", module), rule_for(module), {"weight": "head.weight"}
    )
    x, g = torch.zeros(batch, tokens, d), torch.zeros(batch, tokens, p)
    return Record(layer, layer.spec, (x,), g, batch, False, Generation())


def decide(monkeypatch: pytest.MonkeyPatch, rates: Rates, one: Record, budget: int | None = None):
    monkeypatch.setattr(choosing, "rates_of", lambda device, dtype: rates)
    planner = Planner(budget)
    return planner.stores(one), planner


def test_it_stores_where_products_are_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    stores, planner = decide(monkeypatch, FAST_MEMORY, record(2, 64, 32, 48))
    assert stores
    assert planner.held_bytes == 2 * 32 * 48 * 4


def test_it_keeps_where_memory_is_slow_and_records_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores, planner = decide(monkeypatch, FAST_MATH, record(8, 4, 512, 512))
    assert not stores
    assert planner.held_bytes == 8 * 4 * (512 + 512) * 4


def test_beyond_the_budget_the_smaller_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    one = record(8, 4, 512, 512)  # fast memory would store 8 MiB rather than keep 128 KiB
    assert decide(monkeypatch, FAST_MEMORY, one)[0]
    stores, planner = decide(monkeypatch, FAST_MEMORY, one, budget=1 << 20)
    assert not stores and planner.held_bytes < 1 << 20


def test_a_norm_that_is_summed_over_ranks_is_never_taken_of_a_part() -> None:
    one = record(2, 3, 4, 5)
    one.layer.rule = copy.copy(one.layer.rule)
    one.layer.rule.norm_is_local = False
    assert not Planner().stores(one)


def test_the_table_names_layers_and_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    _, planner = decide(monkeypatch, FAST_MEMORY, record(2, 64, 32, 48))
    head, line = planner.report.table().splitlines()
    assert head.split()[:2] == ["layer", "kind"]
    assert "head" in line and "Linear" in line and "store" in line and "[2, 64, 32]" in line


class Mixed(nn.Module):
    """Convolution, table, norm, tied and reused layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.inner(torch.tanh(self.inner(self.norm(x))))
        return self.head(x).mean(1)


def oracle(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> list[Tensor]:
    total = [torch.zeros_like(p) for p in model.parameters()]
    for row, target in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(row[None]), target[None])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        for t, g in zip(total, grads, strict=True):
            t += g * min(1.0, clip / (norm.item() + 1e-6))
    return total


@pytest.mark.parametrize("what", ["store", "keep", "budget"])
@pytest.mark.parametrize("deferred", [False, True])
def test_either_choice_gives_the_oracles_sum(
    what: str, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    if what != "budget":
        monkeypatch.setattr(Planner, "stores", lambda self, r: asked.append(r) or what == "store")
    torch.manual_seed(0)
    model = Mixed().double()
    x, y = torch.randint(0, 11, (5, 7)), torch.randint(0, 11, (5,))
    want = oracle(copy.deepcopy(model), x, y, 0.3)
    private, _, loss_fn, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=5),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        loss_reduction="sum",
        poisson_sampling=False,
        grad_sample_mode="ghost_bk",
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        deferred_norm=deferred,
    )
    if what == "budget":
        private.held_budget = 0
    loss_fn(private(x), y).backward()
    assert asked or what == "budget"
    assert (private.per_sample_gradient_norms > 0.3).any()
    for parameter, grad in zip(model.parameters(), want, strict=True):
        assert relative_error(parameter.grad, grad) <= 1e-10
    assert "layer" in private.explain() or what != "budget"
