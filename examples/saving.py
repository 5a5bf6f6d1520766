"""Takes a trained model out: in the format of ``transformers``, loaded back, and shown at work."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from conversations import Conversation, as_text, encode_turns, prompt_of
from models import TextClassifier, quiet
from problem import Problem
from text_data import Text
from tokenizer import OfModel, Tokenizer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

ABOUT = "train_text.json"
HEAD = "classifier_head.pt"


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights under the plain model's names (a collective call).

    Args:
        model: Private or not; sharded, replicated or neither.

    Returns:
        On the CPU of the main process; of a sharded model the others get nothing.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    return {name.removeprefix("_module."): value for name, value in state.items()}


def save_language_model(model: Any, folder: Path) -> Any:
    """Save a language model so that ``from_pretrained(folder)`` loads it; adapters merged in it.

    Args:
        model: A model of ``transformers``, or of PEFT; adapters are merged in place.
        folder: Adapters alone go to its part ``adapters``.

    Returns:
        The model as it was loaded back from the folder.
    """
    from transformers import AutoModelForCausalLM

    with quiet():
        plain(model, folder).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def save_and_show(
    args: argparse.Namespace, problem: Problem, model: nn.Module, spent: float
) -> str:
    """Save the model, load it back, and say what the loaded one makes of a test row.

    Args:
        args: Options; the model goes to ``args.save``.
        problem: Data and tokenizer.
        model: A trained model, not sharded.
        spent: Epsilon, which is written beside the model.
    """
    folder = Path(args.save)
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "task": args.task,
        "classes": problem.classes,
        "tokenizer": args.tokenizer,
        "seq_length": args.seq_length,
        "epsilon": spent,
        "delta": args.delta,
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if isinstance(problem.tokenizer, OfModel):
        problem.tokenizer.model.save_pretrained(folder)
    elif args.tokenizer == "bpe":
        problem.tokenizer.save(folder)
    example = problem.test.texts.texts[0]
    if args.task == "lm":
        loaded = save_language_model(model.model, folder)
        shown = _continued(loaded, problem.tokenizer, example)
    else:
        loaded = save_classifier(model, folder)
        shown = _classified(loaded, problem, example)
    return f"saved in {folder}; loaded from there it says:\n{shown}"


def _continued(model: Any, tokenizer: Tokenizer, example: Text) -> str:
    if isinstance(example, str):
        start = example[: max(1, min(40, len(example) // 2))]
        before = start
    else:
        start = prompt_of(example)
        before = as_text(start)[-200:]
    return f"  {before!r}\n  -> {greedy(model, tokenizer, start, 32)!r}"


@torch.no_grad()
def _classified(model: nn.Module, problem: Problem, example: Text) -> str:
    tokens, mask, _ = problem.task.collate([problem.test[0]])
    chances = model(tokens, mask)[0].softmax(0)
    best = int(chances.argmax())
    text = example if isinstance(example, str) else as_text(example)
    return f"  {text[:100]!r}\n  -> {problem.classes[best]} ({float(chances[best]):.0%} sure)"


def save_classifier(model: TextClassifier, folder: Path) -> TextClassifier:
    """Save a classifier: the transformer for ``from_pretrained``, its head beside it.

    Returns:
        The classifier as it was loaded back; see :func:`load_classifier`.
    """
    with quiet():
        plain(model.backbone, folder).save_pretrained(folder)
    torch.save(model.score.state_dict(), folder / HEAD)
    return load_classifier(folder)


def load_classifier(folder: Path) -> TextClassifier:
    """The classifier that :func:`save_classifier` saved, on the CPU."""
    from transformers import AutoModel

    head = torch.load(folder / HEAD, weights_only=True)
    with quiet():
        backbone = AutoModel.from_pretrained(folder, local_files_only=True)
    model = TextClassifier(backbone, len(head["bias"]))
    model.score.load_state_dict(head)
    return model.eval()


def plain(model: Any, folder: Path) -> Any:
    """The model without adapters: they are saved, and merged."""
    if not hasattr(model, "merge_and_unload"):
        return model
    model.save_pretrained(folder / "adapters")
    return model.merge_and_unload()


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, turns: Conversation | str, length: int) -> str:
    """What a language model writes next: the likeliest token each time, until an end mark.

    Args:
        model: A causal model of ``transformers``.
        tokenizer: Its tokenizer.
        turns: What comes before; a text is continued.
        length: Largest number of tokens.
    """
    end = tokenizer.encode("")[-1]
    if isinstance(turns, str):
        tokens = tokenizer.encode(turns)[:-1]
    else:
        tokens, _ = encode_turns(tokenizer, turns, answer_next=True)
    written: list[int] = []
    for _ in range(length):
        logits = model(input_ids=torch.tensor([tokens + written]), use_cache=False).logits
        token = int(logits[0, -1].argmax())
        if token == end:
            break
        written.append(token)
    return tokenizer.decode(written)
