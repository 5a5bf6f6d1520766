"""Film reviews for SmolLM2: examples, options and settings of a training, how well it writes."""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import torch
from datasets import Dataset
from peft import LoraConfig
from text_data import Texts
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

PROMPTS = ("A bad film review:", "A good film review:")
MANY = "Film reviews:"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WARM = 3  # steps that are not timed


def option_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="what examples/smollm2.py writes")
    parser.add_argument("--batch", type=int, default=512, help="expected reviews a step")
    parser.add_argument("--rows", type=int, help="reviews to train on; default: all")
    return parser


def settings() -> dict[str, Any]:
    """What `SFTConfig` has in all runs."""
    return {
        "lr_scheduler_type": "constant",
        "bf16": CUDA,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not CUDA,
    }


def adapters(rank: int) -> LoraConfig:
    """LoRA in all linear layers."""
    return LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def reviews(texts: Texts, count: int | None, join: int = 1) -> Dataset:
    """Reviews as completions of the prompt that asks for their kind.

    Args:
        texts: Reviews, labelled 0 (bad) and 1 (good).
        count: How many; ``None``: all.
        join: So many in a row are one example, of either kind, if it is above 1.
    """
    rows = list(zip(texts.plain, texts.labels, strict=True))
    random.Random(0).shuffle(rows)  # the file has good ones first
    rows = rows[:count]
    if join > 1:
        parts = [[text for text, _ in rows[i : i + join]] for i in range(0, len(rows), join)]
        return Dataset.from_list(
            [{"prompt": MANY, "completion": " " + "\n".join(p)} for p in parts]
        )
    return Dataset.from_list(
        [{"prompt": PROMPTS[label], "completion": f" {text}"} for text, label in rows]
    )


def plain(folder: str) -> Any:
    """The model in a folder, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def scored(
    model: Any, tokenizer: Any, test: Dataset, batch: int, length: int, show: bool
) -> dict[str, Any]:
    """Perplexity a token of the completions of ``test``, and a review for each prompt.

    Args:
        model: A causal model; it is moved.
        tokenizer: Its tokenizer.
        test: As :func:`reviews` gives it.
        batch: Examples at once.
        length: Tokens that are kept of each.
        show: Let it write, too.
    """
    model = model.to(DEVICE).eval()
    total = count = 0.0
    for start in range(0, len(test), batch):
        part = test[start : start + batch]
        ids, mask, labels = _encoded(tokenizer, part["prompt"], part["completion"], length)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
        )
        total, count = total + float(losses), count + int((labels[:, 1:] != -100).sum())
    return {
        "perplexity": math.exp(total / count),
        "samples": [_written(model, tokenizer, p) for p in PROMPTS] if show else [],
    }


def _encoded(
    tokenizer: Any, prompts: Sequence[str], completions: Sequence[str], length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token numbers, mask and labels, ``[B, T]`` each."""
    end, rows = tokenizer.eos_token_id, []
    for prompt, completion in zip(prompts, completions, strict=True):
        asked, answer = tokenizer(prompt)["input_ids"], tokenizer(completion)["input_ids"]
        ids = [*asked, *answer, end][:length]
        rows.append((ids, [-100] * len(asked) + ids[len(asked) :]))
    width = max(len(ids) for ids, _ in rows)
    ids, labels = (
        torch.tensor([one[i] + [fill] * (width - len(one[i])) for one in rows], device=DEVICE)
        for i, fill in ((0, end), (1, -100))
    )
    lengths = torch.tensor([len(one[0]) for one in rows], device=DEVICE)
    return ids, (torch.arange(width, device=DEVICE) < lengths[:, None]).long(), labels


def _written(model: Any, tokenizer: Any, prompt: str) -> str:
    asked = tokenizer(prompt, return_tensors="pt").to(DEVICE)
    out = model.generate(**asked, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(out[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
