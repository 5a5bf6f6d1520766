"""The LSTM over the bytes of names: data, model, a whole run."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("babel")

import char_lstm as script
from classifier import MODES, Data
from torch.utils.data import TensorDataset

from opacus.layers import DPLSTM


def test_names_are_unique_and_the_split_is_fixed():
    first, second = script.load_names(), script.load_names()
    rows = len(first.train) + len(first.test)
    assert 6000 < rows < 9000 and abs(len(first.test) - rows / 10) < 1
    assert torch.equal(first.train.tensors[0], second.train.tensors[0])
    labels = torch.cat([first.train.tensors[1], first.test.tensors[1]])
    assert labels.bincount(minlength=8).min() > 400
    # No language has more than a guesser could use.
    assert labels.bincount().max() < 0.2 * rows


def test_bytes_are_cut_and_padded():
    tokens = script.encode(["Ab", "é", "x" * 40])
    assert tokens.shape == (3, script.LENGTH)
    assert tokens[0].tolist() == [97, 98, *[0] * 14]
    assert tokens[1].tolist() == [0xC3, 0xA9, *[0] * 14]
    assert tokens[2].tolist() == [120] * 16


def test_the_last_letter_tells_and_padding_does_not():
    torch.manual_seed(0)
    model = script.NameClassifier()
    assert isinstance(model.lstm, DPLSTM)
    tokens = script.encode(["abc"])
    states, _ = model.lstm(model.embedding(tokens[:, :3]))
    torch.testing.assert_close(model(tokens), model.score(states[:, -1]))
    assert model(tokens[:0]).shape == (0, 8)


def test_the_modes_give_the_same_model(monkeypatch):
    names = script.load_names()
    few = TensorDataset(*(tensor[:300] for tensor in names.train.tensors))
    monkeypatch.setattr(script, "load_names", lambda: Data(few, names.test))
    quick = ["--epochs", "2", "--batch-size", "60", "--seed", "1", "--epsilon", "100"]
    outcomes = [script.main([*quick, "--grad-sample-mode", mode]) for mode in MODES]
    assert max(o.accuracy for o in outcomes) - min(o.accuracy for o in outcomes) < 0.02


@pytest.mark.slow
def test_what_the_docstring_promises(capsys):
    outcome = script.main(["--seed", "0", "--ask", "Wielka Brytania", "Tiếng Đức"])
    lines = capsys.readouterr().out.splitlines()
    assert outcome.accuracy > 0.69
    assert 7.9 < outcome.epsilon <= 8.0
    assert f"{outcome.accuracy:.1%} at epsilon 7.99" in lines[-3]
    assert lines[-2].startswith("Wielka Brytania: ") and lines[-1] == "Tiếng Đức: vi"
