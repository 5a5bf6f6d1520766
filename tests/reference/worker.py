"""Runs all scenarios with the ``opacus`` that PYTHONPATH finds; a script, not a test.

    python worker.py FOLDER          # results, and states to exchange, into FOLDER
    python worker.py FOLDER OTHER    # loads the states that OTHER holds

The results are ``{scenario: {name: value}}``, or ``{scenario: "the exception"}``.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # last, or it would bring the project's opacus

from tests.reference import (
    accountants,
    layers,
    sampling,
    states,
    training,
    validation,
)

SCENARIOS = (layers, training, sampling, accountants, validation)


def outcome(run: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    try:
        return run()
    except Exception:
        return traceback.format_exc()


def main(folder: Path, other: Path | None) -> None:
    if other is not None:
        loaded = {name: outcome(lambda n=name: states.load(n, other)) for name in states.NAMES}
        torch.save(loaded, folder / "loaded.pt")
        return
    results = {name: outcome(run) for module in SCENARIOS for name, run in module.RUNS.items()}
    results |= {name: outcome(lambda n=name: states.save(n, folder)) for name in states.NAMES}
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
