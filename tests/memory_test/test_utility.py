"""The utility lab: every contender trains, spends the same budget and gives a row of the schema."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from memory_test.common.schema import check_file
from memory_test.utility import lab
from memory_test.utility.contenders import CONTENDERS
from memory_test.utility.data import reviews


def test_every_contender_gives_a_row(tmp_path: Path, monkeypatch) -> None:
    for name, contender in list(CONTENDERS.items()):
        one = contender.__class__(**{**vars(contender), "lrs": contender.lrs[:1]})
        monkeypatch.setitem(CONTENDERS, name, one)
    output = tmp_path / "lab.json"
    quick = ["--rows", "160", "--epochs", "1", "--batch-size", "32", "--seeds", "1"]
    rows = lab.main([*quick, "--accountant", "rdp", "--delta", "1e-3", "--output", str(output)])
    assert check_file(json.loads(output.read_text())) == []
    assert [row["contender"] for row in rows] == list(CONTENDERS)
    for row in rows:
        private = row["contender"] != "not private"
        assert (2.7 < row["epsilon"] <= 3.0) == private and 0.0 <= row["mean"] <= 1.0


def test_rows_are_shuffled_and_split_alike_each_time() -> None:
    one, other = reviews(200), reviews(200)
    assert torch.equal(one.train.tensors[0], other.train.tensors[0])
    assert (len(one.train), len(one.test)) == (160, 40)
    assert 0.3 < one.train.tensors[1].float().mean() < 0.7
    torch.testing.assert_close(one.train.tensors[0].norm(dim=1), torch.ones(160))
