"""Trains a small transformer on texts with differential privacy, on any number of processes.

    torchrun --nproc_per_node=2 examples/train_text_fsdp.py --task classify --epsilon 8
    python examples/train_text_fsdp.py --task lm --data letters.txt --grad-sample-mode ghost

`--help` lists the options; README.md beside this file explains them and the output.

A row of the data is the privacy unit. At the end a table compares the private model with the same
model trained without privacy and with a guess that needs no model.

The guarantee covers the model and what is computed from it alone. Training losses, the baselines
and scores on the test rows are looks at the data that it does not cover.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from launching import is_launched, launch
from models import SampleCrossEntropy
from options import check_options, check_resumed, newest, parse_arguments, shared_settings
from problem import Problem, load_problem, new_model, new_optimizer
from reporting import Reporter, table
from runtime import Runtime, running
from saving import full_state, save_and_show
from steps import AfterStep
from stopping import Stopped, StopRequest, short_errors
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader
from training import evaluate, private_epoch, simple_baseline, train_without_privacy

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.distributed_checkpoint import Checkpointer, read_extra
from opacus.utils.fsdp_utils import FSDP2Wrapper

SCRIPT = "train_text_fsdp.py"


@dataclass(frozen=True)
class Private:
    """What ``make_private`` gives, the engine that counts, and what saves them, if anything."""

    engine: PrivacyEngine
    model: Any
    optimizer: Any
    criterion: Any
    loader: DataLoader[Any]
    checkpoints: Checkpointer | None = None


# --- preparation: nothing is written, and what can be refused is ---


def prepare(args: argparse.Namespace) -> tuple[Problem, nn.Module]:
    """Check the options, read data and model; before there are a process group and files."""
    check_options(args)
    problem = load_problem(args)
    if args.resume is not None:
        check_resumed(args.resume, settings_in(args.resume), own_settings(args, problem))
    return problem, new_model(args, problem)


def make_private(
    args: argparse.Namespace, problem: Problem, runtime: Runtime, model: nn.Module
) -> Private:
    """Distribute the model and make its training private."""
    model = model.to(runtime.device)
    sharded = args.grad_sample_mode == "auto" and runtime.world_size > 1
    if sharded or "fsdp" in args.grad_sample_mode:
        model = FSDP2Wrapper(model)
    elif runtime.world_size > 1:
        model = DifferentiallyPrivateDistributedDataParallel(model)
    criterion = SampleCrossEntropy()
    engine = PrivacyEngine(secure_mode=args.secure_mode)
    with plain_epsilon_error(args):
        made = engine.make_private_with_epsilon(
            module=model,
            optimizer=new_optimizer(args, model),
            criterion=criterion,
            data_loader=DataLoader(
                problem.train, args.batch_size, shuffle=True, collate_fn=problem.task.collate
            ),
            target_epsilon=args.epsilon,
            target_delta=args.delta,
            epochs=args.epochs,
            max_grad_norm=args.max_grad_norm,
            grad_sample_mode=args.grad_sample_mode,
            **({} if args.deferred is None else {"deferred_norm": args.deferred}),
        )
    if len(made) == 3:  # modes that leave the criterion alone do not return it
        made = (*made[:2], criterion, made[2])
    return Private(engine, *made)


@contextlib.contextmanager
def plain_epsilon_error(args: argparse.Namespace) -> Iterator[None]:
    """Say in terms of options that no noise is enough for ``--epsilon``."""
    try:
        yield
    except ValueError as error:
        if "is too low" not in str(error):
            raise
        raise ValueError(
            f"--epsilon {args.epsilon:g}: no noise is enough for so little; raise --epsilon or "
            "--delta, or lower --epochs or --batch-size"
        ) from error


def own_settings(args: argparse.Namespace, problem: Problem) -> dict[str, Any]:
    """What a checkpoint keeps of this run, to be compared when it is resumed."""
    return shared_settings(args, len(problem.train))


def settings_in(path: str) -> dict[str, Any]:
    """The settings that a checkpoint keeps; its tensors are not read.

    Raises:
        ValueError: It is not a checkpoint of this script.
    """
    try:
        return read_extra(path)["settings"]
    except (ValueError, LookupError) as error:
        raise ValueError(f"--resume {path}: not a checkpoint of this script; {error}") from error


def with_checkpoints(args: argparse.Namespace, private: Private) -> tuple[Private, int]:
    """Be able to save, and go on where ``--resume`` says; the number of epochs behind it."""
    if args.checkpoint is None and args.resume is None:
        return private, 0
    checkpoints = Checkpointer(
        args.checkpoint or args.resume,
        engine=private.engine,
        module=private.model,
        optimizer=private.optimizer,
        data_loader=private.loader,
    )
    private = replace(private, checkpoints=checkpoints)
    if args.resume is None:
        return private, 0
    return private, checkpoints.load(newest(args.resume)).epoch


def seed_run(seed: int, repeatable: bool) -> None:
    """Seed dropout, and with a seed that was asked for sampling and noise, too.

    Runs whose seeds differ by one have unrelated draws.
    """
    os.environ["OPACUS_REPRODUCIBLE"] = str(int(repeatable))
    digest = hashlib.sha256(str(seed).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))


# --- training and report ---


def train(
    args: argparse.Namespace,
    problem: Problem,
    private: Private,
    *,
    runtime: Runtime,
    reporter: Reporter,
    stop: StopRequest,
    finished: int,
) -> None:
    """The epochs that are left, with a line and a checkpoint after each."""
    epsilon = partial(private.engine.get_epsilon, args.delta)
    extra = {"settings": own_settings(args, problem)}
    checkpoints = private.checkpoints if args.checkpoint else None
    after_step = AfterStep(
        args, private, runtime=runtime, reporter=reporter, stop=stop, extra=extra
    )
    for epoch in range(finished + 1, args.epochs + 1):
        meter = private_epoch(
            private.model,
            private.optimizer,
            private.criterion,
            private.loader,
            runtime=runtime,
            reporter=reporter,
            physical_batch=args.max_physical_batch_size,
            epsilon=epsilon,
            after_step=after_step,
            title=f"epoch {epoch}/{args.epochs}",
        )
        loss, speed = meter.totals(runtime)
        score = test_score(args, problem, private.model, runtime)
        reporter.say(
            f"epoch {epoch}/{args.epochs}  loss {loss:.3f}  test {shown(args, score)}  "
            f"epsilon {epsilon():.2f}  {speed:,.0f} tokens/s"
        )
        step = len(private.engine.accountant)
        reporter.curves(step, test=score, tokens_per_second=speed, epsilon=epsilon())
        if checkpoints is not None:
            checkpoints.save(epoch_ended=True, extra=extra)


def test_score(
    args: argparse.Namespace, problem: Problem, model: nn.Module, runtime: Runtime
) -> float:
    """Accuracy or perplexity on the test split."""
    return evaluate(model, problem.test, problem.task, runtime, args.max_physical_batch_size)


def baseline_score(
    args: argparse.Namespace, problem: Problem, runtime: Runtime, reporter: Reporter
) -> float:
    """Test score of the same model, trained as long without privacy."""
    model = new_model(args, problem).to(runtime.device)
    if runtime.world_size > 1:
        model = FSDP2Wrapper(model)
    train_without_privacy(
        model,
        new_optimizer(args, model),
        problem.train,
        problem.task,
        runtime=runtime,
        reporter=reporter,
        batch_size=args.batch_size,
        physical_batch=args.max_physical_batch_size,
        epochs=args.epochs,
    )
    return test_score(args, problem, model, runtime)


def shown(args: argparse.Namespace, score: float) -> str:
    """A score as text."""
    return f"accuracy {score:.1%}" if args.task == "classify" else f"perplexity {score:.2f}"


def report(
    args: argparse.Namespace,
    problem: Problem,
    private: Private,
    *,
    runtime: Runtime,
    reporter: Reporter,
) -> None:
    """The closing table."""
    score = test_score(args, problem, private.model, runtime)
    spent = private.engine.get_epsilon(args.delta)
    if args.save is not None:
        state = full_state(private.model)
        if runtime.is_main:
            model = new_model(args, problem)
            model.load_state_dict(state)
            reporter.say("\n" + save_and_show(args, problem, model, spent))
    guess = {"classify": "majority class", "lm": "token frequencies"}[args.task]
    vocab_size = problem.tokenizer.vocab_size
    simple = simple_baseline(problem.task, problem.train, problem.test, vocab_size)
    rows = [("private", shown(args, score), f"{spent:.2f}", f"{args.delta:.1e}")]
    if args.baseline:
        open_score = baseline_score(args, problem, runtime, reporter)
        rows.append(("not private", shown(args, open_score), "unbounded", ""))
    rows.append((guess, shown(args, simple), "", ""))
    reporter.say("\n" + table(("", "test", "epsilon", "delta"), rows))
    reporter.say(f"\nThe private model is ({spent:.2f}, {args.delta:.1e})-differentially private.")


def mode_of(args: argparse.Namespace, private: Private) -> str:
    """The mode, and which one ``auto`` has chosen."""
    choice = getattr(private.model, "auto_choice", None)
    return args.grad_sample_mode if choice is None else f"auto ({choice.mode})"


def run(
    args: argparse.Namespace, problem: Problem, private: Private, runtime: Runtime, finished: int
) -> None:
    """Train and report."""
    reporter = Reporter(runtime, args.logdir)
    sizes = [(p.numel(), p.requires_grad) for p in private.model.parameters()]
    total, trained = sum(n for n, _ in sizes), sum(n for n, grad in sizes if grad)
    reporter.say(
        f"{len(problem.train)} training rows, {len(problem.test)} test rows; "
        f"{trained:,} of {total:,} parameters trained; "
        f"{runtime.world_size} process{'es' * (runtime.world_size > 1)} on {runtime.device.type}; "
        f"{mode_of(args, private)}; noise multiplier {private.optimizer.noise_multiplier:.3f}"
    )
    if args.tokenizer == "bpe":
        reporter.say("warning: the vocabulary of --tokenizer bpe is learned without privacy")
    stop = StopRequest(runtime)
    try:
        with stop.listening():
            train(
                args,
                problem,
                private,
                runtime=runtime,
                reporter=reporter,
                stop=stop,
                finished=finished,
            )
    except Stopped as end:
        reporter.close()
        reporter.say(f"\n{end}")
        sys.exit(130)
    report(args, problem, private, runtime=runtime, reporter=reporter)
    reporter.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example with these options."""
    args = parse_arguments(argv)
    if args.processes and not is_launched():
        with short_errors(SCRIPT):
            check_options(args)  # before processes start
        launch(args.processes, sys.argv[1:])
    with short_errors(SCRIPT):
        problem, model = prepare(args)
    with running(args.device) as runtime, short_errors(SCRIPT):
        seed_run(runtime.shared_seed(args.seed), repeatable=args.seed is not None)
        private = make_private(args, problem, runtime, model)
        private, finished = with_checkpoints(args, private)
        run(args, problem, private, runtime, finished)


if __name__ == "__main__":
    record(main)()  # torchrun's closing report names the error
