"""Steps of a mixture of experts and of pictures in texts: private beside non-private, in turns.

    python memory_test/benchmarks/family_steps.py --output memory_test/results/NAME.json

Qwen3-MoE and LLaVA with random weights: all weights trained, or LoRA in ``q_proj`` and ``v_proj``.
In bf16 on a GPU; on a CPU both are tiny. One model is in memory at a time; each has the same
random batches, another each step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from memory_test.benchmarks.layouts import DataRank, adapt
from memory_test.benchmarks.made_private import make_private
from memory_test.benchmarks.step_results import ratios, spread
from memory_test.benchmarks.ways import EAGER, Way
from memory_test.common.memory import MB, peak_mb, release, reset_peak
from memory_test.common.results import write_json
from memory_test.common.schema import head, versions
from memory_test.common.timing import milliseconds

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
VOCAB = 32000 if CUDA else 128
PICTURE = VOCAB - 1  # the token that stands for a part of a picture
SIDE, PATCH = (112, 14) if CUDA else (16, 8)
LORA_RANK, ADAPTED = 16, ("q_proj", "v_proj")
WARM, ROUNDS = 5, 2


def experts() -> nn.Module:
    """A Qwen3 whose blocks have a mixture of experts."""
    sizes = {
        "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 64,
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_experts": 32,
        "num_experts_per_tok": 4, "moe_intermediate_size": 512,
    }  # fmt: skip
    tiny = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    }  # fmt: skip
    config = Qwen3MoeConfig(vocab_size=VOCAB, use_cache=False, **(sizes if CUDA else tiny))
    return Qwen3MoeForCausalLM(config)


def pictures() -> nn.Module:
    """A LLaVA: a tower that sees pictures, and a Llama that has them among its tokens."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    seeing, reading = (
        ((512, 2048, 6, 8), (1024, 2816, 12, 16)) if CUDA else ((32, 64, 1, 2), (32, 64, 2, 4))
    )
    tower = dict(zip(names, seeing, strict=True))
    text = dict(zip(names, reading, strict=True))
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=SIDE, patch_size=PATCH, **tower),
        text_config=LlamaConfig(
            vocab_size=VOCAB, num_key_value_heads=4 if CUDA else 2, use_cache=False, **text
        ),
        image_token_index=PICTURE,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {"moe": experts, "llava": pictures}


def inputs(family: str, size: tuple[int, int]) -> dict[str, Tensor]:
    """What the model is called with: random ``input_ids`` ``[B, T]``, a picture for each row."""
    ids = torch.randint(1, PICTURE, size, device=DEVICE)
    if family != "llava":
        return {"input_ids": ids}
    ids[:, 2 : 2 + (SIDE // PATCH) ** 2] = PICTURE
    pixels = torch.randn(size[0], 3, SIDE, SIDE, device=DEVICE, dtype=DTYPE)
    return {"input_ids": ids, "pixel_values": pixels}


@dataclass
class Training:
    """A model in training."""

    model: Any
    optimizer: Any
    criterion: Any
    private: bool

    def step(self, given: dict[str, Tensor]) -> None:
        """One whole training step: predict the next token."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(**given).logits[:, :-1]
        shape = {"shape": tuple(logits.shape)} if self.private else {}
        next_ids = given["input_ids"][:, 1:]
        self.criterion(logits.flatten(0, 1), next_ids.flatten(), **shape).backward()
        self.optimizer.step()


def build(row: dict[str, Any]) -> Training:
    """The model of a row, always with the same weights."""
    torch.manual_seed(0)
    with DEVICE:
        model = FAMILIES[row["model"]]().to(DTYPE).train()
    if row["trained"] == "lora":
        adapt(model, LORA_RANK, ADAPTED)
    trainable = [p for p in model.parameters() if p.requires_grad]
    made = (model, torch.optim.SGD(trainable, lr=1e-5), nn.CrossEntropyLoss())
    way = Way(row["mode"])
    if way.private:
        given = dict(zip(("module", "optimizer", "criterion"), made, strict=True))
        made = make_private(way, given, DataRank(0, 1), row["batch"], 1.0)[:3]
    return Training(*made, private=way.private)


def one_round(row: dict[str, Any], steps: int) -> None:
    """Time some steps of a row; a failure is a result too."""
    release(DEVICE)
    reset_peak(DEVICE)
    try:
        training = build(row)
        for number in range(WARM + steps):
            given = inputs(row["model"], (row["batch"], row["tokens"]))
            took = milliseconds(lambda given=given: training.step(given), DEVICE)
            if number >= WARM:
                row["times"].append(took)
        row["peak_gb"] = max(row["peak_gb"], round(peak_mb(DEVICE) * MB / 1e9, 3))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:600]


def measure(model: str, trained: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model: the non-private step, then each mode."""
    same = {"model": model, "trained": trained, "batch": args.batch, "tokens": args.tokens}
    modes = (EAGER, *args.modes.split(","))
    rows = [{**same, "mode": mode, "times": [], "peak_gb": 0.0} for mode in modes]
    for turn in range(ROUNDS):
        for row in rows if turn % 2 == 0 else reversed(rows):
            if "error" not in row:
                one_round(row, args.steps)
    for row in rows:
        times = row.pop("times")
        row["ms"] = None if "error" in row else spread(times)
        if row["ms"] and rows[0]["ms"]:
            row |= ratios(row, rows[0]["ms"], rows[0]["peak_gb"], in_turns=False)
    return rows


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """What is measured."""
    for model in args.models.split(","):
        for trained in args.trained.split(","):
            yield model, trained


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(FAMILIES))
    parser.add_argument("--trained", default="lora,all")
    parser.add_argument("--modes", default="ghost_bk")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024 if CUDA else 16)
    parser.add_argument("--steps", type=int, default=9, help=f"timed, after {WARM}; in each round")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for cell in cells(args):
        rows += measure(*cell, args)
        for row in rows[-1 - len(args.modes.split(",")) :]:
            print(row, flush=True)
    if args.output:
        what = (
            f"mixtures of experts and pictures in texts, random weights, {DTYPE}, SGD; LoRA rank "
            f"{LORA_RANK} on {' and '.join(ADAPTED)}; {ROUNDS} rounds of {args.steps} after {WARM}"
        )
        card = torch.cuda.get_device_name() if CUDA else ""
        write_json(args.output, {**head(what, card, versions()), "families": rows})


if __name__ == "__main__":
    main()
