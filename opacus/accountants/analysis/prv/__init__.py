"""Privacy loss random variables: their discretisation and composition (arXiv 2106.02848)."""

from opacus.accountants.analysis.prv.compose import compose_heterogeneous
from opacus.accountants.analysis.prv.domain import Domain, compute_safe_domain_size
from opacus.accountants.analysis.prv.prvs import (
    AddedSampleGaussianPRV,
    DiscretePRV,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    discretize,
)

__all__ = [
    "AddedSampleGaussianPRV",
    "DiscretePRV",
    "Domain",
    "PoissonSubsampledGaussianPRV",
    "TruncatedPrivacyRandomVariable",
    "compose_heterogeneous",
    "compute_safe_domain_size",
    "discretize",
]
