"""What a batch of no samples looks like."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    default_collate,
)

from opacus.data.empty_batch import blank_batch
from opacus.data_loader import (
    CollateFnWithEmpty,
    DPDataLoader,
    wrap_collate_with_empty,
)

SECRET = 7  # what samples are made of; no blank batch may hold it

Pair = namedtuple("Pair", ["x", "label"])


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: list
    note: str | None = None


class Samples(Dataset):
    """`size` samples made by `make(index)`."""

    def __init__(self, make: Any, size: int = 8) -> None:
        self.make, self.size = make, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.make(int(index))


def features(index: int) -> torch.Tensor:
    return torch.full((3,), float(SECRET + index))


def tensors(index: int) -> tuple:
    return features(index), torch.tensor(SECRET + index)


def fields(index: int) -> dict:
    return {"x": features(index), "label": SECRET + index, "weight": 7.5, "id": f"user{index}"}


def fixed_batches(loader: DataLoader, batches: list, **kwargs: Any) -> DataLoader:
    """`loader`'s samples and collate function on batches of our choice."""
    return DataLoader(loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn, **kwargs)


def layout(batch: Any) -> Any:
    """Types, dtypes and shapes, the batch size left out."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, tuple(batch.shape[1:])
    if isinstance(batch, dict):
        return {key: layout(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not all(isinstance(v, str) for v in batch):
        return type(batch), [layout(value) for value in batch]
    return type(batch)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        features,
        tensors,
        fields,
        lambda i: Pair(*tensors(i)),
        lambda i: {"inputs": [tensors(i), features(i)], "target": {"y": np.float32(i)}},
    ],
    ids=["tensor", "tuple", "dict", "namedtuple", "nested"],
)
def test_empty_batch_has_the_structure_of_the_others(make: Any, workers: int) -> None:
    """Also the first one, and also in a worker that has seen no other."""
    loader = DPDataLoader(Samples(make), sample_rate=0.5)
    batches = list(fixed_batches(loader, [[], [1, 2], [], [3]], num_workers=workers))
    assert [layout(batch) for batch in batches] == [layout(batches[1])] * 4
    assert_blank(batches[0])
    assert_blank(batches[2])


def assert_blank(value: Any) -> None:
    """No samples, and no trace of one."""
    if isinstance(value, torch.Tensor):
        assert value.numel() == 0 or not value.any()
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    elif isinstance(value, dict):
        for entry in value.values():
            assert_blank(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            assert_blank(entry)
    else:
        assert not value


def test_values_of_an_empty_batch_of_fields() -> None:
    empty = DPDataLoader(Samples(fields), sample_rate=0.5).collate_fn([])
    assert empty["x"].shape == (0, 3)
    assert empty["label"].shape == (0,) and empty["label"].dtype == torch.int64
    assert empty["weight"].shape == (0,) and empty["weight"].dtype == torch.float64
    assert empty["id"] == []


def test_padded_batches() -> None:
    def collate(samples: list) -> dict:
        x = pad_sequence(samples, batch_first=True)
        return {"x": x, "length": [len(s) for s in samples], "longest": x.shape[1]}

    data = Samples(lambda i: torch.ones(i + 2, 4))
    loader = DPDataLoader(data, sample_rate=0.5, collate_fn=collate)
    empty, full = fixed_batches(loader, [[], [1, 2]])
    assert full["x"].shape == (2, 4, 4)
    assert empty["x"].shape == (0, 2, 4)
    assert empty["length"] == [] and empty["longest"] == 0


def test_list_of_fields_and_list_of_samples_are_told_apart() -> None:
    def collate(samples: list) -> list:
        return [default_collate(samples), list(samples)]

    collate_fn = CollateFnWithEmpty(collate, dataset=Samples(features))
    stacked, boxes = collate_fn([])
    assert stacked.shape == (0, 3)
    assert boxes == []


def test_tensor_that_does_not_depend_on_the_batch_keeps_its_shape() -> None:
    def collate(samples: list) -> dict:
        return {"x": default_collate(samples), "position": torch.arange(1, 4)[None]}

    empty = CollateFnWithEmpty(collate, dataset=Samples(features))([])
    assert empty["x"].shape == (0, 3)
    assert torch.equal(empty["position"], torch.zeros(1, 3, dtype=torch.int64))


def test_sequence_first() -> None:
    def collate(samples: list) -> tuple:
        x, label = default_collate(samples)
        return x.T.contiguous(), label

    collate_fn = CollateFnWithEmpty(collate, batch_first=False, dataset=Samples(tensors))
    x, label = collate_fn([])
    assert x.shape == (3, 0)
    assert label.shape == (0,)


def test_containers_keep_their_type() -> None:
    class Attributes(UserDict):
        pass

    def batch(size: int) -> dict:
        x = torch.full((size, 2), SECRET)
        return {
            "ordered": OrderedDict(x=x),
            "default": defaultdict(list, x=x),
            "user": Attributes(x=x),
            "record": Record(x, ["a"] * size, "note"),
            "array": np.full((size, 2), SECRET),
            "number": np.float32(SECRET),
            "nothing": None,
            "flag": True,
        }

    blank = blank_batch(batch(1), batch(2))
    assert {k: type(v) for k, v in blank.items()} == {k: type(v) for k, v in batch(1).items()}
    for key in ("ordered", "default", "user"):
        assert blank[key]["x"].shape == (0, 2)
    assert blank["default"].default_factory is list
    assert blank["record"].x.shape == (0, 2)
    assert (blank["record"].name, blank["record"].note) == ([], "")
    assert blank["array"].shape == (0, 2)
    assert (blank["number"], blank["nothing"], blank["flag"]) == (0, None, False)


def test_packed_sequence() -> None:
    sequences = [torch.ones(3, 2), torch.ones(3, 2)]
    blank = blank_batch(pack_sequence(sequences[:1]), pack_sequence(sequences))
    assert isinstance(blank, PackedSequence)
    assert blank.data.shape == (0, 2)
    assert blank.batch_sizes.sum() == 0


def test_hugging_face_containers() -> None:
    base = pytest.importorskip("transformers.tokenization_utils_base")
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def batch(size: int) -> tuple:
        ids = torch.full((size, 4), SECRET)
        encoding = base.BatchEncoding(
            {"input_ids": ids}, encoding=["raw text"] * size, n_sequences=1
        )
        return encoding, outputs.BaseModelOutput(last_hidden_state=ids)

    encoding, output = blank_batch(batch(1), batch(2))
    assert isinstance(encoding, base.BatchEncoding)
    assert encoding["input_ids"].shape == (0, 4)
    assert not encoding.encodings  # the tokenizer's records of the text
    assert isinstance(output, outputs.BaseModelOutput)
    assert output.last_hidden_state.shape == (0, 4) and output.attentions is None


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize("value", [object(), {"x": {1, 2}}, {"colour": Colour.RED}, "text", 3])
def test_unsupported_types_are_named(value: Any) -> None:
    with pytest.raises(TypeError, match="Unsupported batch type"):
        blank_batch(value, copy.copy(value))


def test_random_on_empty_is_one_made_up_sample() -> None:
    collate_fn = wrap_collate_with_empty(
        collate_fn=default_collate, rand_on_empty=True, dataset=Samples(fields)
    )
    batches = [collate_fn([]) for _ in range(20)]
    assert {tuple(batch["x"].shape) for batch in batches} == {(1, 3)}
    values = torch.cat([batch["x"] for batch in batches]).unique()
    assert values.tolist() == [0.0, 1.0]
    assert batches[0]["label"].dtype == torch.int64
    assert batches[0]["id"] == [""]


def test_no_collate_function() -> None:
    collate_fn = CollateFnWithEmpty(None)
    assert collate_fn([1, 2]) == [1, 2]
    assert collate_fn([]) == []


def test_without_a_data_set_the_first_sample_shows_the_structure() -> None:
    def collate(samples: list) -> dict:
        labels = [sample.pop("label") for sample in samples]  # as some collate functions do
        return {**default_collate(samples), "label": torch.tensor(labels)}

    collate_fn = CollateFnWithEmpty(collate)
    collate_fn([fields(0), fields(1)])
    assert collate_fn([])["label"].shape == (0,)


def test_fallback_without_any_sample(caplog: pytest.LogCaptureFixture) -> None:
    collate_fn = CollateFnWithEmpty(
        default_collate, sample_empty_shapes=[(0, 3), (0,)], dtypes=[torch.float64, int]
    )
    x, y = collate_fn([])
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((0, 3), torch.float64, (0,), torch.int64)
    assert "First batch is empty" in caplog.text
    assert CollateFnWithEmpty(default_collate)([]) == []
    assert collate_fn([features(0)]).shape == (1, 3)
    assert collate_fn([]).shape == (0, 3)


def test_changing_an_empty_batch_does_not_change_the_next_one() -> None:
    collate_fn = CollateFnWithEmpty(default_collate, dataset=Samples(fields))
    collate_fn([]).clear()
    assert set(collate_fn([])) == set(fields(0))


def test_structure_is_learned_lazily_and_once() -> None:
    fetched = []

    def make(index: int) -> torch.Tensor:
        fetched.append(index)
        return features(index)

    loader = DPDataLoader(Samples(make), sample_rate=0.5)
    assert fetched == []
    loader.collate_fn([])
    learned = len(fetched)
    loader.collate_fn([])
    assert len(fetched) == learned > 0


def test_learning_leaves_the_random_state_alone() -> None:
    collate_fn = CollateFnWithEmpty(default_collate, dataset=Samples(lambda i: torch.rand(2)))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    collate_fn([])
    assert torch.equal(torch.rand(1), expected)
