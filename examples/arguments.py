"""Checks of command-line arguments that the examples share."""

from __future__ import annotations

import argparse
import math
from typing import Any


def positive(kind: type) -> Any:
    """A type for argparse: a finite number above 0, of this kind."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it in "invalid ... value"
    return parse


def probability(text: str) -> float:
    """A type for argparse: a number between 0 and 1, both excluded."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}; try 1e-5")
    return value


def seed(text: str) -> int:
    """A type for argparse: a seed of torch's generators."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be 0 or more and below 2^63, got {text}")
    return value


def check_against_data(args: argparse.Namespace, rows: int) -> None:
    """Fill in delta, and refuse options that do not fit ``rows`` training rows.

    Raises:
        ValueError: It names the option.
    """
    args.delta = args.delta or min(1e-5, rows**-1.1)
    if args.delta >= 1 / rows:
        raise ValueError(
            f"--delta {args.delta} protects nobody among {rows} training rows; it must be well "
            f"below 1/{rows}"
        )
    if args.batch_size > rows:
        raise ValueError(
            f"--batch-size {args.batch_size}: there are {rows} training rows only; give a "
            f"smaller one, such as {max(rows // 4, 1)}"
        )
