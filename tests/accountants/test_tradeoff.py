from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from opacus.accountants import create_accountant
from opacus.accountants.__main__ import _up, main
from opacus.accountants.runs import compose, epsilon_of_data_sets
from opacus.accountants.sampling import UserRows
from opacus.accountants.tradeoff import (
    gaussian_mu,
    max_true_positive_rate,
    privacy_profile,
    tradeoff_curve,
)
from tests.accountants.contract import DELTA

FPR = [0.0, 1e-4, 1e-2, 0.1, 0.5, 0.9, 1.0]


def book(*history, name: str = "pld"):
    accountant = create_accountant(name)
    accountant.history = list(history)
    return accountant


@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
def test_gaussian_mechanism(mu: float) -> None:
    """Its true positive rate is Phi(Phi^-1(a) + mu) (arXiv 1905.02383, definition 2.6)."""
    accountant = book((1.0 / mu, 1.0, 1))
    exact = norm.cdf(norm.ppf(FPR) + mu)
    bound = max_true_positive_rate(accountant, FPR)
    assert (bound >= exact - 1e-12).all()
    assert bound[1:] == pytest.approx(exact[1:], rel=0.05, abs=0.02)
    assert bound[0] <= 1.01e-9
    assert tradeoff_curve(accountant, FPR) == pytest.approx(1 - bound)
    assert mu <= gaussian_mu(accountant) <= 1.1 * mu


def test_attack_on_rare_sampling_stays_below() -> None:
    """The likelihood ratio test of one step, simulated, with 5 standard deviations of room."""
    rate, sigma, trials = 0.3, 0.7, 400_000
    rng = np.random.default_rng(0)
    absent = sigma * rng.standard_normal(trials)
    present = sigma * rng.standard_normal(trials) + (rng.random(trials) < rate)
    bounds = max_true_positive_rate(book((sigma, rate, 1)), [0.001, 0.01, 0.1], points=30)
    for a, bound in zip([0.001, 0.01, 0.1], bounds, strict=True):
        attained = float(np.mean(present > np.quantile(absent, 1 - a)))
        assert attained <= bound + 5 * math.sqrt(attained / trials)
        assert attained >= 0.9 * bound


def test_mu_bounds_the_profile() -> None:
    accountant = book((1.0, 0.01, 1000))
    mu = gaussian_mu(accountant)
    deltas, epsilons = privacy_profile(accountant, points=20)
    gaussian = book((1.0 / mu, 1.0, 1))
    assert all(gaussian.get_epsilon(d) >= e for d, e in zip(deltas, epsilons, strict=True))
    assert 0.3 < mu < 0.7
    assert gaussian_mu(book()) == 0.0
    assert gaussian_mu(book((0.0, 0.1, 1))) == math.inf


def test_refused() -> None:
    with pytest.raises(ValueError, match="fpr"):
        max_true_positive_rate(book(), 1.5)
    with pytest.raises(ValueError, match="least_delta"):
        privacy_profile(book(), least_delta=0.5)
    with pytest.raises(ValueError, match="points"):
        privacy_profile(book(), points=1)


def test_runs_over_the_same_people_compose() -> None:
    first, second = book((1.0, 0.01, 300)), book((2.0, 0.02, 500), name="rdp")
    together = compose([first, second])
    assert together.get_epsilon(DELTA) == pytest.approx(
        book((1.0, 0.01, 300), (2.0, 0.02, 500)).get_epsilon(DELTA)
    )
    assert together.get_epsilon(DELTA) > max(b.get_epsilon(DELTA) for b in (first, second))
    with pytest.raises(ValueError, match="'pld'"):
        compose([book((1.0, 0.1, 1, UserRows(2).to_dict()))], "rdp")


def test_runs_over_other_people_do_not_add_up() -> None:
    first, second = book((1.0, 0.01, 300)), book((2.0, 0.02, 500))
    spent = epsilon_of_data_sets([(first, ["a"]), (second, ["a", "b"])], DELTA)
    assert spent["b"] == second.get_epsilon(DELTA)
    assert spent["a"] == compose([first, second]).get_epsilon(DELTA)
    with pytest.raises(TypeError, match="list of names"):
        epsilon_of_data_sets([(first, "ab")], DELTA)


RUN = "--rate 0.01 --steps 1000 --delta 1e-5"


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(f"epsilon --noise 1 {RUN}".split()) == 0
    assert "epsilon = 1.82" in capsys.readouterr().out
    assert main(f"noise --epsilon 2 {RUN} --accountant rdp".split()) == 0
    assert "noise multiplier = 1.02" in capsys.readouterr().out
    assert main(f"noise --epsilon 2 {RUN} --user-rows 2".split()) == 0
    assert "noise multiplier = 1.49" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    plot = tmp_path / "out.png"
    assert main(f"compare --noise 1 {RUN} --plot {plot}".split()) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("pld ", "prv ", "rdp ", "approximation", "mu of"))
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("epsilon --noise 1 --batch 100", "--dataset-size"),
        ("epsilon --noise 1 --dataset-size 100", "nothing else does"),
        ("epsilon --noise 1 --plot /no/such/folder/x.png", "/no/such/folder"),
        ("epsilon --noise 1 --batch 9 --user-rows 3", "at most one"),
        ("epsilon --noise 1 --batch 90 --dataset-size 10000", "sample_rate"),
        ("epsilon --noise -1", "noise_multiplier"),
        ("epsilon --noise 1 --user-rows 2 --accountant rdp", "'pld'"),
    ],
)
def test_command_line_refuses(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"{arguments} {RUN}".split()) == 2
    assert message in capsys.readouterr().err


def test_module_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "epsilon", "--noise", "1", *RUN.split()])
    with pytest.raises(SystemExit) as done, pytest.warns(RuntimeWarning, match="sys.modules"):
        runpy.run_module("opacus.accountants.__main__", run_name="__main__")
    assert done.value.code == 0


def test_printed_bounds_are_rounded_up() -> None:
    for value in (1.23456789, 0.000123454999, 99999.7, 1.0, 0.0, math.inf):
        assert float(_up(value)) >= value
        assert float(_up(value)) == pytest.approx(value, rel=2e-4)
