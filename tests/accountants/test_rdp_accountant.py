from __future__ import annotations

import math
import warnings

import mpmath
import numpy as np
import pytest

from opacus.accountants import RDPAccountant
from opacus.accountants.analysis import rdp as analysis
from tests.accountants.contract import DELTA, BoundContract


class TestRDPAccountant(BoundContract):
    mechanism = "rdp"

    def test_reports_the_best_order(self) -> None:
        accountant = self.make((1.0, 0.01, 1000))
        epsilon, order = accountant.get_privacy_spent(delta=DELTA)  # type: ignore[attr-defined]
        assert epsilon == accountant.get_epsilon(DELTA)
        assert order in RDPAccountant.DEFAULT_ALPHAS
        assert accountant.get_epsilon(DELTA, alphas=[order - 0.05, order, order + 0.05]) <= epsilon
        assert accountant.get_epsilon(DELTA, [2.0, 3.0, 4.0]) > epsilon

    def test_nothing_spent(self) -> None:
        assert RDPAccountant().get_privacy_spent(delta=DELTA) == (0.0, 0.0)


def test_orders_beyond_the_default_ones_are_found() -> None:
    """At delta = 1e-5 the largest default order alone cannot prove less than 0.1."""
    accountant = RDPAccountant()
    accountant.history = [(100.0, 0.001, 1000)]
    epsilon, order = accountant.get_privacy_spent(delta=DELTA)
    assert order > max(RDPAccountant.DEFAULT_ALPHAS)
    # dp-accounting's privacy loss distribution gives 0.000464 (interval 1e-6).
    assert 0.000464 < epsilon < 0.0006
    assert accountant.get_epsilon(DELTA, np.geomspace(1.1, 1e5, 3000)) >= epsilon * (1 - 1e-4)


@pytest.mark.parametrize("sigma", [0.02, 0.05, 300.0, 1e5])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-15])
def test_found_orders_are_valid_and_close(sigma: float, delta: float) -> None:
    """The Gaussian mechanism, exactly; small noise wants orders near 1, large noise large ones."""
    accountant = RDPAccountant()
    accountant.history = [(sigma, 1.0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = accountant.get_epsilon(delta, RDPAccountant.DEFAULT_ALPHAS)
    epsilon = accountant.get_epsilon(delta)
    exact = mp_gaussian_epsilon(sigma, delta)
    assert exact <= epsilon <= default
    assert epsilon <= 1.2 * exact + 5e-3


def mp_gaussian_epsilon(sigma: float, delta: float) -> float:
    from opacus.accountants.analysis.gdp import eps_from_mu

    return eps_from_mu(mu=1.0 / sigma, delta=delta)


@pytest.mark.filterwarnings("default:The .* Renyi order")
def test_warns_when_more_orders_would_help() -> None:
    accountant = RDPAccountant()
    accountant.history = [(20.0, 1e-3, 10)]
    with pytest.warns(UserWarning, match="largest Renyi order"):
        loose = accountant.get_epsilon(DELTA, RDPAccountant.DEFAULT_ALPHAS)
    assert accountant.get_epsilon(DELTA) < loose / 10


def moment_by_quadrature(q: float, sigma: float, order: float) -> float:
    """log E[(P / Q)^a] in 25 digits."""
    mpmath.mp.dps = 25
    q, sigma, order = mpmath.mpf(q), mpmath.mpf(sigma), mpmath.mpf(order)

    def integrand(z: mpmath.mpf) -> mpmath.mpf:
        ratio = 1 - q + q * mpmath.exp((2 * z - 1) / (2 * sigma**2))
        return mpmath.npdf(z, 0, sigma) * ratio**order

    top = order + 14 * sigma
    points = mpmath.linspace(-14 * sigma, top, 24)
    return float(mpmath.log(mpmath.quad(integrand, points)))


@pytest.mark.parametrize(
    "q, sigma, order",
    [
        (0.01, 1.0, 2.0),
        (0.01, 1.0, 10.9),
        (0.2, 0.5, 1.1),
        (0.2, 0.5, 31.5),
        (0.001, 5.0, 1.7),
        (0.5, 20.0, 63.0),
        (0.04, 2.2, 63.0),
        (0.01, 0.3, 8.3),
        (0.9, 0.1, 4.5),
        (1e-4, 0.04, 1.1),
    ],
)
def test_divergence_against_quadrature(q: float, sigma: float, order: float) -> None:
    value = analysis.compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=order)
    expected = moment_by_quadrature(q, sigma, order) / (order - 1)
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.3, 1.0, 2.24, 7.0, 50.0, 400.0])
@pytest.mark.parametrize("q", [1e-5, 0.01, 0.5, 0.99])
def test_whole_orders_against_the_binomial_sum(q: float, sigma: float) -> None:
    """For whole orders the moment is a finite sum (arXiv 1908.10530, section 3.3)."""
    from scipy.special import gammaln, logsumexp

    orders = [2, 3, 5, 17, 63, 256, 2000]
    values = analysis.compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=orders)
    for order, value in zip(orders, np.atleast_1d(values), strict=True):
        k = np.arange(order + 1)
        binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = (
            binomial + k * math.log(q) + (order - k) * math.log1p(-q) + k * (k - 1) / (2 * sigma**2)
        )
        expected = logsumexp(terms) / (order - 1)
        assert value == pytest.approx(expected, rel=1e-8, abs=1e-10)


def test_full_batch_is_the_gaussian_mechanism() -> None:
    values = analysis.compute_rdp(q=1.0, noise_multiplier=2.0, steps=3, orders=[1.5, 2, math.inf])
    assert np.array_equal(values, [3 * 1.5 / 8, 3 * 2 / 8, math.inf])


def test_limits() -> None:
    orders = [1.5, 4.0]
    zero = analysis.compute_rdp(q=0.0, noise_multiplier=1.0, steps=3, orders=orders)
    assert np.array_equal(zero, [0.0, 0.0])
    none = analysis.compute_rdp(q=0.1, noise_multiplier=0.0, steps=3, orders=orders)
    assert np.array_equal(none, [math.inf, math.inf])
    assert analysis.compute_rdp(q=0.1, noise_multiplier=0.0, steps=0, orders=2.0) == 0.0


def test_scalar_order_gives_a_float() -> None:
    one = analysis.compute_rdp(q=0.1, noise_multiplier=1.0, steps=7, orders=2.5)
    many = analysis.compute_rdp(q=0.1, noise_multiplier=1.0, steps=7, orders=[2.5, 3.0])
    assert isinstance(one, float)
    assert one == np.atleast_1d(many)[0]


def test_result_may_be_changed_by_the_caller() -> None:
    arguments = {"q": 0.1, "noise_multiplier": 1.0, "steps": 1, "orders": [2.0, 3.0]}
    first = np.asarray(analysis.compute_rdp(**arguments))
    expected = first.copy()
    first += 1.0
    assert np.array_equal(analysis.compute_rdp(**arguments), expected)


@pytest.mark.parametrize("orders", [1.0, [0.5, 2.0], [math.nan]])
def test_refused_orders(orders: float | list[float]) -> None:
    with pytest.raises(ValueError, match="orders"):
        analysis.compute_rdp(q=0.1, noise_multiplier=1.0, steps=1, orders=orders)


@pytest.mark.filterwarnings("ignore:The .* Renyi order")
def test_conversion() -> None:
    order, rdp, delta = 5.0, 0.7, 1e-4
    expected = rdp + math.log(1 - 1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
    epsilon, best = analysis.get_privacy_spent(orders=order, rdp=rdp, delta=delta)
    assert (epsilon, best) == (pytest.approx(expected, rel=1e-12), order)
    many = analysis.get_privacy_spent(orders=[2, 5, 9], rdp=[math.nan, rdp, math.inf], delta=delta)
    assert many == (epsilon, order)
    nothing, _ = analysis.get_privacy_spent(orders=[2, 3], rdp=[math.nan, math.inf], delta=delta)
    assert nothing == math.inf
    assert analysis.get_privacy_spent(orders=[2, 3], rdp=[0.0, 0.0], delta=0.9)[0] == 0.0
    with pytest.raises(ValueError, match="length"):
        analysis.get_privacy_spent(orders=[2, 3], rdp=[1.0], delta=delta)


# --- published values ---


def test_divergences_of_dp_accountings_own_tests() -> None:
    """rdp_privacy_accountant_test.py: test_compute_rdp_poisson_sampled_gaussian.

    At the order 1.5 it has 6.70579741e-04; by quadrature the divergence is 6.50070897e-04.
    """
    orders = [1.5, 2.5, 5.0, 50.0, 100.0, math.inf]
    rdp = analysis.compute_rdp(q=0.01, noise_multiplier=2.5, steps=50, orders=orders)
    want = [6.50070897e-04, 1.08548710e-03, 2.18075656e-03, 2.38460375e-02, 1.67416308e02]
    assert rdp == pytest.approx([*want, math.inf], rel=1e-4)


def test_epsilons_of_dp_accountings_own_tests() -> None:
    """The same file: test_compute_epsilon_delta_pure_dp and test_compute_epsilon_delta_gaussian."""
    orders = list(range(2, 33))
    with pytest.warns(UserWarning, match="largest Renyi order"):
        pure = analysis.get_privacy_spent(orders=orders, rdp=[1.1] * len(orders), delta=1e-5)
    assert pure == (pytest.approx(1.32783806176, abs=1e-7), 32)
    fine = [0.01 * i for i in range(101, 10_000)]
    rdp = analysis.compute_rdp(q=1.0, noise_multiplier=4.530877117, steps=1, orders=fine)
    assert analysis.get_privacy_spent(orders=fine, rdp=rdp, delta=1e-6)[0] == pytest.approx(
        1.0, abs=1e-6
    )


@pytest.mark.parametrize("sigma, batch, size, steps, published", [
    (4.0, 100, 10_000, 10_000, 1.26),  # arXiv 1607.00133, section 3.2 (moments accountant)
    (1.3, 256, 60_000, 3516, 1.19),  # TensorFlow Privacy's MNIST tutorial: 15 epochs,
    (1.1, 256, 60_000, 14063, 3.01),  # 60
    (0.7, 256, 60_000, 10547, 7.10),  # and 45
])  # fmt: skip
def test_epsilons_of_papers(
    sigma: float, batch: int, size: int, steps: int, published: float
) -> None:
    """They convert by ``rdp + log(1 / delta) / (order - 1)``; ours is a closer bound."""
    orders = np.array([*(1 + x / 10 for x in range(1, 100)), *range(12, 64)])
    rdp = analysis.compute_rdp(q=batch / size, noise_multiplier=sigma, steps=steps, orders=orders)
    as_then = float(np.min(rdp + math.log(1e5) / (orders - 1)))
    assert as_then == pytest.approx(published, abs=0.005)
    ours = analysis.get_privacy_spent(orders=orders, rdp=rdp, delta=1e-5)[0]
    assert 0.8 * as_then < ours < as_then
