"""What canaries' scores say about the epsilon that a run claims."""

from __future__ import annotations

import numpy as np

from opacus.accountants import IAccountant, create_accountant
from opacus.accountants.tradeoff import max_true_positive_rate
from opacus.auditing.bounds import epsilon_lower_bound, gaussian_mu_estimate
from opacus.auditing.fdp import TradeOff, mu_lower_bound, scores_refute
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
    curve: TradeOff | None = None,
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
        share: of `false_alarm` that these checks have, in (0, 1].
        curve: trade-off curve of the claim, if it is known: much harder to keep than one epsilon.
    """

    def bound(confidence: float) -> float:
        return epsilon_lower_bound(scores, included, delta=delta, confidence=confidence)

    alarm = share * false_alarm / (1 if curve is None else 2)
    sure = bound(1 - alarm)
    findings = [
        Finding(
            "epsilon",
            sure <= epsilon,
            f"at least {sure:.3g} with confidence {1 - alarm:g}, claimed {epsilon:.3g}",
        )
    ]
    if curve is not None:
        refuted = scores_refute(curve, scores, included, alarm)
        findings.append(
            Finding(
                "trade-off curve",
                not refuted,
                "more right guesses than the accountant's history allows"
                if refuted
                else "no more right guesses than the accountant's history allows",
            )
        )
    return AuditReport(
        (*others, *findings),
        false_alarm=false_alarm,
        epsilon=epsilon,
        epsilon_lower_bound=bound(confidence),
        delta=delta,
        confidence=confidence,
        mu=gaussian_mu_estimate(scores, included),
        mu_lower_bound=mu_lower_bound(scores, included, confidence=confidence),
        scores=scores,
        included=included,
    )


def claimed_curve(accountant: IAccountant) -> TradeOff | None:
    """The trade-off curve that a history claims, from below; None if it takes too long.

    Args:
        accountant: with a history; of accountants whose epsilon is slow or no bound, "rdp" is asked
            about the same history.
    """
    if accountant.mechanism() not in ("pld", "rdp"):
        if any(len(entry) != 3 for entry in accountant.history):
            return None
        counted = create_accountant("rdp")
        counted.history = list(accountant.history)
        accountant = counted
    grid = np.geomspace(1e-7, 0.5, 300)
    rights = np.concatenate([[0.0], grid, 1.0 - grid[-2::-1], [1.0]])  # chances, increasing
    # The least chance of a wrong guess x with T(x) = 1 - right; T is its own inverse.
    wrongs = 1.0 - max_true_positive_rate(accountant, list(1.0 - rights))

    def curve(rate: float) -> float:
        place = int(np.searchsorted(rights, 1.0 - rate, side="right")) - 1
        return float(wrongs[max(0, place)])  # of the next smaller chance: from below

    return curve
