"""How long `get_noise_multiplier` takes over the whole range of budgets.

    python memory_test/benchmarks/noise_search.py > memory_test/results/noise_search.json

Every row says which noise multiplier was found in how many seconds of CPU time, and the epsilon of
it, or the error that says why there is none.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier

EPSILONS = (0.01, 1.0, 1000.0)
DELTAS = (1e-2, 1e-5, 1e-15)
RATES = (1e-7, 1e-3, 0.1, 1.0)
STEPS = (1, 1000, 10**7)


def measure(name: str, epsilon: float, delta: float, rate: float, steps: int) -> dict[str, Any]:
    """Returns one row."""
    row: dict[str, Any] = dict(accountant=name, target=epsilon, delta=delta, rate=rate, steps=steps)
    start = time.process_time()
    try:
        sigma = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant=name,
        )
    except ValueError as error:
        row["error"] = str(error)
    else:
        row["noise_multiplier"] = sigma
    row["seconds"] = round(time.process_time() - start, 2)
    if "noise_multiplier" in row:
        book = create_accountant(name)
        book.history = [(row["noise_multiplier"], rate, steps)]
        row["epsilon"] = book.get_epsilon(delta)
    return row


def main() -> None:
    """Writes all rows as JSON, one a line."""
    rows = []
    for case in itertools.product(("rdp", "prv", "pld"), EPSILONS, DELTAS, RATES, STEPS):
        rows.append(measure(*case))
        print(rows[-1], file=sys.stderr, flush=True)
    print("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]")


if __name__ == "__main__":
    main()
