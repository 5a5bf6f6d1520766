"""Differentially private training of PyTorch models, also of large ones under FSDP2.

A drop-in replacement for Opacus 1.6.0: see :class:`PrivacyEngine`.
"""

from opacus import utils
from opacus.core.privacy.correlated import CorrelatedNoise
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.isolation import IsolationError, check_isolation
from opacus.planning import Plan, plan
from opacus.privacy_engine import PrivacyEngine
from opacus.version import __version__

__all__ = [
    "CorrelatedNoise",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "IsolationError",
    "Plan",
    "PrivacyEngine",
    "__version__",
    "check_isolation",
    "plan",
    "utils",
]
