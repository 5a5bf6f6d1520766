"""Runs a suite: cell after cell, a row for each way, the file after each cell."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from memory_test.benchmarks.cases import Cell, Suite
from memory_test.benchmarks.contenders import Recipe, plain_model
from memory_test.benchmarks.layouts import check_ranks, data_rank
from memory_test.benchmarks.step_check import Check
from memory_test.benchmarks.step_results import label, ratios, rows_of, title
from memory_test.benchmarks.step_timing import Plan, measure_cell
from memory_test.benchmarks.ways import Way
from memory_test.common.launch import Runtime
from memory_test.common.modes import resolve_mode
from memory_test.common.reference import check_folder, measure_with
from memory_test.common.results import prepare_folder, write_json
from memory_test.common.schema import head, versions

SCRIPT = Path(__file__).with_name("steps.py")
WHAT = "one whole training step: zero_grad, forward, backward, optimizer step"
UNCHECKED = {
    "small": "modes were checked on a small model, not on the cells",
    "none": "modes were not checked",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_suite(args: argparse.Namespace, suite: Suite, runtime: Runtime) -> dict[str, Any]:
    """Measure all cells; a collective call.

    Returns:
        The content of the result file, the same on all ranks but for what was timed with
        another package.

    Raises:
        UsageError: A mode, the model or the reference is not available.
    """
    check_ranks(suite, runtime.world_size)
    for way in suite.ways:
        resolve_mode(way.mode, runtime.world_size)
    if args.reference is not None:
        check_folder(args.reference)
    if args.output is not None and runtime.is_main:
        prepare_folder(args.output)
    rounds = suite.rounds if args.rounds is None else args.rounds
    plan = Plan(args.iters, args.warmup, rounds, args.checks)
    found = _head(plan, runtime)
    known: dict[Way, list[Check]] = {}
    start = time.monotonic()
    for cell in suite.cells:
        if runtime.largest([time.monotonic() - start])[0] > args.budget:
            _say(runtime, f"{suite.model} {cell}: not started, --budget {args.budget:g} s is spent")
            continue
        found["cells"].append(_cell(args, suite, cell, plan, runtime, known))
        if args.output is not None and runtime.is_main:
            write_json(args.output, found)
    return found


def _cell(
    args: argparse.Namespace, suite: Suite, cell: Cell, plan: Plan, runtime: Runtime,
    known: dict[Way, list[Check]],
) -> dict[str, Any]:  # fmt: skip
    dtype = _dtype(args.dtype, runtime.device)
    recipe = Recipe(suite, cell.tokens, cell.batch, dtype)
    baselines = () if args.other_package else suite.baselines()
    taken = measure_cell(recipe, cell, [*baselines, *suite.ways], plan, runtime, known)
    parts = data_rank(suite, runtime).count  # ranks that share layers share samples
    tokens = cell.batch * cell.tokens * parts / runtime.world_size
    rows = rows_of(taken, _package(args), tokens)
    if args.reference is not None:
        rows += _reference_rows(args, suite, cell, rows, runtime)
    described = _describe(recipe, cell)
    for row in rows:
        _say(runtime, f"{title(described)} {label(row)}: {_line(row)}")
    return {**described, "rows": rows}


def _reference_rows(
    args: argparse.Namespace, suite: Suite, cell: Cell, rows: list[dict[str, Any]],
    runtime: Runtime,
) -> list[dict[str, Any]]:  # fmt: skip
    """The same step with another opacus, by a process of its own beside each rank."""
    modes = args.reference_modes or ("ghost_fsdp" if suite.sharded else "ghost")
    arguments = [
        "--suite", args.suite, "--model", suite.model, "--cells", str(cell), "--modes", modes,
        "--wrapping", suite.wrapping, "--lora", str(suite.lora_rank), "--dtype", args.dtype,
        "--iters", str(args.reference_iters), "--warmup", "1", "--device", args.device,
        "--optimizer", suite.optimizer, "--other-package", "--checks", "none",
    ]  # fmt: skip
    arguments += ["--checkpointing"] if suite.checkpointing else []
    arguments += ["--half"] if suite.half else []
    got = measure_with(args.reference, arguments, runtime, SCRIPT)
    base = rows[0]
    found = [row for c in got.get("cells", ()) for row in c["rows"]]
    return [
        {**row, **ratios(row, base["ms"], base["peak_gb"], in_turns=False)}
        if row["status"] == base["status"] == "ok" else row
        for row in found
    ]  # fmt: skip


def _package(args: argparse.Namespace) -> str:
    if not args.other_package:
        return "this package"
    import opacus

    return f"pip opacus {opacus.__version__}"


def _dtype(name: str, device: torch.device) -> torch.dtype:
    return DTYPES[("bf16" if device.type == "cuda" else "fp32") if name == "auto" else name]


def _describe(recipe: Recipe, cell: Cell) -> dict[str, Any]:
    suite = recipe.suite
    plain, _ = plain_model(recipe, torch.device("meta"))
    sizes = [(p.numel(), p.requires_grad) for p in plain.parameters()]
    return {
        "model": suite.model,
        "parameters": sum(n for n, _ in sizes),
        "trainable_parameters": sum(n for n, trained in sizes if trained),
        "batch": cell.batch,
        "tokens": cell.tokens,
        "wrapping": suite.wrapping,
        "lora_rank": suite.lora_rank,
        "checkpointing": suite.checkpointing,
        "half": suite.half,
        "optimizer": suite.optimizer,
        "dtype": str(recipe.dtype).removeprefix("torch."),
    }


def _head(plan: Plan, runtime: Runtime) -> dict[str, Any]:
    cuda = runtime.device.type == "cuda"
    memory = torch.cuda.get_device_properties(runtime.device).total_memory if cuda else None
    name = torch.cuda.get_device_name() if cuda else ""
    return {
        **head(WHAT, name, versions(), runtime.world_size),
        "device_memory_gb": round(memory / 2**30, 1) if memory else None,
        "environment": {k: v for k, v in os.environ.items() if k.startswith("OPACUS_")},
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "plan": asdict(plan),
        **({} if plan.checks == "full" else {"unchecked": UNCHECKED[plan.checks]}),
        "cells": [],
    }


def _line(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return row["error"]
    ratio = f", {row['ratio']:.3f}x time" if "ratio" in row else ""
    memory = f", {row['memory_ratio']:.3f}x memory" if "memory_ratio" in row else ""
    like = row.get("like")
    if like and "ratio" in row and like["ratio"] != row["ratio"]:
        memory += f"; of {like['mode']} {like['ratio']:.3f}x, {like['memory_ratio']:.3f}x memory"
    low, high = row["ms"]["quartiles"]
    times = f"{row['ms']['median']:.2f} ms ({low:.2f} to {high:.2f})"
    limit = f" of {row['budget_gib']:.2f}" if "budget_gib" in row else ""
    return f"{times}{ratio}, peak {row['peak_gb']:.2f}{limit} GB{memory}"


def _say(runtime: Runtime, text: str) -> None:
    if runtime.is_main:
        print(text, flush=True)
