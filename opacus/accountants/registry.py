"""Accountants by name."""

from __future__ import annotations

from opacus.accountants.accountant import IAccountant
from opacus.accountants.gdp import GaussianAccountant
from opacus.accountants.pld import PLDAccountant
from opacus.accountants.prv import PRVAccountant
from opacus.accountants.rdp import RDPAccountant

_ACCOUNTANTS: dict[str, type[IAccountant]] = {
    "rdp": RDPAccountant,
    "gdp": GaussianAccountant,
    "prv": PRVAccountant,
    "pld": PLDAccountant,
}


def register_accountant(mechanism: str, accountant: type[IAccountant], force: bool = False) -> None:
    """Makes an accountant class available to `create_accountant` and `PrivacyEngine`.

    Args:
        mechanism: the name to register.
        accountant: the class; it is created without arguments.
        force: replace a class that already has this name.

    Raises:
        ValueError: if the name is taken and `force` is False.
    """
    if mechanism in _ACCOUNTANTS and not force:
        raise ValueError(
            f"an accountant named {mechanism!r} exists already; pass force=True to replace it"
        )
    _ACCOUNTANTS[mechanism] = accountant


def create_accountant(mechanism: str) -> IAccountant:
    """Creates an accountant with an empty history.

    Args:
        mechanism: ``"pld"``, ``"prv"``, ``"rdp"``, ``"gdp"``, or a name given to
            `register_accountant`.

    Raises:
        ValueError: if no accountant has this name.
    """
    if mechanism not in _ACCOUNTANTS:
        raise ValueError(
            f"no accountant is named {mechanism!r}; choose one of {sorted(_ACCOUNTANTS)}"
        )
    return _ACCOUNTANTS[mechanism]()
