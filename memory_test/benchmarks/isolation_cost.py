"""What the isolation check costs: steps with a check each, beside steps without.

    python memory_test/benchmarks/isolation_cost.py --modes ghost_bk,ghost --output out.json

A run checks its first steps, each new structure of a batch, and one step in ``interval`` (1,000)
after those. ``share`` is what that costs of a run: the time that a check adds to its step, over the
time of ``interval`` steps. On a GPU the model has the shape of Llama-3.2-1B, on a CPU a small one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.schema import head, versions

WARM, STEPS = 4, 7
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
LARGE = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 128256,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each mode and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default="hooks,ghost,ghost_bk")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    rows = [measure(mode, args.batch, args.tokens) for mode in args.modes.split(",")]
    for row in rows:
        print(json.dumps(row))
    if args.output:
        import torch

        what = "steps with an isolation check each, beside steps without; ms: medians of 7 after 4"
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        args.output.write_text(
            json.dumps({**head(what, card, versions()), "isolation": rows}, indent=1)
        )


def measure(mode: str, batch: int, tokens: int) -> dict[str, Any]:
    """Medians of both kinds of steps of one mode."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from opacus import PrivacyEngine

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    sizes = LARGE if cuda else SMALL
    config = LlamaConfig(
        **sizes,
        intermediate_size=4 * sizes["hidden_size"],
        num_key_value_heads=sizes["num_attention_heads"] // 4,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if cuda else torch.float32)
    vocab = sizes["vocab_size"]
    made = PrivacyEngine().make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-5),
        data_loader=DataLoader(TensorDataset(torch.zeros(8 * batch)), batch_size=batch),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        poisson_sampling=False,
    )
    private, optimizer = made[0], made[1]
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()

    def step() -> float:
        ids = torch.randint(vocab, (batch, tokens), device=device)
        optimizer.zero_grad(set_to_none=True)
        start = time.perf_counter()
        logits = private(input_ids=ids).logits[:, :-1]
        if len(made) == 4:
            shape = (batch, tokens - 1, vocab)
            flat = logits.reshape(-1, vocab), ids[:, 1:].reshape(-1)
            losses = criterion(*flat, shape=shape)
        else:
            losses = criterion(logits.transpose(1, 2), ids[:, 1:])
        losses.backward()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    interval = private.isolation.interval
    ms = {}
    for name, every in (("without", 10**9), ("with", 1)):
        private.isolation.interval = every
        for _ in range(WARM):
            step()
        ms[name] = statistics.median(step() for _ in range(STEPS))
    share = (ms["with"] - ms["without"]) / (interval * ms["without"])
    return {"mode": mode, "batch": batch, "tokens": tokens, "ms": ms, "share": share}


if __name__ == "__main__":
    main()
