"""What per-sample norms cost: the local computation, the reduction over ranks, and both.

    python benchmark_norm_parallel.py                                   # processes by itself
    torchrun --nproc_per_node=2 benchmark_norm_parallel.py --model-name llama3-1b --seq-length 4096

Random activations and backprops stand for those of the linear layers of a model. Layouts:

* sharded: each rank has its own samples. It computes all layers of them; their norms are then
  complete. Nothing need be reduced to clip; the all-gather, for monitoring, is timed.
* replicated: all ranks have all samples. Each computes its share of the layers; an all-reduce
  adds the squares up.

The replicated sum is compared with one rank that computes everything before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from memory_test.common.failures import UsageError, describe
from memory_test.common.launch import (
    Runtime,
    count_processes,
    exit_status,
    is_started,
    leave,
    run_in_processes,
    run_test,
)
from memory_test.common.results import prepare_folder, write_json


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model-name", help="a built-in shape; default: llama3-1b on GPUs, else small")
    add("--seq-length", type=int, nargs="+", help="default: 1024 4096 on GPUs, else 128")
    add("--batch-size", type=int, default=1, help="samples of a process")
    add("--num-iter", type=int, default=10)
    add(
        "--layouts", nargs="+", choices=("sharded", "replicated"), default=["sharded", "replicated"]
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--backends", nargs="+", choices=("gloo", "nccl"), help="default: those of the device")
    add("--num-processes", type=int, help="default: one a GPU, 2 without GPUs")
    add("--output", type=Path, help="JSON file")
    add("--timeout", type=float, default=900.0)
    return parser.parse_args(argv)


def benchmark(args: argparse.Namespace, runtime: Runtime) -> bool:
    """Measure; whether the sums were right. A collective call."""
    from memory_test.common import norm_cost
    from memory_test.common.comparison import table
    from memory_test.common.experiment import description

    cuda = runtime.device.type == "cuda"
    name = args.model_name or ("llama3-1b" if cuda else "small")
    layers = norm_cost.linear_layers(name)
    backends = args.backends or (["nccl", "gloo"] if cuda else ["gloo"])
    if "nccl" in backends and not cuda:
        raise UsageError("--backends nccl needs GPUs")
    rows = []
    for length in args.seq_length or ([1024, 4096] if cuda else [128]):
        for layout in args.layouts:
            case = norm_cost.Case(layers, length, args.batch_size, layout, runtime)
            for backend in backends:
                rows.append(norm_cost.measure(case, backend, args.num_iter))
    if runtime.is_main:
        print(f"{len(layers)} linear layers, {args.batch_size} samples a process, "
              f"{runtime.world_size} processes on {runtime.device.type}; ms, median")  # fmt: skip
        print(table(norm_cost.HEADER, [norm_cost.cells(row) for row in rows]))
        if args.output is not None:
            about = {"model": name, "batch_size": args.batch_size, **description(runtime)}
            write_json(args.output, {"kind": "norms", **about, "rows": rows})
    return all(row["error"] <= 1e-2 if cuda else row["error"] <= 1e-5 for row in rows)


def work(args: argparse.Namespace) -> int:
    """One process."""
    return run_test(
        args.device,
        args.timeout,
        lambda runtime: benchmark(args, runtime),
        lambda right: (
            "the norms of the layouts are those of one rank"
            if right
            else "the norms of the layouts DIFFER from those of one rank"
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args = parse(argv)
    try:
        if args.output is not None:
            prepare_folder(args.output)
        if is_started():
            return work(args)
        count = count_processes(args.num_processes, args.device, spread=True)
        given = sys.argv[1:] if argv is None else argv
        return run_in_processes(__file__, given, count, args.timeout)
    except UsageError as error:
        return exit_status(describe(error))


if __name__ == "__main__":
    leave(main())
