"""Audits: whether a run keeps its promise, measured from outside. See docs/auditing.md."""

from opacus.auditing.bounds import epsilon_lower_bound, gaussian_mu_estimate, p_value
from opacus.auditing.canaries import GradientCanaries
from opacus.auditing.fdp import curve_p_value, gaussian_curve, mu_lower_bound
from opacus.auditing.report import AuditError, AuditReport, Finding
from opacus.auditing.sensitivity import leave_one_out
from opacus.auditing.tokens import TokenCanaries

__all__ = [
    "AuditError",
    "AuditReport",
    "Finding",
    "GradientCanaries",
    "TokenCanaries",
    "curve_p_value",
    "epsilon_lower_bound",
    "gaussian_curve",
    "gaussian_mu_estimate",
    "leave_one_out",
    "mu_lower_bound",
    "p_value",
]
