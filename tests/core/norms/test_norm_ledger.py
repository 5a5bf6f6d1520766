"""Norms from records: immediate, deferred, grouped, early; reused and shared layers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.core.norms import grouping, tied, together
from opacus.core.norms import ledger as norms
from opacus.core.norms.ledger import NormLedger, total_norms
from opacus.core.record import layers as layers_file
from opacus.core.record.layers import Layer
from opacus.core.record.passes import Generation
from opacus.core.record.record import Record
from opacus.core.rules import LayerRule
from opacus.core.rules.generic import Call
from opacus.core.rules.linear import LinearRule

Inputs = tuple[Tensor, ...]
# What one use of a layer saw: its inputs and the gradient of its output.
Use = tuple[Layer, Inputs, Tensor]
KEPT: list[nn.Module] = []  # layers do not keep theirs


def layers_of(model: nn.Module) -> list[Layer]:
    KEPT.append(model)
    return layers_file.layers_of(model)


def use(layer: Layer, *inputs: Tensor) -> Use:
    """A use of a layer on these inputs, with random backprops."""
    with torch.no_grad():
        output = layer.module(*inputs)
    return layer, inputs, torch.randn_like(output)


def record_of(layer: Layer, inputs: Inputs, backprops: Tensor, rows: int, reused: bool) -> Record:
    activations: Inputs | Call = inputs
    if layer.rule.needs_parameters:
        parameters = {n: p.detach() for n, p in layer.module.named_parameters(recurse=False)}
        activations = Call(inputs, {}, parameters, {})
    return Record(layer, layer.spec, activations, backprops, rows, reused, Generation())


def records_of(uses: Sequence[Use]) -> list[Record]:
    """The records of one backward pass."""
    names = [layer.spec.name for layer, _, _ in uses]
    rows = {n: max(len(g) for layer, _, g in uses if layer.spec.name == n) for n in names}
    return [
        record_of(layer, x, g, rows[layer.spec.name], names.count(layer.spec.name) > 1)
        for layer, x, g in uses
    ]


def finish(ledger: NormLedger, records: Iterable[Record]) -> dict[str, Tensor]:
    for record in records:
        ledger.add(record)
    return ledger.finish()


def expected(uses: Sequence[Use], batch: int) -> dict[str, Tensor]:
    """Squared norms by one backward pass a sample, in float64, per owner of a parameter."""
    norm_sq: dict[str, Tensor] = {}
    owners = {owner for layer, _, _ in uses for owner in layer.owners.values()}
    for owner in owners:
        norm_sq[owner] = torch.zeros(batch, dtype=torch.float64)
    for i in range(batch):
        total: dict[str, Tensor] = {}
        for layer, inputs, backprops in uses:
            if i >= len(backprops):
                continue
            module = copy.deepcopy(layer.module).double()
            out = module(*(_double(x[i : i + 1]) for x in inputs))
            parameters = [module.get_parameter(n) for n in layer.spec.params]
            grads = torch.autograd.grad(
                (out * backprops[i : i + 1].double()).sum(), parameters, allow_unused=True
            )
            for name, grad in zip(layer.spec.params, grads, strict=True):
                if grad is not None:
                    owner = layer.owners[name]
                    total[owner] = total.get(owner, torch.zeros(())) + grad
        for owner, grad in total.items():
            norm_sq[owner][i] = grad.square().sum()
    return norm_sq


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def assert_norms(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-9, atol=1e-12, msg=name)


class Scale(nn.Module):
    """A layer that only the generic rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.weight)


def small_layers() -> Sequence[Use]:
    """Three equal linear layers, one of another shape, two equal norms, a table."""
    kinds = [nn.Linear(6, 6) for _ in range(3)] + [
        nn.Linear(6, 4),
        nn.LayerNorm(6),
        nn.LayerNorm(6),
    ]
    model = nn.Sequential(*kinds, nn.Embedding(9, 6)).double()
    inputs = [torch.randn(5, 7, 6).double() for _ in kinds] + [torch.randint(0, 9, (5, 7))]
    return [use(layer, x) for layer, x in zip(layers_of(model), inputs, strict=True)]


def reused_layers() -> Sequence[Use]:
    """Uses of different lengths; the second use of the first layer has fewer rows."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6), Scale()).double()
    linear, norm, group, scale = layers_of(model)
    inputs = {
        linear: [(5, 3, 6), (3, 2, 6), (5, 1, 6)],
        norm: [(5, 3, 6), (5, 4, 6)],
        group: [(5, 6, 3), (2, 6, 3)],
        scale: [(5, 6), (4, 6)],
    }
    return [use(layer, torch.randn(s).double()) for layer, shapes in inputs.items() for s in shapes]


def tied_layers(padding: int | None = 3) -> Sequence[Use]:
    """A table and a head with one weight; the head has a bias of its own."""
    kinds = nn.Embedding(9, 6, padding_idx=padding), nn.Linear(6, 9), nn.LayerNorm(6)
    model = nn.Sequential(*kinds).double()
    model[1].weight = model[0].weight
    table, head, norm = layers_of(model)
    hidden = torch.randn(5, 7, 6).double()
    return [use(table, torch.randint(0, 9, (5, 7))), use(head, hidden), use(norm, hidden)]


MODELS: dict[str, Callable[[], Sequence[Use]]] = {
    "small": small_layers,
    "reused": reused_layers,
    "tied": tied_layers,
}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_norms_match_one_sample_at_a_time(name: str, deferred: bool) -> None:
    uses = MODELS[name]()
    got = finish(NormLedger(5, deferred=deferred), records_of(uses))
    assert_norms(got, expected(uses, 5))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_order_of_the_records_does_not_matter(name: str, deferred: bool) -> None:
    uses = MODELS[name]()
    got = finish(NormLedger(5, deferred=deferred), reversed(records_of(uses)))
    assert_norms(got, expected(uses, 5))


@pytest.mark.parametrize("chunk", [1, 100, 1000])
@pytest.mark.parametrize("name", ["reused", "tied"])
def test_sums_over_uses_a_few_samples_at_a_time(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(tied, "CHUNK_ELEMENTS", chunk)  # 1: not even one sample's products
    uses = MODELS[name]()
    assert_norms(finish(NormLedger(5), records_of(uses)), expected(uses, 5))


def test_cross_term_of_tied_layers_counts() -> None:
    uses = tied_layers()
    together = expected(uses, 5)["0.weight"]
    apart = expected(uses[:1], 5)["0.weight"] + expected(uses[1:2], 5)["0.weight"]
    assert not torch.allclose(together, apart, rtol=1e-2)


def test_autocast_rounds_what_the_head_is_given_and_not_the_table() -> None:
    table, (head, (hidden,), g), norm = tied_layers()
    uses = [table, (head, (hidden.bfloat16(),), g.bfloat16()), norm]
    got = finish(NormLedger(5), records_of(uses))["0.weight"].double()
    torch.testing.assert_close(got, expected(uses, 5)["0.weight"], rtol=1e-5, atol=0.0)


def test_tied_layers_need_no_per_sample_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = tied_layers()
    ids = uses[0][1][0]
    assert (ids == 3).any() and len(ids[0].unique()) < len(ids[0])  # padding, rows met again

    def refuse(*args: object) -> None:
        raise AssertionError("formed")

    for layer, _, _ in uses[:2]:
        monkeypatch.setattr(type(layer.rule), "per_sample_grad", refuse)
    assert_norms(finish(NormLedger(5), records_of(uses)), expected(uses, 5))
    third = [*uses, uses[1]]  # a head that is used twice
    with pytest.raises(AssertionError, match="formed"):
        finish(NormLedger(5), records_of(third))


@pytest.mark.parametrize("left", [0.0, 1e-3])
def test_tied_gradients_that_cancel(left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sample 1 but ``left`` of it, in fp32: by products nothing of that would be right."""
    (table, (ids,), e), (head, (hidden,), g), _ = tied_layers(padding=None)
    ids[1], g[1], hidden[1], e[1] = torch.arange(7), 0.0, torch.randn(7, 6), 0.0
    g[1, range(7), range(7)] = 1.0
    e[1] = (left - 1.0) * hidden[1]
    for layer in (table, head):
        layer.module.float()
    uses = [(table, (ids,), e.float()), (head, (hidden.float(),), g.float())]
    want = expected(uses, 5)["0.weight"]
    assert float(want[1]) < 1e-4 < 1.0 < float(want[0])
    got = finish(NormLedger(5), records_of(uses))["0.weight"].double()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0.0)
    monkeypatch.setattr(tied, "trusted", lambda tensor: -1.0)
    bad = finish(NormLedger(5), records_of(uses))["0.weight"].double()
    torch.testing.assert_close(bad[2:], want[2:], rtol=1e-5, atol=0.0)
    assert float((bad[1] - want[1]).abs()) > 5e-3 * float(want[1]) or left == 0.0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """``(rule, rows)`` of each call of a rule's ``norm_sq``."""
    seen: list[tuple[str, int]] = []
    for layer in layers_of(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Embedding(2, 2))):
        kind = type(layer.rule)
        original = kind.norm_sq

        def counted(self, spec, activations, backprops, original=original):
            seen.append((type(self).__name__, len(backprops)))
            return original(self, spec, activations, backprops)

        monkeypatch.setattr(kind, "norm_sq", counted)
    return seen


def test_equal_layers_share_one_call_when_deferred(calls: list[tuple[str, int]]) -> None:
    finish(NormLedger(5, deferred=True), records_of(small_layers()))
    want = [("EmbeddingRule", 5), ("LayerNormRule", 10), ("LinearRule", 5), ("LinearRule", 15)]
    assert sorted(calls) == want


def test_immediate_norms_take_one_call_a_layer(calls: list[tuple[str, int]]) -> None:
    finish(NormLedger(5), records_of(small_layers()))
    # Small gradients that the norm would form anyway are kept instead, for a second pass.
    assert calls == [("LinearRule", 5)] * 4 + [("EmbeddingRule", 5)]


def test_small_gradients_are_formed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    norm_layers = small_layers()[4:6]
    ledger, first, second = NormLedger(5), *records_of(norm_layers)
    ledger.add(first)
    monkeypatch.setattr(norms, "FORMED_ELEMENTS", 5 * 12 - 1)  # 5 samples of 6 + 6 elements
    monkeypatch.setattr(norms, "FORMED_SHARE", 0.0)
    ledger.add(second)
    assert ledger.kept.layers == {first.spec.name}
    assert set(ledger.kept.formed) == {f"{first.spec.name}.weight", f"{first.spec.name}.bias"}
    assert_norms(ledger.finish(), expected(norm_layers, 5))
    with pytest.raises(RuntimeError, match="used again"):
        ledger.add(first)


def test_groups_are_limited_in_size(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    per_record = 5 * 7 * (6 + 6)
    monkeypatch.setattr(grouping, "STACK_ELEMENTS", 2 * per_record)
    uses = small_layers()
    got = finish(NormLedger(5, deferred=True), records_of(uses))
    assert [rows for rule, rows in calls if rule == "LinearRule"] == [10, 5, 5]
    assert_norms(got, expected(uses, 5))


def test_large_records_are_not_stacked(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "GROUP_ELEMENTS", 5 * 7 * (6 + 6) - 1)
    together: list[list[int]] = []
    original = LinearRule.norm_sq_of_several

    def several(self: LinearRule, uses: Sequence[Any]) -> list[dict[str, Tensor]]:
        together.append([len(backprops) for _, _, backprops in uses])
        return original(self, uses)

    monkeypatch.setattr(LinearRule, "norm_sq_of_several", several)
    uses = small_layers()
    assert_norms(finish(NormLedger(5, deferred=True), records_of(uses)), expected(uses, 5))
    assert together == [[5, 5, 5]]
    assert calls == [("LinearRule", 5), ("EmbeddingRule", 5)]  # the others are formed


DIFFERENT = {
    "eps": (nn.LayerNorm(6, eps=1e-5), nn.LayerNorm(6, eps=10.0)),
    "frozen": (nn.LayerNorm(6), nn.LayerNorm(6, bias=False)),
    "groups": (nn.GroupNorm(2, 6), nn.GroupNorm(3, 6)),
    "kind": (nn.LayerNorm(6, bias=False), nn.RMSNorm(6, eps=1e-5)),
    "padding": (nn.Embedding(6, 6), nn.Embedding(6, 6, padding_idx=1)),
    "table": (nn.Embedding(6, 6), nn.Embedding(8, 6)),
    "stride": (nn.Conv1d(6, 6, 1, groups=2), nn.Conv1d(6, 6, 1, groups=3)),
    "bag": (nn.EmbeddingBag(6, 6, mode="sum"), nn.EmbeddingBag(6, 6, mode="mean")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_are_not_mixed_up(name: str) -> None:
    """Equal shapes, but not the same computation."""
    layers = layers_of(nn.Sequential(*copy.deepcopy(DIFFERENT[name])).double())
    lookup = name in ("padding", "table", "bag")
    x = torch.randint(0, 6, (5, 6)) if lookup else torch.randn(5, 6, 6).double()
    uses = [use(layer, x) for layer in layers]
    got = finish(NormLedger(5, deferred=True), records_of(uses))
    assert_norms(got, expected(uses, 5))


def test_parameter_frozen_in_one_of_two_equal_layers() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    model[1].bias.requires_grad_(False)
    uses = [use(layer, torch.randn(5, 6).double()) for layer in layers_of(model)]
    got = finish(NormLedger(5, deferred=True), records_of(uses))
    assert_norms(got, expected(uses, 5))


def bag_use(layer: Layer, sizes: list[int]) -> tuple[Use, Tensor]:
    """A bag layer with flat lookups, and its squared norms."""
    starts = [0, *itertools.accumulate(sizes)]
    flat, offsets = torch.randint(0, 6, (sum(sizes),)), torch.tensor(starts[:-1])
    backprops = torch.randn(len(sizes), 6, dtype=torch.float64)
    norm_sq = torch.zeros(len(sizes), dtype=torch.float64)
    for i, size in enumerate(sizes):
        counts = flat[starts[i] : starts[i] + size].bincount(minlength=6).double()
        norm_sq[i] = counts.square().sum() * backprops[i].square().sum()
    return (layer, (flat, offsets), backprops), norm_sq


def test_flat_lookups_as_many_as_samples_are_not_taken_for_rows() -> None:
    bags = [nn.EmbeddingBag(6, 6, mode="sum") for _ in range(2)]
    layers = layers_of(nn.Sequential(*bags).double())
    sizes = ([2, 0, 1, 1, 1], [0, 0, 0, 4, 1])
    uses, want = zip(*map(bag_use, layers, sizes), strict=True)
    got = finish(NormLedger(5, deferred=True), records_of(uses))
    assert_norms(got, {"0.weight": want[0], "1.weight": want[1]})


def test_flat_lookups_are_not_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "CHUNK_ELEMENTS", 1)
    (layer,) = layers_of(nn.Sequential(nn.EmbeddingBag(6, 6, mode="sum")).double())
    first, _ = bag_use(layer, [2, 0, 1, 1, 1])
    opposite = (layer, first[1], -first[2])
    got = finish(NormLedger(5), records_of([first, opposite, first]))
    _, (flat, offsets), backprops = first
    once = layer.rule.norm_sq(layer.spec, (flat, offsets), backprops)["weight"]
    assert_norms(got, {"0.weight": once})


@pytest.mark.parametrize("chunk", [1, 1 << 26])
@pytest.mark.parametrize("layer", [0, 2])
def test_samples_without_any_use_have_a_zero_norm(
    layer: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The use with all rows got no gradient, so that only shorter ones are left."""
    monkeypatch.setattr(together, "CHUNK_ELEMENTS", chunk)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6)).double()
    chosen = layers_of(model)[layer]
    uses = [use(chosen, torch.randn(rows, 6).double()) for rows in (2, 3)]
    for delivered in (uses, uses[:1]):
        records = [record_of(*u, rows=5, reused=True) for u in delivered]
        got = finish(NormLedger(5), records)
        assert_norms(got, expected(delivered, 5))
        assert all(not value[3:].any() and value[:2].all() for value in got.values())


# --- memory budget ---


@pytest.mark.parametrize("budget", [0, 1, 5 * 7 * 6 * 8, 3 * 5 * 7 * 6 * 8, 1 << 30])
@pytest.mark.parametrize("name", MODELS)
def test_a_budget_changes_no_number(name: str, budget: int) -> None:
    uses = MODELS[name]()
    ledger = NormLedger(5, deferred=True, budget_bytes=budget)
    assert_norms(finish(ledger, records_of(uses)), expected(uses, 5))


def test_waiting_records_stay_within_the_budget() -> None:
    budget = 2 * 5 * 7 * 6 * 8
    ledger = NormLedger(5, deferred=True, budget_bytes=budget)
    most = 0
    for record in records_of(small_layers()):
        ledger.add(record)
        held = sum(r.backprops.nbytes for r in ledger.waiting)
        assert held <= budget
        most = max(most, len(ledger.waiting))
    assert most == 2
    assert not ledger.known().keys() & {"6.weight"}  # the latest waits
    assert "0.weight" in ledger.known()  # the oldest does not


def test_records_that_need_each_other_wait_beyond_the_budget() -> None:
    ledger = NormLedger(5, deferred=True, budget_bytes=0)
    table, head, norm = records_of(tied_layers())
    for record in (table, norm, head):
        ledger.add(record)
    assert ledger.waiting == [table, head]
    assert ledger.known().keys() == {"2.weight", "2.bias"}


def test_finish_forgets_the_records() -> None:
    ledger = NormLedger(5, deferred=True)
    finish(ledger, records_of(small_layers()))
    assert ledger.waiting == []


# --- misuse ---


class StoresOne:
    """Stores the gradients of the first record, and has no room for those of later ones."""

    looks, rounding = False, None

    def __init__(self) -> None:
        self.room = 1

    def stores(self, record: Record) -> bool:
        self.room -= 1
        return self.room >= 0


def test_a_use_that_was_hidden_is_added_to_what_is_stored() -> None:
    """As of a layer that runs twice in a reentrant checkpoint, under a budget."""
    layer = layers_of(nn.Sequential(nn.Linear(6, 6)).double())[0]
    uses = [use(layer, torch.randn(5, t, 6).double()) for t in (3, 2)]
    planner: Any = StoresOne()
    ledger = NormLedger(5, planner=planner)
    got = finish(ledger, [record_of(*one, 5, reused=False) for one in uses])
    assert_norms(got, expected(uses, 5))
    for name, grad in ledger.kept.formed.items():
        torch.testing.assert_close(grad.flatten(1).square().sum(1), got[name])
    assert not ledger.kept.held

    kept = NormLedger(5, planner=planner)  # there is no room any more
    kept.add(record_of(*uses[0], 5, reused=False))
    with pytest.raises(RuntimeError, match="layer '0' was used again after"):  # a carried use
        kept.take_formed({"0.weight": torch.ones(5, 6, 6)}, {"0.weight": "0"})

    planner.room, planner.rounding = 1, lambda name, grad: None
    rounded = NormLedger(5, planner=planner)
    with pytest.raises(RuntimeError, match="used again after"):
        finish(rounded, [record_of(*one, 5, reused=False) for one in uses])


@pytest.mark.parametrize("options", [{}, {"deferred": True, "budget_bytes": 0}])
def test_a_use_after_the_norm_was_computed_raises(options: dict[str, object]) -> None:
    ledger = NormLedger(5, **options)
    record = records_of(small_layers())[0]
    ledger.add(record)
    with pytest.raises(RuntimeError, match=r"layer '0' \(Linear\) was used again"):
        ledger.add(record)


def test_deferred_uses_not_announced_as_such_are_summed() -> None:
    first, _, second = reused_layers()[:3]
    records = [record_of(*u, rows=5, reused=False) for u in (first, second)]
    got = finish(NormLedger(5, deferred=True), records)
    assert_norms(got, expected([first, second], 5))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 6])
def test_rows_that_are_not_the_batch_raise_and_name_the_layer(rows: int, deferred: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    (record,) = records_of([use(layers_of(model)[0], torch.randn(rows, 6))])
    ledger = NormLedger(5, deferred=deferred)
    with pytest.raises(ValueError, match=rf"layer '0' \(Linear\) saw {rows} rows in a batch of 5"):
        ledger.add(record)
    assert ledger.waiting == []
    assert ledger.finish() == {}


def test_fewer_rows_in_every_use_raise() -> None:
    layer = layers_of(nn.Sequential(nn.Linear(6, 4)))[0]
    records = records_of([use(layer, torch.randn(4, 6)), use(layer, torch.randn(3, 6))])
    with pytest.raises(ValueError, match="layer '0'"):
        NormLedger(5).add(records[0])


# --- no samples ---


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_an_empty_batch_has_empty_norms(name: str, deferred: bool) -> None:
    uses = [(layer, tuple(x[:0] for x in inputs), g[:0]) for layer, inputs, g in MODELS[name]()]
    got = finish(NormLedger(0, deferred=deferred), records_of(uses))
    assert_norms(got, expected(uses, 0))


def test_total_norm_is_over_all_parameters() -> None:
    norm_sq = {"a": torch.tensor([9.0, 0.0]), "b": torch.tensor([16.0, 4.0])}
    total = total_norms(norm_sq, 2, torch.device("cpu"))
    assert torch.equal(total, torch.tensor([5.0, 2.0]))
    assert torch.equal(total_norms({}, 3, torch.device("cpu")), torch.zeros(3))


# --- layers that run again ---


class Noisy(LayerRule):
    """A rule whose gradients differ each time, as with dropout inside."""

    needs_parameters = True

    def per_sample_grad(self, spec, activations, backprops):
        return {"weight": torch.randn(len(backprops), 6)}


def test_gradients_of_layers_that_run_again_are_formed_once() -> None:
    layer = layers_of(nn.Sequential(Scale()))[0]
    layer.rule = Noisy()
    ledger = NormLedger(5, deferred=True)
    got = finish(ledger, records_of([use(layer, torch.randn(5, 6))] * 2))
    want = ledger.kept.formed["0.weight"].square().sum(1)
    torch.testing.assert_close(got["0.weight"], want)


def test_generic_layer_that_shares_a_parameter() -> None:
    model = nn.Sequential(Scale(), nn.LayerNorm(6, bias=False)).double()
    model[1].weight = model[0].weight
    scale, norm = layers_of(model)
    x = torch.randn(5, 6).double()
    uses = [use(norm, x), use(scale, x)]
    got = finish(NormLedger(5), records_of(uses))
    assert_norms(got, expected(uses, 5))
