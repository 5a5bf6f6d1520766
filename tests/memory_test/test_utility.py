"""The utility lab: every contender trains, spends the same budget and gives a row of the schema."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from memory_test.common.schema import RESULTS, check_file
from memory_test.utility import lab
from memory_test.utility.contenders import CONTENDERS
from memory_test.utility.data import read, reviews


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


def test_lora_of_a_language_model_begins_as_the_model(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("peft")
    from memory_test.utility import language_model
    from tests.integrations.texts import tokenizer
    from tests.integrations.tiny import llama

    monkeypatch.setattr(language_model, "BLOCKS", 1)
    monkeypatch.setattr(language_model, "_WORDS", ("w3", "w4"))
    llama().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    task = language_model.language_model(str(tmp_path), 40, "cpu")
    model = task.model()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 4 and all("lora_" in name for name in names), "two layers of one block"
    inputs = task.train.tensors[0][:5]
    assert len(set(inputs[:, 1].tolist())) > 1, "texts of one length"
    texts, _ = read(40)
    for (number, last), found in zip(inputs.tolist(), model(inputs), strict=True):
        ids = (
            tokenizer()(texts[number])["input_ids"][:24] + tokenizer()("This movie is")["input_ids"]
        )
        assert last == len(ids) - 1
        expected = llama()(input_ids=torch.tensor([ids])).logits[0, -1, [3, 4]]
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)  # stored in bf16


def test_rates_beyond_the_best_one_are_tried() -> None:
    for best, expected in ((0.25, 3), (0.5, 4), (1.0, 5), (1e9, 6), (0.03, 6)):
        tried = lab._best_rate(lambda lr, best=best: -abs(math.log(lr / best)), (0.125, 0.25, 0.5))
        assert len(tried) == expected
    assert list(lab._best_rate(lambda lr: 0.0, (0.125,))) == [0.125]


def test_the_table_is_that_of_the_files() -> None:
    table = (Path(lab.__file__).parent / "README.md").read_text()
    for path in RESULTS.glob("*_utility.json"):
        assert path.name in table
        for row in json.loads(path.read_text())["utility"]:
            assert f"{100 * row['mean']:.1f}±{100 * row['sd']:.1f}%" in table, row["contender"]
            assert "steps" not in row or f"{row['steps']} steps" in table
