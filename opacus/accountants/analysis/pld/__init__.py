"""Privacy loss distributions of Gaussian mixtures: rounded up to a grid, and composed."""

from opacus.accountants.analysis.pld.compose import Step, composed_epsilon
from opacus.accountants.analysis.pld.pairs import Mixture, Pair

__all__ = ["Mixture", "Pair", "Step", "composed_epsilon"]
