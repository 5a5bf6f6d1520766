"""Proposes batch size, steps, noise and clipping norm for a budget: :func:`opacus.plan`.

python -m opacus --size 50000 --epsilon 8 --epochs 20
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from opacus.planning import Plan, plan


def main(arguments: Sequence[str] | None = None) -> Plan:
    """Print a proposal, with the batch sizes that were compared and the reasons."""
    parser = argparse.ArgumentParser(prog="python -m opacus", description=main.__doc__)
    parser.add_argument("--size", type=int, required=True, help="number of items, public")
    parser.add_argument("--epsilon", type=float, required=True, help="budget")
    parser.add_argument("--epochs", type=float, required=True, help="passes that can be computed")
    parser.add_argument("--delta", type=float, help="by default N^-1.1, at most 1e-5")
    parser.add_argument("--accountant", default="pld", help="which counts the final noise")
    args = parser.parse_args(arguments)
    try:
        proposal = plan(
            dataset_size=args.size,
            target_epsilon=args.epsilon,
            epochs=args.epochs,
            target_delta=args.delta,
            accountant=args.accountant,
        )
    except ValueError as error:
        parser.error(str(error))
    print(proposal)
    return proposal


if __name__ == "__main__":
    main()
