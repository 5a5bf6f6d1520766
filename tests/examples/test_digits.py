"""The CNN on digits: data, options, and a whole run."""

from __future__ import annotations

import pytest
import torch
from digits import DigitsCNN

pytest.importorskip("sklearn")

import digits_cnn as script
from classifier import MODES
from digits import load_digits

QUICK = ["--epochs", "2", "--seed", "3"]


def test_the_split_is_fixed_and_whole():
    first, second = load_digits(), load_digits()
    images, labels = first.train.tensors
    assert (len(first.train), len(first.test)) == (1437, 360)
    assert images.shape[1:] == (1, 8, 8) and images.dtype == torch.float32
    assert (images.min(), images.max()) == (-1, 1)
    assert sorted(labels.unique().tolist()) == list(range(10))
    for one, other in zip(
        (*first.train.tensors, *first.test.tensors),
        (*second.train.tensors, *second.test.tensors),
        strict=True,
    ):
        assert torch.equal(one, other)
    # Together they are what was shipped, each row once.
    both = torch.cat([images, first.test.tensors[0]]).flatten(1)
    assert len(both.unique(dim=0)) == 1797


def test_what_the_docstring_promises(capsys):
    outcome = script.main(["--seed", "0"])
    assert outcome.accuracy > 0.87
    assert 2.9 < outcome.epsilon <= 3.0
    assert f"{outcome.accuracy:.1%} at epsilon 3.00" in capsys.readouterr().out.splitlines()[-1]


def test_an_untrained_model_would_fail():
    from classifier import accuracy
    from runtime import Runtime

    torch.manual_seed(0)
    runtime = Runtime(0, 1, torch.device("cpu"))
    assert accuracy(DigitsCNN(), load_digits().test, runtime) < 0.3


def test_the_modes_give_the_same_model():
    outcomes = [script.main([*QUICK, "--grad-sample-mode", mode]) for mode in MODES]
    assert max(o.accuracy for o in outcomes) - min(o.accuracy for o in outcomes) < 0.01
    assert len({o.epsilon for o in outcomes}) == 1


def test_seeds_are_what_makes_runs_differ(capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        script.main(["--epochs", "2", "--seed", seed])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--epsilon 0", "--epsilon: must be above 0"),
        ("--delta 2", "--delta: must be between 0 and 1"),
        ("--delta 0.01", "--delta 0.01 protects nobody among 1437"),
        ("--batch-size 2000", "--batch-size 2000: there are 1437"),
        ("--grad-sample-mode magic", "--grad-sample-mode: invalid choice: 'magic'"),
        ("--seed -1", "--seed: must be 0 or more"),
    ],
)
def test_it_is_refused(capsys, options, says):
    with pytest.raises(SystemExit) as stop:
        script.main(options.split())
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_users_of_several_images():
    import users_digits

    outcomes = users_digits.main(["--seed", "0", "--epochs", "1"])
    assert set(outcomes) == set(users_digits.UNITS)
    assert all(7.8 < outcome.epsilon <= 8.0 for outcome in outcomes.values())
    assert 0.0 < outcomes["user"].accuracy < 1.0
