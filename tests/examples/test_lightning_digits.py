"""The digits with PyTorch Lightning."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("pytorch_lightning")
pytest.importorskip("sklearn")

import lightning_digits as script
from classifier import Outcome
from digits import DigitsCNN

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*", "ignore:.*does not have many workers.*"
)


def run(*options: str, monkeypatch) -> tuple[script.PrivateDigits, Outcome]:
    """A run, and the Lightning module that it trained."""
    made = []
    original = script.PrivateDigits.__init__

    def keep(self, args, data):
        original(self, args, data)
        made.append(self)

    monkeypatch.setattr(script.PrivateDigits, "__init__", keep)
    outcome = script.main(["--device", "cpu", *options])
    return made[0], outcome


def test_what_the_docstring_promises(monkeypatch, capsys):
    module, outcome = run("--seed", "0", monkeypatch=monkeypatch)
    assert outcome.accuracy > 0.87
    assert 2.9 < outcome.epsilon <= 3.0
    assert f"{outcome.accuracy:.1%} at epsilon 3.00" in capsys.readouterr().out.splitlines()[-1]
    # Every batch was accounted for, at the rate that it was drawn with.
    (entry,) = module.engine.accountant.history
    steps = -(-1437 // 256)
    assert entry[1] == pytest.approx(1 / steps)
    assert entry[2] == 20 * steps


def test_batches_are_drawn_by_poisson_sampling_and_the_model_keeps_its_class(monkeypatch):
    sizes = []
    step = script.PrivateDigits.training_step

    def training_step(self, batch):
        sizes.append(len(batch[1]))
        return step(self, batch)

    monkeypatch.setattr(script.PrivateDigits, "training_step", training_step)
    module, _ = run("--epochs", "2", "--grad-sample-mode", "functorch", monkeypatch=monkeypatch)
    assert len(set(sizes)) > 3
    assert type(module.model) is DigitsCNN
    DigitsCNN().load_state_dict(
        {k.removeprefix("model."): v for k, v in module.state_dict().items()}
    )


def test_a_missing_lightning_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    monkeypatch.delitem(sys.modules, "lightning_digits")
    with pytest.raises(SystemExit, match="pip install pytorch-lightning"):
        __import__("lightning_digits")


def test_seeds_are_what_makes_runs_differ(monkeypatch):
    weights = []
    for seed in ("1", "1", "2"):
        module, _ = run("--epochs", "1", "--seed", seed, monkeypatch=monkeypatch)
        weights.append(module.model.head[2].weight.detach())
        monkeypatch.undo()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
