"""Computes reference values of epsilon with other libraries; a script, not a test.

    python reference.py opacus < cases.json     # whatever `opacus` PYTHONPATH finds
    python reference.py pld < cases.json        # dp-accounting's privacy loss distribution

It reads a list of {"noise_multiplier", "sample_rate", "steps", "delta"} and writes the same list
with the keys "rdp" and "prv", or "pld", added. A value is null if it is not finite or takes more
than TIME_LIMIT seconds or MEMORY_LIMIT bytes.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

TIME_LIMIT = 30
MEMORY_LIMIT = 8 * 2**30

Case = dict[str, Any]


def limited(compute: Callable[[Case], float], case: Case) -> float | None:
    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIME_LIMIT)
    try:
        epsilon = float(compute(case))
        return epsilon if math.isfinite(epsilon) else None
    except (TimeoutError, MemoryError):
        return None
    finally:
        signal.alarm(0)


def opacus_epsilon(mechanism: str) -> Callable[[Case], float]:
    def compute(case: Case) -> float:
        from opacus.accountants import create_accountant

        accountant = create_accountant(mechanism)
        accountant.history = [(case["noise_multiplier"], case["sample_rate"], case["steps"])]
        return accountant.get_epsilon(delta=case["delta"])

    return compute


def pld_epsilon(case: Case) -> float:
    import dp_accounting

    step = dp_accounting.PoissonSampledDpEvent(
        case["sample_rate"], dp_accounting.GaussianDpEvent(case["noise_multiplier"])
    )
    epsilon = 0.0
    for interval in (1e-4, 1e-5):  # losses are rounded up to it; small ones need the finer
        accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=interval)
        accountant.compose(step, case["steps"])
        epsilon = accountant.get_epsilon(case["delta"])
        if epsilon > 0.1:
            break
    return epsilon


def main(library: str) -> None:
    methods: dict[str, Callable[[Case], float]] = {"pld": pld_epsilon}
    if library == "opacus":
        methods = {name: opacus_epsilon(name) for name in ("rdp", "prv")}
    cases = json.load(sys.stdin)
    for case in cases:
        case.update({name: limited(compute, case) for name, compute in methods.items()})
    json.dump(cases, sys.stdout)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    main(sys.argv[1])
