"""How long `get_noise_multiplier` takes over the whole range of budgets.

    python memory_test/benchmarks/noise_search.py --output memory_test/results/NAME.json

Every row says which noise multiplier was found in how many seconds of CPU time, and the epsilon of
it, or the error that says why there is none.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memory_test.common.results import write_json
from memory_test.common.schema import head, versions
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier

WHAT = "how long get_noise_multiplier takes over the whole range of budgets; seconds of CPU time"
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
    """Write all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    rows = []
    for case in itertools.product(("rdp", "prv", "pld"), EPSILONS, DELTAS, RATES, STEPS):
        rows.append(measure(*case))
        print(rows[-1], file=sys.stderr, flush=True)
    write_json(output, {**head(WHAT, "", versions()), "noise": rows})


if __name__ == "__main__":
    main()
