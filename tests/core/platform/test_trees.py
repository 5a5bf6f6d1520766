"""Containers that models take and return, beside those that torch's pytrees open."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from opacus.core.platform.trees import flatten, leaves_of, map_tensors, tensors_of, unflatten

A, B = torch.zeros(2), torch.ones(3)


@dataclass
class Pair:
    first: Any
    second: Any = field(init=False, default=None)


@dataclass(frozen=True)
class Frozen:
    inner: Any


class Named(dict[str, Any]):
    """A mapping that pytrees do not know."""


VALUES = {
    "list": [A, {"b": B}],
    "dataclass": Pair(A),
    "frozen": Frozen((A, Pair(B))),
    "mapping": UserDict(a=A, b=[B]),
    "subclass": Named(a=Frozen(A)),
    "ordered": OrderedDict(a=A),
    "read only": MappingProxyType({"a": A}),
    "object": SimpleNamespace(a=A, b=None, name="x"),
    "nested": (Pair(UserDict(a=[Frozen(A), 3])), SimpleNamespace(b=B)),
}


@pytest.mark.parametrize("kind", VALUES)
def test_tensors_are_found_and_replaced(kind: str) -> None:
    value = VALUES[kind]
    before = tensors_of(value)
    assert before and all(any(t is own for own in (A, B)) for t in before)
    made = map_tensors(lambda t: t + 5, value)
    assert [t.tolist() for t in tensors_of(made)] == [(t + 5).tolist() for t in before]
    assert [t.tolist() for t in tensors_of(value)] == [t.tolist() for t in before]
    assert type(made) is type(value) or kind == "read only"


def test_what_is_not_replaced_stays() -> None:
    value = SimpleNamespace(a=A, other=object(), name="x")
    leaves, tree = flatten({"v": value, "n": 3})
    made = unflatten(leaves, tree)
    assert made["n"] == 3 and vars(made["v"]) == vars(value) and made["v"] is not value


def test_modules_tensors_and_packed_sequences_are_leaves() -> None:
    module, packed = nn.Linear(2, 2), pack_padded_sequence(torch.zeros(3, 2, 1), [3, 1])
    assert leaves_of([module, A]) == [module, A]
    assert leaves_of(Pair(packed), PackedSequence)[0] is packed
    assert len(tensors_of(packed)) == 2


def test_objects_without_tensors_are_leaves() -> None:
    value = SimpleNamespace(a=3, inner=SimpleNamespace(a=A))
    assert leaves_of([value]) == [value]


def test_an_object_that_holds_itself_is_a_leaf_there() -> None:
    value = SimpleNamespace(a=A)
    value.own, value.inner = value, Pair(value)
    assert sum(leaf is value for leaf in leaves_of([value])) == 2
    made = map_tensors(lambda t: t + 1, value)
    assert made.a.tolist() == [1, 1] and made.own is value and made.inner.first is value


class Subclass(Tensor):
    """With attributes of its own."""


def test_tensors_of_other_classes_are_leaves() -> None:
    tensor = A.as_subclass(Subclass)
    tensor.scale = B  # type: ignore[attr-defined]
    (found,) = tensors_of([tensor])
    assert found is tensor
