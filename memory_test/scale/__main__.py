"""Prints what a training run will need: ``python -m memory_test.scale --help``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from memory_test.scale.prediction import Prediction, predict
from memory_test.scale.rates import rates_of, read
from memory_test.scale.run import MODES, OPTIMIZERS, Run
from memory_test.scale.shapes import SHAPES, shape_of


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m memory_test.scale",
        description="Memory of a rank and time of a step, predicted from measured rates.",
    )
    add = parser.add_argument
    add("--model", required=True, choices=SHAPES, help="untied head")
    add("--gpus", type=int, required=True, help="number of ranks")
    add("--seq", type=int, required=True, help="tokens of a sample")
    add("--batch", type=int, default=1, help="samples of a rank")
    add("--mode", choices=MODES, default="ghost_fsdp_bk")
    add("--card", choices=tuple(read()), default="h100")
    add("--checkpointing", action="store_true", help="activation checkpointing of blocks")
    add("--deferred", action="store_true", help="deferred norms")
    add("--shard", type=int, help="ranks of one replica (HSDP); default: all")
    add("--optimizer", choices=OPTIMIZERS, default="sgd")
    add("--node", type=int, default=8, help="GPUs of one host")
    add("--drop-logits", action="store_true",
        help="the loop lets go of the model's output before the backward pass")  # fmt: skip
    add("--json", action="store_true")
    return parser.parse_args(argv)


def text(prediction: Prediction, card: str) -> str:
    """For people."""
    run, found = prediction.run, prediction.record()
    fits = "fits" if prediction.fits else "DOES NOT FIT"
    lines = [
        f"{run.mode}, {run.gpus} x {card}, {run.batch} x {run.tokens} tokens a rank, "
        f"{run.shape.parameters / 1e9:.2f}B parameters",
        f"step      {found['step_ms']:,.0f} ms ({found['time_ratio']:.2f} x non-private), "
        f"bound by {found['bound_by']}",
        *(f"  {name:<14} {value:12,.1f} ms" for name, value in found["device_ms"].items()),
        f"  {'(host)':<14} {found['host_ms']:12,.1f} ms",
        f"peak      {found['peak_gb']:,.1f} of {found['capacity_gb']:.0f} GiB, {fits} "
        f"({found['memory_ratio']:.2f} x non-private), at: {found['peak_when']}",
        *(f"  {name:<14} {value:12,.1f} GiB" for name, value in found["moments_gb"].items()),
        f"  {'(state)':<14} {found['state_gb']:12,.1f} GiB",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a prediction; the exit status."""
    args = parse(argv)
    try:
        run = Run(
            shape=shape_of(args.model),
            gpus=args.gpus,
            tokens=args.seq,
            batch=args.batch,
            mode=args.mode,
            checkpointing=args.checkpointing,
            deferred=args.deferred,
            shard=args.shard,
            optimizer=args.optimizer,
            node=args.node,
            holds_logits=not args.drop_logits,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    prediction = predict(run, rates_of(args.card))
    print(json.dumps(prediction.record()) if args.json else text(prediction, args.card))
    return 0


if __name__ == "__main__":
    sys.exit(main())
