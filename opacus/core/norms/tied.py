"""Norms of weights that a lookup table and a head share, as in most small language models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opacus.core.kernels.norms import tied
from opacus.core.kernels.norms.trusted import trusted
from opacus.core.platform.sizes import CHUNK_ELEMENTS
from opacus.core.record.record import Record
from opacus.core.rules.embedding import EmbeddingRule


class Pair(NamedTuple):
    """The only uses of a table and of a head that share their weight."""

    table: Record
    head: Record
    owner: str


def pairs_of(records: Sequence[Record], formed: Container[str]) -> tuple[list[Pair], list[Record]]:
    """Tables and heads that share a weight with nobody else, and the other records.

    Args:
        records: Of shared or reused layers.
        formed: Parameters of which per-sample gradients are there already.
    """
    owners = Counter(o for r in records for o in _owners(r))
    pairs, left = [], list(records)
    for table in records:
        if not isinstance(table.layer.rule, EmbeddingRule):
            continue
        (owner,) = _owners(table)
        heads = [r for r in records if r is not table and owner in _owners(r)]
        if owners[owner] != 2 or len(heads) != 1 or owner in formed:
            continue
        pair = Pair(table, heads[0], owner)
        if _fits(pair) and all(owners[o] == 1 or o == owner for o in _owners(pair.head)):
            pairs.append(pair)
            left = [r for r in left if r is not table and r is not pair.head]
    return pairs, left


def norms_of(pair: Pair) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Squared norms of a pair.

    Returns:
        ``[B]`` of the weight; ``[B]``, which of them are not known, because terms have cancelled;
        and those of the head's other parameters, by name in the model.
    """
    rows = max(1, CHUNK_ELEMENTS // max(1, _pair_elements(pair)))
    parts: list[Tensor] = []
    others: dict[str, list[Tensor]] = {}
    for start in range(0, max(1, pair.head.batch), rows):
        sums, rest = _part(pair, start, start + rows)
        parts.append(sums)
        for name, value in rest.items():
            others.setdefault(name, []).append(value)
    total, size = torch.cat(parts, dim=1)
    share = max(trusted(pair.table.backprops), trusted(pair.head.activations[0]))
    known = (total > share * size) | (size == 0)
    return total, ~known, {name: torch.cat(values) for name, values in others.items()}


def _part(pair: Pair, start: int, stop: int) -> tuple[Tensor, dict[str, Tensor]]:
    """``[2, b]`` of :func:`tied.sums_of` for some samples, and other parameters' norms."""
    table, head, _ = pair
    rule = table.layer.rule
    assert isinstance(rule, EmbeddingRule)
    use = rule.cut(table.activations, table.backprops, start, stop)
    other = head.layer.rule.cut(head.activations, head.backprops, start, stop)
    assert use is not None and other is not None
    ids, lookups = rule.looked_up(table.spec, *use)
    found = head.layer.rule.beside_table(head.spec, *other, ids)
    assert found is not None
    heads, rest = found
    owners = head.layer.owners
    own = rule.norm_sq(table.spec, *use)["weight"]
    return tied.sums_of(heads, lookups, own), {owners[n]: v for n, v in rest.items()}


def _owners(record: Record) -> list[str]:
    return [record.layer.owners[name] for name in record.spec.params]


def _pair_elements(pair: Pair) -> int:
    """Products of a sample's tokens at both places."""
    return _tokens(pair.table.activations[0]) * _tokens(pair.head.activations[0][..., 0])


def _tokens(ids: Tensor) -> int:
    return ids[:1].numel()


def _fits(pair: Pair) -> bool:
    """Whether both have a row for each sample, and their products fit into memory."""
    table, head, _ = pair
    rule = head.layer.rule
    return (
        rule.beside_tables
        and rule.norm_is_local
        and table.layer.rule.by_rows(table.activations, table.batch)
        and table.batch == head.batch
        and isinstance(head.backprops, Tensor)
        and _pair_elements(pair) <= CHUNK_ELEMENTS
    )
