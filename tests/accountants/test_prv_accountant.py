from __future__ import annotations

import math
import time

import numpy as np
import pytest
from scipy import integrate

from opacus.accountants import PRVAccountant, RDPAccountant, prv
from opacus.accountants.analysis.pld import composed_epsilon
from opacus.accountants.analysis.pld.steps import steps_of
from opacus.accountants.analysis.prv import (
    AddedSampleGaussianPRV,
    DiscretePRV,
    Domain,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    compose_heterogeneous,
    compute_safe_domain_size,
    discretize,
)
from tests.accountants.contract import DELTA, BoundContract, gaussian_epsilon


class TestPRVAccountant(BoundContract):
    mechanism = "prv"

    @pytest.mark.parametrize("sigma, steps", [(0.5, 1), (1.0, 1), (3.0, 4), (30.0, 1000)])
    @pytest.mark.parametrize("delta", [1e-7, 1e-5, 1e-2])
    @pytest.mark.parametrize("eps_error", [0.1, 0.01, 0.001])
    def test_full_batches_are_exact_up_to_eps_error(
        self, sigma: float, steps: int, delta: float, eps_error: float
    ) -> None:
        exact = gaussian_epsilon(sigma / math.sqrt(steps), delta)
        epsilon = self.make((sigma, 1.0, steps)).get_epsilon(delta, eps_error=eps_error)
        assert exact <= epsilon <= exact + 1.01 * eps_error + 2e-3 * exact

    def test_mixed_full_batches_are_exact(self) -> None:
        """Gaussians compose as 1 / sigma^2 = sum 1 / sigma_i^2."""
        exact = gaussian_epsilon((2 * 2.0**-2 + 3 * 4.0**-2) ** -0.5, DELTA)
        epsilon = self.make((2.0, 1.0, 2), (4.0, 1.0, 3)).get_epsilon(DELTA, eps_error=1e-3)
        assert exact <= epsilon <= exact + 2e-3

    @pytest.mark.parametrize(
        "arguments",
        [{"eps_error": 0.0}, {"eps_error": math.nan}, {"delta_error": 0.0}, {"delta_error": DELTA}],
    )
    def test_refused_errors(self, arguments: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            self.make((1.0, 0.1, 3)).get_epsilon(DELTA, **arguments)


REPORTED_FAILURES = [
    (1.0, 0.2, 500, 1e-5),
    (0.4, 0.5, 200, 1e-5),
    (0.6, 0.1, 100, 1e-5),
    (5.0, 1.0, 10, 1e-5),
    (2.0, 0.001, 1_000_000, 1e-6),
    (0.1, 0.05, 20, 1e-5),
    (50.0, 0.001, 1000, 1e-6),
    (1.0, 0.01, 1000, 1e-12),
    (0.01, 1e-4, 1, 1e-3),
    (1e-3, 0.1, 3, 1e-5),
    (1e-160, 0.1, 3, 1e-5),
]


@pytest.mark.filterwarnings("ignore:The .* Renyi order")
@pytest.mark.parametrize("sigma, rate, steps, delta", REPORTED_FAILURES)
def test_hard_cases_stay_below_rdp(sigma: float, rate: float, steps: int, delta: float) -> None:
    accountant, bound = PRVAccountant(), RDPAccountant()
    accountant.history = bound.history = [(sigma, rate, steps)]
    assert 0.0 <= accountant.get_epsilon(delta) <= bound.get_epsilon(delta)


def test_rare_sampling_hides_in_delta() -> None:
    """Without noise to speak of, a sample is seen with probability q: no cost if q < delta."""
    accountant = PRVAccountant()
    accountant.history = [(0.01, 1e-4, 1)]
    assert accountant.get_epsilon(1e-3) <= 0.01
    assert accountant.get_epsilon(1e-5) > 1000.0


def schedule(length: int) -> PRVAccountant:
    accountant = PRVAccountant()
    for i in range(length):
        accountant.step(noise_multiplier=1.0 + 0.005 * i, sample_rate=0.01)
    return accountant


def test_schedule_of_200_noises_is_fast() -> None:
    accountant = schedule(200)
    start = time.process_time()
    epsilon = accountant.get_epsilon(DELTA)
    assert time.process_time() - start < 10.0
    low, high = PRVAccountant(), PRVAccountant()
    low.history, high.history = [(1.995, 0.01, 200)], [(1.0, 0.01, 200)]
    assert low.get_epsilon(DELTA) < epsilon < high.get_epsilon(DELTA)


def test_coarsened_schedule_is_a_close_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    accountant = schedule(60)
    exact = accountant.get_epsilon(DELTA, eps_error=1e-3)
    monkeypatch.setattr(prv, "_MOST_DISTINCT", 20)
    coarse = accountant.get_epsilon(DELTA, eps_error=1e-3)
    assert exact < coarse < 1.05 * exact


def test_coarsening_keeps_steps_and_lowers_noise() -> None:
    counts = {(1.0 + 0.01 * i, rate): 1 + i for i in range(50) for rate in (0.1, 0.2)}
    merged = prv._coarsen(counts, 10)
    assert len(merged) <= 12
    assert set(merged) <= set(counts)
    assert sum(merged.values()) == sum(counts.values())
    assert min(merged) == min(counts)
    for threshold in (1.1, 1.2, 1.3, 1.4):
        noisy = sum(n for (sigma, _), n in counts.items() if sigma >= threshold)
        assert sum(n for (sigma, _), n in merged.items() if sigma >= threshold) <= noisy


def test_too_large_a_grid_is_coarsened_soundly(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gaussian_epsilon(0.3 / math.sqrt(50), DELTA)
    accountant = PRVAccountant()
    accountant.history = [(0.3, 1.0, 50)]
    monkeypatch.setattr(prv, "_MOST_POINTS", 2**15)
    assert exact <= accountant.get_epsilon(DELTA) <= 1.01 * exact


def test_error_of_a_coarsened_grid_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [PoissonSubsampledGaussianPRV(0.5, 0.5)]
    fine = prv._choose_grid(losses, [900], 0.01, 1e-8)
    monkeypatch.setattr(prv, "_MOST_POINTS", 2**12)
    coarse = prv._choose_grid(losses, [900], 0.01, 1e-8)
    assert fine is not None
    assert coarse is not None
    assert fine[1] == pytest.approx(0.01)
    for domain, error in (fine, coarse):
        # Hoeffding: rounding 900 steps to dt errs by more with probability 2 * 1e-8 / 12.
        assert error == pytest.approx(domain.dt * math.sqrt(900 / 2 * math.log(12 / 1e-8)))
    assert coarse[0].size <= 1.1 * 2**12 < fine[0].size


def test_domain() -> None:
    domain = Domain.create_aligned(-1.0, 2.0, 0.3)
    assert domain.size == 12
    assert domain.dt == pytest.approx(0.3)
    assert domain.ts == pytest.approx(np.arange(-4, 8) * 0.3)
    assert domain[4] == pytest.approx(0.0, abs=1e-12)
    moved = domain.shift_right(0.1).shift_right(0.1)
    assert (moved.shifts, moved.size) == (0.2, 12)
    assert moved.ts == pytest.approx(domain.ts + 0.2)
    for arguments in ((-1.0, 1.0, 3), (1.0, -1.0, 4), (0.0, 1.0, 0)):
        with pytest.raises(ValueError):
            Domain(*arguments)
    with pytest.raises(ValueError, match="dt"):
        Domain.create_aligned(-1.0, 1.0, 0.0)


def test_safe_domain_covers_the_composition() -> None:
    loss = PoissonSubsampledGaussianPRV(1.0, 2.0)
    reach = compute_safe_domain_size([loss], [16], eps_error=0.01, delta_error=1e-8)
    assert gaussian_epsilon(2.0 / 4.0, 1e-8 / 4) < reach
    wider = compute_safe_domain_size([loss, loss], [16, 16], eps_error=0.01, delta_error=1e-8)
    assert wider > reach


@pytest.mark.parametrize("rate, sigma", [(0.01, 1.0), (0.3, 0.5), (1.0, 2.0), (0.9, 0.3)])
def test_continuous_loss_by_sampling(rate: float, sigma: float) -> None:
    rng = np.random.default_rng(0)
    z = sigma * rng.standard_normal(200_000) + (rng.random(200_000) < rate)
    loss = np.log(1 - rate + rate * np.exp((2 * z - 1) / (2 * sigma**2)))
    variable = PoissonSubsampledGaussianPRV(rate, sigma)
    for quantile in np.quantile(loss, [0.01, 0.3, 0.5, 0.9, 0.999]):
        assert variable.cdf(quantile) == pytest.approx(np.mean(loss <= quantile), abs=5e-3)
    truncated = TruncatedPrivacyRandomVariable(variable, -3000.0, 3000.0)
    spread = float(loss.std()) / math.sqrt(loss.size)
    assert truncated.mean() == pytest.approx(float(loss.mean()), abs=5 * spread)


@pytest.mark.parametrize("rate, sigma", [(0.01, 1.0), (0.3, 0.5), (0.9, 0.3)])
def test_loss_of_an_added_sample_by_sampling(rate: float, sigma: float) -> None:
    z = sigma * np.random.default_rng(0).standard_normal(200_000)
    loss = -np.log(1 - rate + rate * np.exp((2 * z - 1) / (2 * sigma**2)))
    variable = AddedSampleGaussianPRV(rate, sigma)
    for quantile in np.quantile(loss, [0.01, 0.3, 0.5, 0.9, 0.999]):
        assert variable.cdf(quantile) == pytest.approx(np.mean(loss <= quantile), abs=5e-3)
    truncated = TruncatedPrivacyRandomVariable(variable, -3000.0, 3000.0)
    spread = float(loss.std()) / math.sqrt(loss.size)
    assert truncated.mean() == pytest.approx(float(loss.mean()), abs=5 * spread)
    t = np.linspace(float(np.quantile(loss, 0.01)), float(np.quantile(loss, 0.9)), 30)
    slope = (variable.cdf(t + 1e-6) - variable.cdf(t - 1e-6)) / 2e-6
    assert variable.pdf(t) == pytest.approx(slope, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("sigma, rate, steps, delta", [
    (1.0, 0.1, 100, 1e-5), (0.5, 0.9, 10, 1e-3), (5.0, 0.5, 100, 1e-9), (2.0, 0.01, 30, 1e-2)
])  # fmt: skip
def test_both_directions_are_counted(sigma: float, rate: float, steps: int, delta: float) -> None:
    """Each by itself is what "pld" composes, whose values are those of dp-accounting."""
    adding, removing = steps_of((sigma, rate, None), steps)
    found = []
    for kind, step in ((AddedSampleGaussianPRV, adding), (PoissonSubsampledGaussianPRV, removing)):
        loss = kind(rate, sigma)
        grid = prv._choose_grid([loss], [steps], 1e-3, delta / 1000)
        assert grid is not None
        part = discretize(
            TruncatedPrivacyRandomVariable(loss, grid[0].t_min, grid[0].t_max), grid[0]
        )
        upper = compose_heterogeneous([part], [steps]).compute_epsilon(
            delta, delta / 1000, grid[1]
        )[2]
        found.append(max(0.0, upper))
        assert upper == pytest.approx(composed_epsilon([step], delta), rel=5e-3, abs=3e-3)
    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    assert accountant.get_epsilon(delta, eps_error=1e-3) == pytest.approx(max(found), rel=1e-9)


@pytest.mark.parametrize("rate, sigma", [(0.01, 1.0), (0.3, 0.5), (1.0, 2.0)])
def test_density_is_the_slope_of_the_distribution(rate: float, sigma: float) -> None:
    truncated = TruncatedPrivacyRandomVariable(PoissonSubsampledGaussianPRV(rate, sigma), -2.0, 1.5)
    t = np.linspace(-1.0, 1.4, 60)
    h = 1e-6
    slope = (truncated.cdf(t + h) - truncated.cdf(t - h)) / (2 * h)
    assert truncated.pdf(t) == pytest.approx(slope, rel=1e-4, abs=1e-6)
    assert truncated.pdf(np.array([-2.5, 1.6])).tolist() == [0.0, 0.0]
    assert truncated.cdf(np.array([-2.5, 1.6])).tolist() == [0.0, 1.0]
    tail, _ = integrate.quad(
        truncated.cdf, -2.0, 1.5, limit=500, points=[math.log1p(-0.999 * rate)]
    )
    assert truncated.mean() == pytest.approx(1.5 - tail, abs=1e-6)


def test_renyi_divergence_of_a_loss() -> None:
    assert PoissonSubsampledGaussianPRV(1.0, 2.0).rdp(3.0) == pytest.approx(3.0 / 8.0)


def test_refused_losses() -> None:
    for arguments in ((0.0, 1.0), (0.1, 0.0), (1.5, 1.0), (0.1, math.nan)):
        with pytest.raises(ValueError):
            PoissonSubsampledGaussianPRV(*arguments)
    variable = PoissonSubsampledGaussianPRV(0.1, 1.0)
    with pytest.raises(ValueError, match="t_min"):
        TruncatedPrivacyRandomVariable(variable, 1.0, -1.0)
    with pytest.raises(ValueError, match="probability 0"):
        TruncatedPrivacyRandomVariable(variable, -5.0, -4.0)


def small(rate: float = 0.2, sigma: float = 1.0) -> DiscretePRV:
    domain = Domain.create_aligned(-8.0, 8.0, 0.01)
    truncated = TruncatedPrivacyRandomVariable(
        PoissonSubsampledGaussianPRV(rate, sigma), domain.t_min, domain.t_max
    )
    return discretize(truncated, domain)


def test_discretisation_keeps_mass_and_mean() -> None:
    loss = small()
    assert len(loss) == loss.domain.size == len(loss.pmf)
    assert loss.pmf.sum() == pytest.approx(1.0, abs=1e-12)
    mean = TruncatedPrivacyRandomVariable(PoissonSubsampledGaussianPRV(0.2, 1.0), -8.0, 8.0).mean()
    assert np.dot(loss.pmf, loss.domain.ts) == pytest.approx(mean, abs=1e-12)


def test_composition_is_a_convolution() -> None:
    first, second = small(), small(0.5, 2.0)
    composed = compose_heterogeneous([first, second], [2, 1])
    direct = np.convolve(np.convolve(first.pmf, first.pmf), second.pmf)
    zero = round(-(first.domain.t_min - first.domain.shifts) / first.domain.dt)
    window = direct[2 * zero : 2 * zero + len(first)]
    assert composed.pmf == pytest.approx(window, abs=1e-14)
    assert composed.domain.shifts == pytest.approx(2 * first.domain.shifts + second.domain.shifts)
    mean = 2 * np.dot(first.pmf, first.domain.ts) + np.dot(second.pmf, second.domain.ts)
    assert np.dot(composed.pmf, composed.domain.ts) == pytest.approx(mean, abs=1e-10)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 100])
def test_powers(count: int) -> None:
    loss = small(0.05, 2.0)
    composed = compose_heterogeneous([loss], [count])
    assert np.dot(composed.pmf, composed.domain.ts) == pytest.approx(
        count * np.dot(loss.pmf, loss.domain.ts), abs=1e-9
    )
    assert composed.pmf.sum() == pytest.approx(1.0, abs=1e-10)


def test_composition_leaves_its_inputs() -> None:
    loss = small()
    before = loss.pmf.copy()
    compose_heterogeneous([loss, loss], [3, 2])
    assert np.array_equal(loss.pmf, before)


def test_refused_compositions() -> None:
    loss = small()
    other = DiscretePRV(np.ones(6) / 6, Domain.create_aligned(-1.0, 1.0, 0.5))
    for losses, counts in (([], []), ([loss], [0]), ([loss], [1, 2]), ([loss, other], [1, 1])):
        with pytest.raises(ValueError):
            compose_heterogeneous(losses, counts)
    with pytest.raises(ValueError, match="pmf"):
        DiscretePRV(np.ones(3) / 3, Domain.create_aligned(-1.0, 1.0, 0.5))


@pytest.mark.parametrize("delta", [0.9, 0.1, 1e-3, 1e-6])
def test_epsilon_inverts_delta(delta: float) -> None:
    loss = small()
    lower, estimate, upper = loss.compute_epsilon(delta, delta / 100, 0.02)
    assert lower + 0.02 < estimate < upper - 0.02
    assert loss.compute_delta_estimate(estimate) == pytest.approx(delta, rel=1e-6)
    assert loss.compute_delta_estimate(upper - 0.02) == pytest.approx(0.99 * delta, rel=1e-6)


def test_epsilon_far_out_does_not_overflow() -> None:
    domain = Domain.create_aligned(-5000.0, 5000.0, 1.0)
    pmf = np.zeros(domain.size)
    pmf[-101], pmf[100] = 0.25, 0.75
    top = domain.ts[-101]
    _, estimate, _ = DiscretePRV(pmf, domain).compute_epsilon(0.1, 1e-3, 0.0)
    assert estimate == pytest.approx(top + math.log1p(-0.1 / 0.25), abs=1e-9)


def test_refused_epsilon() -> None:
    loss = small()
    with pytest.raises(ValueError, match="delta_error"):
        loss.compute_epsilon(1e-5, 1e-4, 0.01)
    with pytest.raises(ValueError, match="eps_error"):
        loss.compute_epsilon(1e-5, 1e-8, -0.01)
    uniform = DiscretePRV(np.full(4, 0.25), Domain.create_aligned(-1.0, 0.5, 0.5))
    with pytest.raises(ValueError, match="grid ends"):
        uniform.compute_epsilon(0.1, 0.0, 0.0)
