"""Composition over training runs, and over data sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opacus.accountants.accountant import IAccountant
from opacus.accountants.registry import create_accountant


def compose(accountants: Sequence[IAccountant], mechanism: str = "pld") -> IAccountant:
    """Returns an accountant of all steps of several runs over the same people.

    Args:
        accountants: one a run, of any kind.
        mechanism: name of the accountant that counts them together.

    Raises:
        ValueError: if that accountant cannot count a step, such as "rdp" batches of fixed size.
    """
    together = create_accountant(mechanism)
    history = [entry for accountant in accountants for entry in accountant.history]
    together.load_state_dict({"history": history, "mechanism": mechanism})
    return together


def epsilon_of_data_sets(
    runs: Sequence[tuple[IAccountant, Iterable[str]]], delta: float, mechanism: str = "pld"
) -> dict[str, float]:
    """Returns what all runs together cost the people of each data set.

    A run costs only those whose data it read, so runs over data sets of different people do not
    add up: epsilon for everybody is the largest value. Somebody who is in several data sets is
    protected by the runs that read any of them together: give such data sets one name.

    Args:
        runs: for each run, its accountant and the names of the data sets that it read.
        delta: strictly between 0 and 1.
        mechanism: name of the accountant that counts.

    Returns:
        Epsilon for each name.

    Raises:
        TypeError: the data sets of a run are one string.
    """
    read: dict[str, list[IAccountant]] = {}
    for accountant, names in runs:
        if isinstance(names, str):
            raise TypeError(f"the data sets of a run must be a list of names, got {names!r}")
        for name in dict.fromkeys(names):
            read.setdefault(name, []).append(accountant)
    return {name: compose(books, mechanism).get_epsilon(delta) for name, books in read.items()}
