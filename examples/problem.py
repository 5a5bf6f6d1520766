"""What is to be learned: the data as token numbers, and the model before it is trained."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from arguments import check_against_data
from models import build_model, local_folder
from options import choose_tokenizer
from text_data import Columns, Label, load_text
from tokenizer import Tokenizer, make_tokenizer
from torch import nn
from training import EncodedTexts, Task


@dataclass(frozen=True)
class Problem:
    """The data as token numbers, and what is to be learned from it."""

    task: Task
    tokenizer: Tokenizer
    classes: list[Label]
    train: EncodedTexts
    test: EncodedTexts


def load_problem(args: argparse.Namespace) -> Problem:
    """Read the data and tokenise it.

    Raises:
        ValueError: The data, or an option that does not fit them.
    """
    args.tokenizer = choose_tokenizer(args)
    columns = Columns(args.text_column, args.label_column)
    splits = load_text(args.data, task=args.task, columns=columns, test_path=args.test_data)
    check_against_data(args, len(splits.train))
    tokenizer = make_tokenizer(args.tokenizer, splits.train.plain, local_folder(args.model))
    problem = Problem(
        task=Task.of(args.task, tokenizer.pad),
        tokenizer=tokenizer,
        classes=splits.classes,
        train=EncodedTexts(splits.train, tokenizer, args.seq_length),
        test=EncodedTexts(splits.test, tokenizer, args.seq_length),
    )
    if args.task == "lm":
        for name, data in (("training", problem.train), ("test", problem.test)):
            if data.without_targets == len(data):
                raise ValueError(
                    f"--seq-length {args.seq_length}: no answer begins within so many tokens in "
                    f"any of the {len(data)} {name} rows; raise it"
                )
    return problem


def new_model(args: argparse.Namespace, problem: Problem) -> nn.Module:
    """A model with the same weights on all processes. They are no secret, unlike the noise."""
    torch.manual_seed(args.seed or 0)
    return build_model(
        args.model,
        task=args.task,
        vocab_size=problem.tokenizer.vocab_size,
        classes=len(problem.classes),
        lora=args.lora,
    )


def new_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of what is trained, for the private run and the baseline."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)
