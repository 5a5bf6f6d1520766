"""Takes a trained model out: in the format of ``transformers``, loaded back, and shown at work."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from conversations import Conversation, encode_turns
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


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

    plain(model, folder).save_pretrained(folder)
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def plain(model: Any, folder: Path) -> Any:
    """The model without adapters: they are saved, and merged."""
    if not hasattr(model, "merge_and_unload"):
        return model
    model.save_pretrained(folder / "adapters")
    return model.merge_and_unload()


@contextlib.contextmanager
def quiet() -> Any:
    """Without the progress bars of ``transformers``."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, turns: Conversation | str, length: int) -> str:
    """What a language model writes next: the likeliest token each time, until an end mark.

    Args:
        model: A causal model of ``transformers``.
        tokenizer: Its tokenizer.
        turns: What comes before; a text is continued.
        length: Largest number of tokens.
    """
    if isinstance(turns, str):
        end = tokenizer.encode("")[-1]
        tokens = tokenizer.encode(turns)[:-1]
    else:
        end = tokenizer.encode("")[-1]
        tokens, _ = encode_turns(tokenizer, turns, answer_next=True)
    written: list[int] = []
    for _ in range(length):
        logits = model(input_ids=torch.tensor([tokens + written]), use_cache=False).logits
        token = int(logits[0, -1].argmax())
        if token == end:
            break
        written.append(token)
    return tokenizer.decode(written)
