"""What canaries' scores say about the epsilon that a run claims."""

from __future__ import annotations

import numpy as np

from opacus.auditing.bounds import epsilon_lower_bound, gaussian_mu_estimate
from opacus.auditing.report import AuditReport, Finding


def compare_with_claim(
    scores: np.ndarray,
    included: np.ndarray,
    *,
    epsilon: float,
    delta: float,
    confidence: float,
    false_alarm: float,
    others: tuple[Finding, ...] = (),
    share: float = 1.0,
) -> AuditReport:
    """The report of an audit: its other checks, and whether the scores refute the claim.

    Args:
        scores: `[m]`, higher for canaries that look as if they were in the data.
        included: `[m]`, which of them are.
        epsilon: what the run claims at `delta`.
        delta: far below 1 / m.
        confidence: of the lower bound that is reported.
        false_alarm: chance of any failure in a run that keeps its promise.
        others: checks that have the rest of it.
        share: of `false_alarm` that this check has, in (0, 1].
    """

    def bound(confidence: float) -> float:
        return epsilon_lower_bound(scores, included, delta=delta, confidence=confidence)

    certain = 1 - share * false_alarm
    sure = bound(certain)
    finding = Finding(
        "epsilon",
        sure <= epsilon,
        f"at least {sure:.3g} with confidence {certain:g}, claimed {epsilon:.3g}",
    )
    return AuditReport(
        (*others, finding),
        false_alarm=false_alarm,
        epsilon=epsilon,
        epsilon_lower_bound=bound(confidence),
        delta=delta,
        confidence=confidence,
        mu=gaussian_mu_estimate(scores, included),
        scores=scores,
        included=included,
    )
