"""What an audit found, in a form that can be printed, plotted and raised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


class AuditError(AssertionError):
    """The run breaks its claim, or the audit had too little power to tell."""


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        name: what was checked.
        ok: whether it passed.
        detail: what was measured, what was allowed, and likely causes of a failure.
    """

    name: str
    ok: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'} {self.name}: {self.detail}"


@dataclass(frozen=True)
class AuditReport:
    """All checks of an audit.

    Attributes:
        findings: the checks.
        false_alarm: bound on the probability of any failure in a run that keeps its promise and has
            power enough.
        epsilon: what the run claims, if the audit compares it.
        epsilon_lower_bound: what the attacker proves, if it was measured.
        delta: of both.
        confidence: with which the lower bound holds.
        mu: estimate of Gaussian DP for this attacker, and its standard error.
        mu_lower_bound: mu of Gaussian DP that the scores prove, with `confidence`.
        scores, included: `[m]`, of the canaries.
    """

    findings: tuple[Finding, ...]
    false_alarm: float
    epsilon: float | None = None
    epsilon_lower_bound: float | None = None
    delta: float | None = None
    confidence: float | None = None
    mu: tuple[float, float] | None = None
    mu_lower_bound: float | None = None
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0), repr=False)
    included: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool), repr=False)

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(finding.ok for finding in self.findings)

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(finding.name for finding in self.findings if not finding.ok)

    def raise_if_failed(self) -> None:
        """Let a failed audit stop the program.

        Raises:
            AuditError: It holds the whole report.
        """
        if not self.passed:
            raise AuditError(f"the audit failed: {', '.join(self.failures)}\n{self}")

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        if self.epsilon_lower_bound is not None and self.confidence is not None:
            lines.append(
                f"epsilon >= {self.epsilon_lower_bound:.3g} at delta = {self.delta:g} with "
                f"confidence {self.confidence:g}; claimed: {self.epsilon:.3g}"
            )
        if self.mu is not None and self.mu_lower_bound is not None:
            lines.append(
                f"mu of this attacker: {self.mu[0]:.3g} +- {self.mu[1]:.2g} (an estimate); proven "
                f"of Gaussian DP: {self.mu_lower_bound:.3g}"
            )
        lines.append(f"chance of a false alarm: at most {self.false_alarm:g}")
        return "\n".join(lines)

    def plot(self, path: str) -> None:
        """Write a picture: scores of canaries in and out of the data, and the checks.

        Args:
            path: file; its ending names the format.

        Raises:
            ImportError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "plot() needs matplotlib; install it with pip install 'opacus[profile]'"
            ) from error
        figure: Any = Figure(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        if len(self.scores):
            bins = np.histogram_bin_edges(self.scores, bins=30)
            left.hist(self.scores[~self.included], bins=bins, alpha=0.6, label="left out")
            left.hist(self.scores[self.included], bins=bins, alpha=0.6, label="in the data")
            left.set(xlabel="score", ylabel="canaries")
            left.legend()
        right.axis("off")
        for place, finding in enumerate(self.findings):
            colour = "tab:green" if finding.ok else "tab:red"
            text = f"{'ok' if finding.ok else 'FAIL'}  {finding.name}"
            right.text(0.0, 0.95 - 0.09 * place, text, color=colour, transform=right.transAxes)
        if self.epsilon is not None and self.epsilon_lower_bound is not None:
            right.set_title(f"epsilon: {self.epsilon_lower_bound:.3g} <= {self.epsilon:.3g}")
        figure.savefig(path)
