"""Privacy accounting from the command line."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from opacus.accountants import IAccountant, create_accountant
from opacus.accountants.sampling import FixedSize, Sampling, TruncatedPoisson, UserRows
from opacus.accountants.tradeoff import gaussian_mu, max_true_positive_rate
from opacus.accountants.utils import get_noise_multiplier

_NAMES = ("pld", "prv", "rdp", "gdp")
_RATES = (1e-4, 1e-3, 1e-2, 1e-1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, prints its answer, and returns 0, or 2 after a usage error."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m opacus.accountants", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    epsilon = commands.add_parser("epsilon", help="epsilon of a run")
    noise = commands.add_parser("noise", help="noise multiplier for a budget")
    compare = commands.add_parser("compare", help="all accountants, and what an attacker can do")
    for command, run in ((epsilon, _epsilon), (noise, _noise), (compare, _compare)):
        command.set_defaults(run=run)
        command.add_argument("--rate", type=float, required=True, help="sample rate")
        command.add_argument("--steps", type=int, required=True)
        command.add_argument("--delta", type=float, required=True)
        command.add_argument("--dataset-size", type=int, help="for truncated or fixed batches")
        command.add_argument("--max-batch", type=int, help="truncated Poisson sampling")
        command.add_argument("--batch", type=int, help="batches of fixed size")
        command.add_argument("--user-rows", type=int, help="most rows of one user")
    for command in (epsilon, compare):
        command.add_argument("--noise", type=float, required=True, help="noise multiplier")
        command.add_argument("--plot", metavar="FILE", help="write epsilon over steps and the ROC")
    noise.add_argument("--epsilon", type=float, required=True, help="the budget")
    for command in (epsilon, noise):
        command.add_argument("--accountant", default="pld", choices=_NAMES)
    return parser


def _sampling(options: argparse.Namespace) -> Sampling | None:
    """Returns how the options say that batches are drawn."""
    given = [n for n in ("max_batch", "batch", "user_rows") if getattr(options, n) is not None]
    if len(given) > 1:
        raise ValueError(f"give at most one of --max-batch, --batch, --user-rows, got {given}")
    if (options.dataset_size is None) != (given in ([], ["user_rows"])):
        raise ValueError("--max-batch and --batch need --dataset-size, and nothing else does")
    if options.user_rows is not None:
        return UserRows(options.user_rows)
    if not given:
        return None
    if options.max_batch is not None:
        return TruncatedPoisson(options.dataset_size, options.max_batch)
    return FixedSize(options.dataset_size, options.batch)


def _book(name: str, options: argparse.Namespace, steps: int | None = None) -> IAccountant:
    """Returns an accountant of the run that the options describe."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the table says that "gdp" approximates
        book = create_accountant(name)
    sampling = _sampling(options)
    count = options.steps if steps is None else steps
    entry: list[Any] = [options.noise, options.rate, count]
    history = [entry if sampling is None else [*entry, sampling.to_dict()]]
    book.load_state_dict({"history": history, "mechanism": name})
    return book


def _epsilon(options: argparse.Namespace) -> None:
    epsilon = _book(options.accountant, options).get_epsilon(options.delta)
    print(f"epsilon = {_up(epsilon)} at delta = {options.delta:g} ({options.accountant})")
    if options.plot:
        _plot(options, [options.accountant])


def _noise(options: argparse.Namespace) -> None:
    sigma = get_noise_multiplier(
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        sample_rate=options.rate,
        steps=options.steps,
        accountant=options.accountant,
        sampling=_sampling(options),
    )
    print(
        f"noise multiplier = {sigma!r} for epsilon = {options.epsilon:g} at "
        f"delta = {options.delta:g} ({options.accountant})"
    )


def _compare(options: argparse.Namespace) -> None:
    names = _NAMES if _sampling(options) is None else ("pld",)
    for name in names:
        epsilon = _book(name, options).get_epsilon(options.delta)
        note = "  (approximation, can be too low)" if name == "gdp" else ""
        print(f"{name:4} epsilon = {_up(epsilon)}{note}")
    book = _book("pld", options)
    print(f"pld  mu of Gaussian DP = {_up(gaussian_mu(book))} (deltas from 1e-9)")
    for rate, bound in zip(_RATES, max_true_positive_rate(book, _RATES), strict=True):
        print(f"pld  true positive rate at false positive rate {rate:g}: at most {_up(bound)}")
    if options.plot:
        _plot(options, names)


def _up(value: float) -> str:
    """Returns five digits of a bound that is rounded up, as a bound must be."""
    text = f"{value:.5g}"
    return text if float(text) >= value else f"{value * (1.0 + 5e-5):.5g}"


def _plot(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Draws epsilon over steps, and the true over the false positive rate."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = sorted({max(1, options.steps * i // 12) for i in range(1, 13)})
    for name in names:
        values = [_book(name, options, steps).get_epsilon(options.delta) for steps in counts]
        left.plot(counts, values, label=name)
    left.set(xlabel="steps", ylabel=f"epsilon at delta = {options.delta:g}")
    left.legend()
    rates = [10 ** (-5 + 5 * i / 100) for i in range(101)]
    bounds = max_true_positive_rate(_book("pld", options), rates)
    right.loglog(rates, bounds, label="worst-case attacker (pld)")
    right.loglog(rates, rates, linestyle=":", label="guessing")
    right.set(xlabel="false positive rate", ylabel="true positive rate")
    right.legend()
    figure.savefig(options.plot)
    print(f"plot written to {options.plot}")


if __name__ == "__main__":
    sys.exit(main())
