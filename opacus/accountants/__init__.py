"""Privacy accounting: what a run of noisy steps costs in (epsilon, delta)."""

from opacus.accountants.accountant import IAccountant
from opacus.accountants.gdp import GaussianAccountant
from opacus.accountants.pld import PLDAccountant
from opacus.accountants.prv import PRVAccountant
from opacus.accountants.rdp import RDPAccountant
from opacus.accountants.registry import create_accountant, register_accountant

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PLDAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "create_accountant",
    "register_accountant",
]
