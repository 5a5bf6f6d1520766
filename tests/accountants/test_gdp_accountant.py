from __future__ import annotations

import math

import pytest

from opacus.accountants import GaussianAccountant
from opacus.accountants.analysis import gdp as analysis
from tests.accountants.contract import DELTA, AccountantContract, gaussian_epsilon


class TestGaussianAccountant(AccountantContract):
    mechanism = "gdp"

    @pytest.mark.parametrize("sigma, rate", [(1.1, 0.1), (1.0, 0.2)])
    def test_changed_step_is_refused_and_history_kept(self, sigma: float, rate: float) -> None:
        accountant = self.make((1.0, 0.1, 7))
        with pytest.raises(ValueError, match="constant"):
            accountant.step(noise_multiplier=sigma, sample_rate=rate)
        assert accountant.history == [(1.0, 0.1, 7)]
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
        assert accountant.history == [(1.0, 0.1, 8)]

    def test_mixed_history_is_refused_when_read(self) -> None:
        with pytest.raises(ValueError, match="constant"):
            self.make((1.0, 0.1, 7), (1.1, 0.1, 7)).get_epsilon(DELTA)

    def test_sampling_schemes_differ(self) -> None:
        accountant = self.make((1.0, 0.01, 100))
        poisson, fixed = accountant.get_epsilon(DELTA), accountant.get_epsilon(DELTA, poisson=False)
        assert 0.0 < poisson < fixed

    @pytest.mark.parametrize("sigma", [0.2, 0.1, 0.01, 1e-4, 1e-200])
    def test_little_noise_is_costly_not_an_error(self, sigma: float) -> None:
        assert self.epsilon(sigma, 0.01, 100) > 100.0


def test_creation_warns() -> None:
    with pytest.warns(UserWarning, match="2106.02848"):
        GaussianAccountant()


@pytest.mark.parametrize("mu", [0.01, 0.5, 1.0, 5.0, 60.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_epsilon_is_that_of_the_gaussian_mechanism(mu: float, delta: float) -> None:
    epsilon = analysis.eps_from_mu(mu=mu, delta=delta)
    if mu < 20:
        assert epsilon == pytest.approx(gaussian_epsilon(1 / mu, delta), rel=1e-7, abs=1e-10)
    if epsilon > 0:
        assert analysis.delta_eps_mu(eps=epsilon, mu=mu) == pytest.approx(delta, rel=1e-6)


def test_mu_of_poisson_sampling() -> None:
    mu = analysis.compute_mu_poisson(steps=400, noise_multiplier=2.0, sample_rate=0.05)
    assert mu == pytest.approx(0.05 * 20 * math.sqrt(math.exp(0.25) - 1), rel=1e-12)


def test_mu_of_uniform_sampling() -> None:
    """Little noise: e^(1/s^2) outgrows the rest; the two schemes then differ by sqrt(2)."""
    arguments = {"steps": 100, "noise_multiplier": 0.2, "sample_rate": 0.01}
    ratio = analysis.compute_mu_uniform(**arguments) / analysis.compute_mu_poisson(**arguments)
    assert ratio == pytest.approx(math.sqrt(2), rel=1e-6)


def test_mu_limits() -> None:
    for compute in (analysis.compute_mu_poisson, analysis.compute_mu_uniform):
        assert compute(steps=0, noise_multiplier=0.0, sample_rate=0.1) == 0.0
        assert compute(steps=5, noise_multiplier=1.0, sample_rate=0.0) == 0.0
        assert compute(steps=5, noise_multiplier=0.0, sample_rate=0.1) == math.inf
        assert compute(steps=5, noise_multiplier=1e8, sample_rate=0.1) < 1e-6


def test_delta_limits() -> None:
    assert analysis.delta_eps_mu(eps=1.0, mu=0.0) == 0.0
    assert analysis.delta_eps_mu(eps=5.0, mu=math.inf) == 1.0
    assert analysis.eps_from_mu(mu=math.inf, delta=DELTA) == math.inf
    assert analysis.eps_from_mu(mu=0.0, delta=DELTA) == 0.0
    with pytest.raises(ValueError, match="mu"):
        analysis.delta_eps_mu(eps=1.0, mu=math.nan)
    with pytest.raises(ValueError, match="delta"):
        analysis.eps_from_mu(mu=1.0, delta=1.0)


def test_composite_functions() -> None:
    arguments = {"steps": 100, "noise_multiplier": 1.0, "sample_rate": 0.01}
    for compute_eps, compute_mu in (
        (analysis.compute_eps_poisson, analysis.compute_mu_poisson),
        (analysis.compute_eps_uniform, analysis.compute_mu_uniform),
    ):
        expected = analysis.eps_from_mu(mu=compute_mu(**arguments), delta=DELTA)
        assert compute_eps(**arguments, delta=DELTA) == expected > 0.0


@pytest.mark.parametrize(
    "sigma, epochs, mu, epsilon",
    [(1.3, 15, 0.23, 0.83), (1.1, 60, 0.57, 2.32), (0.7, 45, 1.13, 5.07)],
)
def test_published_values_of_mnist(sigma: float, epochs: int, mu: float, epsilon: float) -> None:
    """Bu, Dong, Long and Su (arXiv 1911.11607): batches of 256 of 60,000, delta 1e-5."""
    run = {
        "steps": round(epochs * 60_000 / 256),
        "noise_multiplier": sigma,
        "sample_rate": 256 / 60_000,
    }
    assert analysis.compute_mu_poisson(**run) == pytest.approx(mu, abs=0.005)
    assert analysis.compute_eps_poisson(**run, delta=1e-5) == pytest.approx(epsilon, abs=0.005)
