"""Groups of records that are handled together: uses of a layer, equal shapes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from torch import Tensor

from opacus.core.platform.sizes import GROUP_ELEMENTS, STACK_ELEMENTS
from opacus.core.record.record import Record


def small_by_rule(records: Iterable[Record]) -> tuple[list[list[Record]], list[Record]]:
    """Small records in groups that share a rule, and the large ones."""
    groups: dict[int, list[Record]] = {}
    for record in records:
        small = record.elements <= GROUP_ELEMENTS
        groups.setdefault(id(record.layer.rule) if small else 0, []).append(record)
    large = groups.pop(0, [])
    return list(groups.values()), large


def by_layer(records: Iterable[Record]) -> list[list[Record]]:
    """The uses of each layer, in the order of first use."""
    return _grouped(records, lambda record: record.spec.name)


def _grouped(records: Iterable[Record], key: Callable[[Record], Hashable]) -> list[list[Record]]:
    """Records with equal keys together, in the order of the first of each."""
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.values())


def by_shape(records: Iterable[Record]) -> list[list[Record]]:
    """Records of different layers in groups that one batched call can handle."""
    parts = []
    for group in _grouped(records, _group_key):
        size = max(1, STACK_ELEMENTS // max(1, group[0].elements))
        parts += [group[i : i + size] for i in range(0, len(group), size)]
    return parts


def several_and_others(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Large records whose rules take several at once as they are; and the others."""
    several: list[Record] = []
    others: list[Record] = []
    for record in records:
        large = record.elements > GROUP_ELEMENTS
        (several if large and record.layer.rule.takes_several else others).append(record)
    return several, others


def _group_key(record: Record) -> Hashable:
    """Equal for records that can be stacked; unique for large ones and for odd ones."""
    rule, activations, backprops = record.layer.rule, record.activations, record.backprops
    by_rows = rule.by_rows(activations, record.batch) and isinstance(backprops, Tensor)
    if not by_rows or record.elements > GROUP_ELEMENTS:
        return id(record)
    spec = record.spec
    shapes = tuple((t.shape, t.dtype, t.device) for t in (*activations, backprops))
    options = tuple(sorted((k, repr(v)) for k, v in spec.options.items()))
    return (id(rule), spec.params, tuple(spec.shapes.items()), options, shapes)
