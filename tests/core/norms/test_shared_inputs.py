"""Layers that read one tensor, such as query, key and value: their norms taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from opacus.core.kernels.norms import choice, clock, suite
from opacus.core.kernels.norms.reference import product_norm_sq
from opacus.core.norms import grouping
from opacus.core.norms.ledger import NormLedger
from opacus.core.record.layers import Layer, layers_of
from opacus.core.rules.linear import LinearRule
from opacus.core.sums.planner import Planner
from tests.helpers.ledgers import check, expected, records_of

BATCH, TOKENS, WIDTH = 3, 5, 8


class Attention(nn.Module):
    """Query, key, value and an output projection, whose input is another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 8)
        self.key = nn.Linear(WIDTH, 4, bias=False)
        self.value = nn.Linear(WIDTH, 4)
        self.output = nn.Linear(WIDTH, 8, bias=False)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Widths of the layers of each call that takes several of one input; small ones too."""
    seen: list[list[int]] = []

    def shared(activations: Tensor, backprops: Sequence[Tensor]) -> list[Tensor]:
        seen.extend([[g.shape[2] for g in backprops]] if len(backprops) > 1 else [])
        return [product_norm_sq(activations, g) for g in backprops]

    monkeypatch.setattr(suite, "_flash_shared", shared)
    monkeypatch.setattr(grouping, "GROUP_ELEMENTS", 0)
    return seen


def flash_layers(model: nn.Module) -> list[Layer]:
    """The layers, with the kernels of flash modes."""
    rule = LinearRule().with_kernels(suite.kernels_named("flash"))
    return [replace(layer, rule=rule) for layer in layers_of(model)]


@pytest.mark.parametrize("tokens", [(TOKENS,), (2, 3), ()])
def test_layers_of_one_input_are_taken_together(together, tokens) -> None:
    x, other = torch.randn(2, BATCH, *tokens, WIDTH)
    check(NormLedger(BATCH, deferred=True), records_of(flash_layers(Attention()), [x, x, x, other]))
    assert together.count([4, 4, 8]) == 1


def test_views_of_one_memory_count_as_one_input(together) -> None:
    x = torch.randn(BATCH, TOKENS, WIDTH)
    inputs = [x, x.view_as(x), x.detach(), x.clone()]
    check(NormLedger(BATCH, deferred=True), records_of(flash_layers(Attention()), inputs))
    assert together.count([4, 4, 8]) == 1


def test_other_views_of_the_memory_do_not(together) -> None:
    """Same address, but other numbers: strides differ, or the batch is read in another order."""
    x = torch.randn(BATCH, WIDTH, WIDTH)
    inputs = [x, x.mT, x.expand(BATCH, WIDTH, WIDTH), x[:, :4]]
    records = records_of(flash_layers(Attention()), inputs)
    check(NormLedger(BATCH, deferred=True), records)
    assert [4, 8] in together
    assert all(len(widths) <= 2 for widths in together)


def test_immediate_norms_do_not_wait_for_each_other(together) -> None:
    x, other = torch.randn(2, BATCH, TOKENS, WIDTH)
    records = records_of(flash_layers(Attention()), [x, x, x, other])
    ledger = NormLedger(BATCH)
    for record in records:
        ledger.add(record)
        assert not ledger.waiting
    assert together == []


@pytest.mark.parametrize("stored", [[], ["query"], ["key", "value"], ["query", "key", "value"]])
def test_what_is_stored_for_the_sum_is_not_measured_twice(together, monkeypatch, stored) -> None:
    monkeypatch.setattr(Planner, "stores", lambda self, record: record.spec.name in stored)
    x, other = torch.randn(2, BATCH, TOKENS, WIDTH)
    ledger = NormLedger(BATCH, deferred=True, planner=Planner())
    check(ledger, records_of(flash_layers(Attention()), [x, x, x, other]))
    assert ledger.kept.layers == set(stored)
    held = {r.spec.name for r in ledger.kept.held}
    assert held == {"query", "key", "value", "output"} - set(stored)
    rest = sorted([{"query": 8, "key": 4, "value": 4}[n] for n in held - {"output"}])
    assert [sorted(widths) for widths in together] == ([rest] if len(rest) > 1 else [])


def test_a_sample_that_is_not_finite_stays_alone(together) -> None:
    x = torch.randn(BATCH, TOKENS, WIDTH)
    x[1, 2, 3] = float("nan")
    ledger = NormLedger(BATCH, deferred=True)
    for record in records_of(flash_layers(Attention()), [x, x, x, x]):
        ledger.add(record)
    for name, norm_sq in ledger.finish().items():
        assert norm_sq.isfinite().tolist() == [True, "bias" in name, True]


def test_empty_batches(together) -> None:
    x = torch.randn(0, TOKENS, WIDTH)
    ledger = NormLedger(0, deferred=True)
    for record in records_of(flash_layers(Attention()), [x, x, x, x]):
        ledger.add(record)
    assert all(norm_sq.shape == (0,) for norm_sq in ledger.finish().values())


def test_small_layers_of_one_input_are_neighbours_in_their_launch(monkeypatch) -> None:
    """The kernel of many layers forms a Gram matrix once for neighbours with one input."""
    order: list[list[int]] = []

    def grouped(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        order.append([a.data_ptr() for a, _ in pairs])
        return [product_norm_sq(a, g) for a, g in pairs]

    monkeypatch.setattr(suite, "FLASH", replace(suite.FLASH, grouped=grouped))
    x, other = torch.randn(2, BATCH, TOKENS, WIDTH)
    check(NormLedger(BATCH, deferred=True), records_of(flash_layers(Attention()), [x, other, x, x]))
    assert order == [[x.data_ptr()] * 3 + [other.data_ptr()]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_gpu_with_its_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "GROUP_ELEMENTS", 0)
    choice.forget()
    layers = flash_layers(nn.ModuleList([nn.Linear(256, p) for p in (256, 64, 64)]))
    x = torch.randn(4, 128, 256, device="cuda", dtype=dtype)
    records = records_of(layers, [x, x, x])
    want = expected(records)
    ledger = NormLedger(4, deferred=True)
    for record in records:
        ledger.add(record)
    for name, norm_sq in ledger.finish().items():
        torch.testing.assert_close(norm_sq.double(), want[name], rtol=1e-3, atol=0)
    assert any(choice.SEPARATE in ways for ways in clock.measured().values())
