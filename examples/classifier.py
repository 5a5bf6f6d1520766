"""Options, training loop and report that the small examples share.

A batch is (inputs ``[B, ...]``, labels ``[B]``). With Poisson sampling B varies and may be 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from arguments import check_against_data, positive, probability, seed
from reporting import Reporter
from runtime import DEVICES, Runtime, choose_device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

# Ways to clip that need no sharded model. They give the same model, at different speed.
MODES = ("hooks", "functorch", "ew", "ghost")


@dataclass(frozen=True)
class Data:
    """Samples of both splits, (inputs, labels) each."""

    train: TensorDataset
    test: TensorDataset


@dataclass(frozen=True)
class Private:
    """What ``make_private_with_epsilon`` gives, and the engine that counts."""

    engine: PrivacyEngine
    model: nn.Module
    optimizer: Any
    criterion: Any
    loader: DataLoader[Any]


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        accuracy: Share of the test rows that are classified rightly.
        epsilon: Privacy spent, at the delta of the options.
    """

    accuracy: float
    epsilon: float


# --- options ---


def option_parser(
    description: str | None, *, modes: Sequence[str] = MODES, **defaults: Any
) -> argparse.ArgumentParser:
    """The options that all small examples have.

    Args:
        description: The script's docstring; its first paragraph is shown.
        modes: What ``--grad-sample-mode`` may be; the first is the default.
        defaults: Default of ``epsilon``, ``delta``, ``epochs``, ``batch_size`` and ``lr``.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epsilon", type=positive(float), help="privacy budget of the whole run")
    add("--delta", type=probability, help="delta of the guarantee, well below 1 / training rows")
    add("--max-grad-norm", type=positive(float), default=1.0, help="clipping norm")
    add("--epochs", type=positive(int), help="passes over the data")
    add("--batch-size", type=positive(int), help="expected samples a step")
    add("--lr", type=positive(float), help="learning rate")
    add("--grad-sample-mode", choices=modes, default=modes[0], help="how gradients are clipped")
    add("--seed", type=seed, help="repeats a run, for tests: who knows the seed knows the noise")
    add("--device", choices=DEVICES, default="auto", help="where to run")
    parser.set_defaults(**defaults)
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, data: Data) -> None:
    """Refuse options that fit neither the data nor the machine, with one line for the user."""
    try:
        choose_device(args.device)
        check_against_data(args, len(data.train))
    except ValueError as error:
        parser.error(str(error))


def alone(args: argparse.Namespace) -> Runtime:
    """The only process of a run, seeded for it."""
    runtime = Runtime(rank=0, world_size=1, device=choose_device(args.device))
    seed_run(runtime, args.seed)
    return runtime


def seed_run(runtime: Runtime, seed: int | None) -> None:
    """Seed the model and the order of data; a seed that was asked for repeats the noise, too."""
    os.environ["OPACUS_REPRODUCIBLE"] = str(int(seed is not None))
    torch.manual_seed(runtime.shared_seed(seed))


# --- training ---


def make_private(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TensorDataset,
    *,
    criterion: nn.Module | None = None,
) -> Private:
    """Plan the noise for the whole run, and make model, optimizer and loader private."""
    criterion = criterion or nn.CrossEntropyLoss()
    engine = PrivacyEngine()
    made = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=DataLoader(train, args.batch_size, shuffle=True),
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_grad_norm,
        grad_sample_mode=args.grad_sample_mode,
    )
    if len(made) == 3:  # modes that leave the criterion alone do not return it
        made = (*made[:2], criterion, made[2])
    return Private(engine, *made)


def train_classifier(
    args: argparse.Namespace, private: Private, test: TensorDataset, runtime: Runtime
) -> Outcome:
    """Train for ``args.epochs`` and report."""
    reporter = Reporter(runtime)
    reporter.say(
        f"{len(private.loader.dataset)} training rows, {len(test)} test rows; "  # type: ignore
        f"{args.grad_sample_mode}; noise multiplier {private.optimizer.noise_multiplier:.3f}"
    )
    for epoch in range(1, args.epochs + 1):
        _epoch(private, runtime, reporter, f"epoch {epoch}/{args.epochs}")
        score = accuracy(private.model, test, runtime)
        spent = private.engine.get_epsilon(args.delta)
        reporter.say(
            f"epoch {epoch:>2}/{args.epochs}  test accuracy {score:.1%}  epsilon {spent:.2f}"
        )
    return report(args, private.engine, score, reporter)


def _epoch(private: Private, runtime: Runtime, reporter: Reporter, title: str) -> None:
    for inputs, labels in reporter.progress(private.loader, len(private.loader), title):
        private.optimizer.zero_grad()
        logits = private.model(inputs.to(runtime.device))
        private.criterion(logits, labels.to(runtime.device)).backward()
        # Also for an empty batch: it is a step like any other.
        private.optimizer.step()


def accuracy(model: nn.Module, data: TensorDataset, runtime: Runtime) -> float:
    """Share of the rows that ``model`` classifies rightly."""
    inputs, labels = (tensor.to(runtime.device) for tensor in data.tensors)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = model(inputs).argmax(1) == labels
    model.train(was_training)
    return float(right.float().mean())


def report(
    args: argparse.Namespace, engine: PrivacyEngine, score: float, reporter: Reporter
) -> Outcome:
    """Say how the run ended."""
    spent = engine.get_epsilon(args.delta)
    reporter.say(f"\ntest accuracy {score:.1%} at epsilon {spent:.2f}, delta {args.delta:.1e}")
    return Outcome(score, spent)
