"""Steps that are not plain Poisson sampling are never counted as if they were."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opacus.accountants import create_accountant
from opacus.accountants.sampling import (
    FixedSize,
    GaussianMixture,
    Sampling,
    TruncatedPoisson,
    UserRows,
    sampling_from_dict,
)
from tests.accountants.contract import DELTA

pytestmark = pytest.mark.filterwarnings("ignore:The GDP accountant")

KINDS: list[tuple[float, Sampling]] = [
    (0.1, TruncatedPoisson(1000, 130)),
    (0.1, FixedSize(1000, 100)),
    (0.1, UserRows(3)),
    (0.3, GaussianMixture((0.0, 1.0, 2.5), (0.5, 0.2, 0.1))),
]


@pytest.mark.parametrize("rate, sampling", KINDS)
def test_history_survives_every_format(rate: float, sampling: Sampling) -> None:
    accountant = create_accountant("pld")
    for how in (None, sampling, sampling, None):
        accountant.step(noise_multiplier=1.5, sample_rate=rate, sampling=how)
    assert [len(entry) for entry in accountant.history] == [3, 4, 3]
    assert len(accountant) == 4
    state = accountant.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for copy in (json.loads(json.dumps(state)), torch.load(file, weights_only=True)):
        other = create_accountant("pld")
        other.load_state_dict(copy)
        assert other.history == accountant.history
        assert other.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)
        assert sampling_from_dict(copy["history"][1][3]) == sampling


@pytest.mark.parametrize("rate, sampling", KINDS)
@pytest.mark.parametrize("name", ["rdp", "prv", "gdp"])
def test_other_accountants_refuse(name: str, rate: float, sampling: Sampling) -> None:
    accountant = create_accountant(name)
    entry = (1.5, rate, 2, sampling.to_dict())
    with pytest.raises((TypeError, ValueError), match=r"sampling"):
        accountant.step(noise_multiplier=1.5, sample_rate=rate, sampling=sampling)
    with pytest.raises(ValueError, match="'pld'"):
        accountant.load_state_dict({"history": [entry], "mechanism": name})
    with pytest.raises(ValueError, match="'pld'"):
        accountant.get_optimizer_hook_fn(rate, sampling=sampling)
    assert accountant.history == []
    accountant.history = [entry]
    with pytest.raises(ValueError, match="'pld'"):
        accountant.get_epsilon(DELTA)
    with pytest.raises(ValueError):  # whoever reads three values, as Opacus does
        for _sigma, _rate, _steps in accountant.history:
            pass


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: TruncatedPoisson(0, 1), "dataset_size"),
        (lambda: TruncatedPoisson(10, True), "max_batch_size"),
        (lambda: FixedSize(10, 11), "batch_size"),
        (lambda: UserRows(0), "rows"),
        (lambda: GaussianMixture((1.0,), ()), "length"),
        (lambda: GaussianMixture((-1.0,), (0.1,)), "sensitivities"),
        (lambda: GaussianMixture((1.0,), (1.1,)), "probabilities"),
        (lambda: sampling_from_dict({"sampling": "Shuffled"}), "Shuffled"),
        (lambda: sampling_from_dict({"sampling": "UserRows", "row": 3}), "UserRows"),
        (lambda: sampling_from_dict(None), "None"),
    ],
)
def test_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_rate_must_agree() -> None:
    accountant = create_accountant("pld")
    for sampling in (FixedSize(1000, 100), GaussianMixture((1.0,), (0.1,))):
        with pytest.raises(ValueError, match="sample_rate"):
            accountant.step(noise_multiplier=1.0, sample_rate=0.2, sampling=sampling)
        with pytest.raises(ValueError, match="sample_rate"):
            accountant.get_optimizer_hook_fn(0.2, sampling=sampling)
    assert accountant.history == []


def test_hook_records_the_sampling_and_refuses_accumulation() -> None:
    accountant = create_accountant("pld")
    hook = accountant.get_optimizer_hook_fn(0.1, sampling=TruncatedPoisson(1000, 130))
    hook(SimpleNamespace(noise_multiplier=1.5, accumulated_iterations=1))
    with pytest.raises(ValueError, match="step\\(\\) after each batch"):
        hook(SimpleNamespace(noise_multiplier=1.5, accumulated_iterations=2))
    assert accountant.history == [(1.5, 0.1, 1, TruncatedPoisson(1000, 130).to_dict())]
