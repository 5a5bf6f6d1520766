"""Layers that are held for the sum: measured several at a time, in few operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.core.kernels.norms import reference
from opacus.core.norms import ledger as norms
from opacus.core.norms.ledger import NormLedger
from opacus.core.record.layers import Layer, layers_of
from opacus.core.record.record import Record
from tests.core.kernels.cancelling import KINDS, exact, pair, share
from tests.core.rules.dispatched import Dispatched, largest_bytes
from tests.helpers.ledgers import check, expected, records_of

BATCH, TOKENS = 3, 6


class Keeps:
    """Holds every record; nothing has to run again."""

    looks = rounding = None

    def __init__(self, stored: tuple[str, ...] = ()) -> None:
        self.stored = stored

    def stores(self, record: Record) -> bool:
        return record.spec.name in self.stored


class Block(nn.Module):
    """The layers of a transformer's block, in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output, self.gate, self.up = (
            nn.Linear(16, width, bias=width == 24) for width in (16, 8, 8, 24, 40, 40)
        )
        self.down = nn.Linear(40, 16, bias=False)


def block(tokens: int = TOKENS) -> tuple[list[Layer], list[Tensor], nn.Module]:
    """Layers, what each reads, and the model that holds them."""
    model = Block()
    x, mixed, y, inner = (torch.randn(BATCH, tokens, w) for w in (16, 16, 16, 40))
    return layers_of(model), [x, x, x, mixed, y, y, inner], model


def ledger(**how: Any) -> NormLedger:
    planner: Any = Keeps(**how)
    return NormLedger(BATCH, planner=planner)


@pytest.fixture
def gram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram matrices whatever the shape."""
    monkeypatch.setattr(reference, "gram_is_cheaper", lambda *_: True)


def operations(run: Any) -> Dispatched:
    seen = Dispatched()
    with seen:
        run()
    return seen


@pytest.mark.parametrize("together", [1, 3, 7, 100])
@pytest.mark.parametrize("stored", [(), ("key", "value"), ("query", "gate", "up", "down")])
def test_norms_are_those_of_one_sample_at_a_time(together, stored, gram, monkeypatch) -> None:
    monkeypatch.setattr(norms, "MEASURED_TOGETHER", together)
    layers, inputs, _model = block()
    own = ledger(stored=stored)
    check(own, records_of(layers, inputs))
    assert {r.spec.name for r in own.kept.held} == {x.spec.name for x in layers} - set(stored)


def test_a_block_takes_few_operations(gram, monkeypatch) -> None:
    """One product an input and one an output, and one look at what has cancelled."""
    layers, inputs, _model = block()
    counts = []
    for together in (7, 1):
        monkeypatch.setattr(norms, "MEASURED_TOGETHER", together)
        own = ledger()
        records = records_of(layers, inputs)
        seen = operations(lambda own=own, records=records: [own.add(r) for r in records])
        assert len(own.norms.by_owner) == 7  # and one bias was formed
        products = sum(name.startswith("bmm") for name in seen.names)
        counts.append((products, len(seen.waits), len(seen.names)))
    (products, waits, names), one_by_one = counts
    assert products == 4 + 7 and one_by_one[0] == 2 * 7
    assert waits == 1 and one_by_one[1] == 7
    assert names < 0.65 * one_by_one[2]


def test_a_sample_that_cancels_is_computed_directly_in_its_layer_alone(gram, monkeypatch) -> None:
    layers, inputs, _model = block()
    records = records_of(layers, inputs)
    some = {r.spec.name: r for r in records}
    for kind, name in zip(KINDS, ("up", "gate"), strict=False):
        a, g = pair(kind, 1e-3, 1, TOKENS, *some[name].spec.shapes["weight"][::-1])
        x, backprops = some[name].activations[0].clone(), some[name].backprops.clone()
        x[1:2], backprops[1:2] = a, g
        some[name].put_tensors((x,), backprops)
        assert share(x, backprops)[1] < reference.TRUSTED < share(x, backprops)[0]
    direct, seen = reference.width_norm_sq, []
    monkeypatch.setattr(
        reference, "width_norm_sq", lambda x, y: (seen.append(len(x)), direct(x, y))[1]
    )
    monkeypatch.setattr(norms, "MEASURED_TOGETHER", 7)
    own, want = ledger(), expected(records)
    for record in records:
        own.add(record)
    got = own.finish()
    assert seen == [1, 1]
    for name, norm_sq in got.items():
        torch.testing.assert_close(norm_sq.double(), want[name], rtol=2e-3, atol=0)


@pytest.mark.parametrize("rows", [512, 4])
def test_what_is_stacked_is_bounded(rows: int, gram, monkeypatch) -> None:
    monkeypatch.setattr(reference, "GRAM_ROWS", rows)
    layers, inputs, _model = block(24)
    records = records_of(layers, inputs)
    pairs = [(r.activations[0], r.backprops) for r in records]
    whole = largest_bytes(reference.products_norm_sq, pairs)
    one = BATCH * 24 * min(rows, 24)  # elements of a Gram matrix that are formed at once
    assert whole == 7 * one * 4
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 4 * one)  # two layers, two matrices each
    assert largest_bytes(reference.products_norm_sq, pairs) == 2 * one * 4
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", one // 2)  # less than one of them
    assert largest_bytes(reference.products_norm_sq, pairs) <= one * 4 // 2
    for got, own in zip(reference.products_norm_sq(pairs), pairs, strict=True):
        torch.testing.assert_close(got.double(), exact(*own), rtol=1e-5, atol=0)


def test_shapes_and_dtypes_of_any_kind(gram) -> None:
    """Nothing is stacked with what differs, and each norm is in its place."""
    pairs = []
    for batch, tokens, dtype in [
        (3, 6, torch.float32), (3, 6, torch.float64), (2, 6, torch.float32), (3, 1, torch.float32),
        (3, 5, torch.float32), (3, 6, torch.bfloat16), (0, 6, torch.float32),
    ]:  # fmt: skip
        a, gs = torch.randn(batch, tokens, 7), [torch.randn(batch, tokens, p) for p in (4, 5)]
        pairs += [(a.to(dtype), g.to(dtype)) for g in gs]
        pairs.append((pairs[-1][0], gs[0].to(dtype)))  # of one input
    order = torch.randperm(len(pairs)).tolist()
    found = reference.products_norm_sq([pairs[i] for i in order])
    for place, got in zip(order, found, strict=True):
        a, g = pairs[place]
        want = (a.double().mT @ g.double()).square().sum((1, 2))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


def test_a_use_after_one_that_waits_is_refused() -> None:
    layers, inputs, _model = block()
    own, records = ledger(), records_of(layers, inputs)
    own.add(records[0])
    assert not own.norms.by_owner and own.has_measured("down")
    with pytest.raises(RuntimeError, match=r"'down' .* was used again after"):
        own.add(records[0])
    with pytest.raises(RuntimeError, match="'down' was used again after"):
        own.take_formed({"down.weight": torch.ones(BATCH, 16, 40)}, {"down.weight": "down"})


@pytest.mark.parametrize("together", [1, 3, 100])
@pytest.mark.parametrize("announced", [1, 3, 7])
def test_layers_of_which_another_use_was_expected(together, announced, gram, monkeypatch) -> None:
    """As of a loss while a later call of the model waits: they come out of the queue at the end."""
    monkeypatch.setattr(norms, "MEASURED_TOGETHER", together)
    layers, inputs, _model = block()
    records = records_of(layers, inputs)
    for record in records[::2][:announced] if announced < 7 else records:
        record.reused = True
    own = ledger()
    check(own, records)
    assert len(own.kept.held) == 7


def test_what_is_held_without_a_norm_is_refused() -> None:
    layers, inputs, _model = block()
    own = ledger()
    for record in records_of(layers, inputs):
        own.add(record)
    (waiting,) = own._unmeasured.values()
    lost = waiting.pop()
    with pytest.raises(RuntimeError, match=rf"{lost.spec.name}' \(Linear\) was not measured"):
        own.finish()


def test_each_stream_has_its_own_group(monkeypatch) -> None:
    """A stream may not read what another one is still to write."""
    monkeypatch.setattr(norms, "MEASURED_TOGETHER", 3)
    monkeypatch.setattr(norms, "stream_number", lambda index: index)
    layers, inputs, _model = block()
    own, records, seen = ledger(), records_of(layers, inputs), []
    for record, number in zip(records, [1, 2, 1, 2, 2, 1, 1], strict=True):
        record.device = torch.device("cuda", number)  # where it says it is
        own.add(record)
        seen.append(len(own.norms.by_owner))
    assert seen == [0, 0, 0, 0, 3, 6, 6]
    assert own.finish().keys() == expected(records).keys()


def test_only_what_is_held_anyway_waits() -> None:
    layers, inputs, _model = block()
    for own in (NormLedger(BATCH), ledger(stored=tuple(x.spec.name for x in layers))):
        for number, record in enumerate(records_of(layers, inputs), 1):
            own.add(record)
            assert len(own.norms.layers | own.kept.layers) == number and not own._unmeasured
