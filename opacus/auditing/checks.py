"""Statistical checks of what a run released about its canaries.

Everything is in units of the noise's claimed standard deviation. A canary that is not in the data
then shows independent N(0, 1) in each step. One that is in shows 1 / sigma more whenever its batch
was drawn. Each check has a false-alarm rate; all together have the one that is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from opacus.auditing.report import Finding

# Steps that are compared with each other, the latest ones.
_MOST_STEPS = 512
# A canary's gradient is its own coordinate up to the model's part of it, which clipping shares out.
_LEAST_SHARE = 0.9


@dataclass(frozen=True)
class Observed:
    """What was released about canaries.

    Attributes:
        values: `[T, m]`, released sums in units of the noise's claimed standard deviation.
        sigma: `[T]`, claimed noise multipliers.
        included: `[m]`, which canaries are in the data.
        sample_rate: chance of one item being in one batch, as the accountant has it.
        steps_counted: number of steps that the accountant counted meanwhile.
    """

    values: np.ndarray
    sigma: np.ndarray
    included: np.ndarray
    sample_rate: float
    steps_counted: int


def check_all(observed: Observed, false_alarm: float) -> tuple[Finding, ...]:
    """Every check; in a run that keeps its promise, one fails with at most this chance.

    Except `power`, which says whether there are steps and canaries enough.
    """
    share = false_alarm / 6  # noise scale takes two sides, the signal another two
    return (
        steps_counted(observed),
        noise_scale(observed, 2 * share),
        fresh_in_each_step(observed, share),
        fresh_in_each_element(observed, share),
        clipped(observed, share),
        signal(observed, share),
        power(observed, share),
    )


def steps_counted(observed: Observed) -> Finding:
    """The accountant counted each step that released something."""
    seen = len(observed.values)
    return Finding(
        "steps counted",
        0 < seen <= observed.steps_counted,
        f"{seen} steps released gradients, the accountant counted {observed.steps_counted}",
    )


def noise_scale(observed: Observed, alpha: float) -> Finding:
    """Canaries that are not in the data show noise of the claimed width."""
    from scipy.stats import chi2  # type: ignore[import-untyped]

    outside = observed.values[:, ~observed.included]
    total, number = float(np.square(outside).sum()), outside.size
    low, high = chi2.ppf([alpha / 2, 1 - alpha / 2], number) / number
    ratio = math.sqrt(total / number)
    return Finding(
        "noise scale",
        bool(math.isfinite(ratio) and math.sqrt(low) <= ratio <= math.sqrt(high)),
        f"{ratio:.4g} times the claimed width, allowed {math.sqrt(low):.4g} to "
        f"{math.sqrt(high):.4g} (less: noise missing or too small, or streams repeat; more: "
        "gradients reach canaries that are not in the data)",
    )


def fresh_in_each_step(observed: Observed, alpha: float) -> Finding:
    """No two steps have the same noise, or parts of it."""
    outside = observed.values[-_MOST_STEPS:, ~observed.included]
    steps = len(outside)
    pairs = np.triu_indices(steps, k=1)
    both = (outside @ outside.T)[pairs]
    worst, limit = _worst(both, np.full(len(both), outside.shape[1]), 1.0, alpha)
    return Finding(
        "fresh noise in each step",
        worst <= limit and steps > 1,
        f"largest correlation of two of {steps} steps {worst:.3g} standard deviations, allowed "
        f"{limit:.3g} (above: a step number or key came twice)",
    )


def fresh_in_each_element(observed: Observed, alpha: float) -> Finding:
    """No two parts of the parameter have the same noise, as shards with one stream would."""
    outside = np.where(observed.included, 0.0, observed.values)  # [T, m]
    mask = (~observed.included).astype(np.float64)
    length = 2 * outside.shape[1]
    products = np.abs(np.fft.rfft(outside, length)) ** 2
    sums = np.fft.irfft(products.sum(0), length)[1 : outside.shape[1]]
    terms = np.fft.irfft(np.abs(np.fft.rfft(mask, length)) ** 2, length)[1 : outside.shape[1]]
    enough = terms > 0.5  # a distance that two canaries have
    worst, limit = _worst(sums[enough], terms[enough] * len(outside), 2.0, alpha)
    return Finding(
        "fresh noise in each element",
        worst <= limit,
        f"largest correlation of elements at one distance {worst:.3g} standard deviations, "
        f"allowed {limit:.3g} (above: ranks or shards share a stream)",
    )


def clipped(observed: Observed, alpha: float) -> Finding:
    """No canary adds more than C to a sum."""
    from scipy.stats import norm  # type: ignore[import-untyped]

    inside = observed.values[:, observed.included] - 1.0 / observed.sigma[:, None]
    worst = float(inside.max()) if inside.size else 0.0
    limit = float(norm.isf(alpha / max(1, inside.size)))
    return Finding(
        "clipped",
        bool(worst <= limit),
        f"largest contribution is {worst:.3g} standard deviations of the noise above C, allowed "
        f"{limit:.3g} (above: clipping is missing, or factors are another row's)",
    )


def signal(observed: Observed, alpha: float) -> Finding:
    """Canaries in the data show in as many steps as the sample rate says.

    More of it means larger contributions or more draws than are counted for; less means that the
    canaries' gradients went elsewhere or were lost.
    """
    inside = observed.values[:, observed.included] * observed.sigma[:, None]  # in units of C
    expected, spread = _expected_signal(observed, alpha)
    total, number = float(inside.sum()), inside.size
    low, high = _LEAST_SHARE * expected - spread, expected + spread
    return Finding(
        "signal of the canaries",
        bool(low <= total <= high),
        f"canaries add {total / number:.3g} C on average, allowed {low / number:.3g} to "
        f"{high / number:.3g} at sample rate {observed.sample_rate:.3g} (above: batches drawn more "
        "often than counted, or contributions above C; below: gradients of canaries are lost)",
    )


def power(observed: Observed, alpha: float) -> Finding:
    """Canaries can be seen at all: this depends on the settings, not on chance."""
    expected, spread = _expected_signal(observed, alpha)
    return Finding(
        "power",
        expected > 2 * spread,
        f"canaries in the data add {expected:.4g} C together, where chance makes {spread:.4g} C, "
        f"which may be half of it (failed: nothing is wrong with the run, but bugs may go "
        "unseen; audit more steps or more canaries)",
    )


def _expected_signal(observed: Observed, alpha: float) -> tuple[float, float]:
    """The sum of all canaries' contributions in units of C, and the largest plausible deviation.

    By Bernstein's inequality, for noise and Poisson draws.
    """
    rate, columns = observed.sample_rate, int(observed.included.sum())
    steps = len(observed.sigma)
    variance = (steps * rate * (1 - rate) + float(np.square(observed.sigma).sum())) * columns
    t = math.log(2 / alpha)
    return steps * columns * rate, math.sqrt(2 * variance * t) + t / 3


def _worst(sums: np.ndarray, terms: np.ndarray, scale: float, alpha: float) -> tuple[float, float]:
    """The largest of sums of products of N(0, 1), in standard deviations, and what is allowed.

    By Bernstein's inequality, with no normal approximation: log E exp(k S) of a sum S of n products
    is at most n k^2 / (2 (1 - scale k)).

    Args:
        sums: the sums.
        terms: number of products in each.
        scale: 1 if no number is in two products of a sum, 2 if it may be in two.
        alpha: chance that any is beyond its limit.
    """
    if not len(sums):
        return 0.0, math.inf
    t = math.log(2 * len(sums) / alpha)
    limits = math.sqrt(2 * t) + scale * t / np.sqrt(terms)
    deviations = np.abs(sums) / np.sqrt(terms)
    place = int(np.argmax(deviations / limits))
    return float(deviations[place]), float(limits[place])
