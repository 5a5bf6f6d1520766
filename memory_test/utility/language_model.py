"""The same reviews for a pretrained language model, of which LoRA trains the last blocks.

What is below them is frozen and computed once. Nothing new is added to the head: the model reads
a review and a question, and its scores of two words are the scores of the two classes.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memory_test.utility.data import Task, read, split

BLOCKS = 2  # that are trained
RANK = 8
_TOKENS = 24  # of a review, at most
_QUESTION = " This movie is"
_WORDS = (" bad", " good")


def language_model(folder: str, rows: int | None, device: str) -> Task:
    """The task: an input is the number of a review, whose hidden states a run's model looks up.

    Args:
        folder: of a causal language model in the format of transformers, such as SmolLM2's.
        rows: number of reviews; None for all.
        device: where the model is run and trained.
    """
    texts, labels = read(rows)
    hidden, last = _hidden(folder, texts, device)
    stored = Path(tempfile.mkdtemp()) / "hidden.pt"
    torch.save(hidden, stored)
    train, test = split(torch.stack([torch.arange(len(texts)), last], dim=1), labels)
    return Task(train, test, functools.partial(_Adapted, folder, str(stored), device), device)


def _hidden(folder: str, texts: list[str], device: str) -> tuple[Tensor, Tensor]:
    """What enters the trained blocks, ``[N, T, d]`` in bf16, and the last tokens, ``[N]``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = tokenizer(_QUESTION)["input_ids"]
    tokens = [tokenizer(text)["input_ids"][:_TOKENS] + question for text in texts]
    last = torch.tensor([len(each) - 1 for each in tokens])
    ids = torch.zeros(len(tokens), int(last.max()) + 1, dtype=torch.int64)
    for row, each in zip(ids, tokens, strict=True):
        row[: len(each)] = torch.tensor(each)
    body = _loaded(folder).model.to(device)
    body.layers = body.layers[:-BLOCKS]
    body.norm = nn.Identity()
    found = []
    with torch.no_grad():
        for part in ids.split(128):  # causal: what is padded behind a text does not reach it
            hidden = body(input_ids=part.to(device), use_cache=False).last_hidden_state
            found.append(hidden.to("cpu", torch.bfloat16))
    return torch.cat(found), last


def _loaded(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@functools.cache
def _parts(folder: str, stored: str, device: str) -> tuple[Any, Tensor, Tensor]:
    """Once in a process: the model's last blocks, two rows of its head, hidden states."""
    from transformers import AutoTokenizer

    model = _loaded(folder).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = [tokenizer(word)["input_ids"][0] for word in _WORDS]
    head = model.lm_head.weight[words].detach().clone()  # [2, d]
    body = model.model
    body.layers, body.embed_tokens = body.layers[-BLOCKS:], nn.Identity()
    return body, head, torch.load(stored, map_location=device)


class _Adapted(nn.Module):
    """The last blocks with LoRA. ``[B, 2]``, a review and its last token's place, to ``[B, 2]``."""

    hidden: Tensor
    head: Tensor

    def __init__(self, folder: str, stored: str, device: str) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        super().__init__()
        body, head, hidden = _parts(folder, stored, device)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"])
        self.body: Any = inject_adapter_in_model(config, copy.deepcopy(body))
        self.register_buffer("hidden", hidden, persistent=False)
        self.register_buffer("head", head, persistent=False)

    def forward(self, review: Tensor) -> Tensor:
        number, last = review.unbind(1)
        hidden = nn.functional.embedding(number, self.hidden.flatten(1))
        hidden = hidden.unflatten(1, self.hidden.shape[1:]).float()  # [B, T, d]
        found = self.body(inputs_embeds=hidden, use_cache=False).last_hidden_state
        places = torch.arange(hidden.shape[1], device=hidden.device)
        at = (places == last.unsqueeze(1)).unsqueeze(-1)  # [B, T, 1]
        return (found * at).sum(1) @ self.head.T
