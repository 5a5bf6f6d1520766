"""Scenarios: epsilon of every accountant, histories, the search for a noise multiplier."""

from __future__ import annotations

from functools import partial
from typing import Any

from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier

# noise multiplier, sample rate, steps; delta
SETTINGS = {
    "short": ([(0.9, 0.02, 700)], 2e-6),
    "few": ([(1.7, 0.25, 40)], 1e-4),
    "long": ([(3.3, 0.004, 9000)], 3e-7),
    "full": ([(20.0, 1.0, 50)], 1e-5),
    "schedule": ([(2.0, 0.01, 300), (1.5, 0.01, 300), (1.0, 0.02, 100)], 1e-5),
}


def epsilon(mechanism: str, setting: str) -> dict[str, Any]:
    """Epsilon after all steps, taken one by one where they are few."""
    entries, delta = SETTINGS[setting]
    accountant = create_accountant(mechanism)
    if sum(steps for *_, steps in entries) > 1000:
        accountant.history = list(entries)
    else:
        for sigma, rate, steps in entries:
            for _ in range(steps):
                accountant.step(noise_multiplier=sigma, sample_rate=rate)
    return {
        "history": [tuple(entry) for entry in accountant.history],
        "epsilon": float(accountant.get_epsilon(delta)),
    }


def search(mechanism: str) -> dict[str, float]:
    sigma = get_noise_multiplier(
        target_epsilon=3.0,
        target_delta=1e-5,
        sample_rate=0.03,
        steps=400,
        accountant=mechanism,
        epsilon_tolerance=0.001,
    )
    return {"noise_multiplier": float(sigma)}


RUNS: dict[str, Any] = {}
for mechanism in ("rdp", "gdp", "prv"):
    for setting in SETTINGS:
        if (mechanism, setting) != ("gdp", "schedule"):  # GDP knows one noise multiplier only
            RUNS[f"epsilon-{mechanism}-{setting}"] = partial(epsilon, mechanism, setting)
    RUNS[f"search-{mechanism}"] = partial(search, mechanism)
