"""Which optimizer, clipping and noise learn most at equal epsilon, on small tasks.

    python memory_test/utility/lab.py --output memory_test/results/NAME.json

Each contender takes its best learning rate on seed 0, which the others' seeds do not see; then
it runs with the seeds 1 to 5. Three rates are tried, and further ones while the best is the
smallest or largest of them. Test accuracies of all runs are written, and a table is printed.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.utils.data import DataLoader

from memory_test.common.results import write_json
from memory_test.common.schema import head, versions
from memory_test.utility.contenders import CONTENDERS, Contender
from memory_test.utility.data import Task, reviews
from memory_test.utility.language_model import language_model
from opacus import CorrelatedNoise, PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier

WHAT = (
    "test accuracy of optimizers, clippings and noises at equal epsilon; the learning rate is the "
    "best on another seed, of three and of further ones while the best is at their end"
)
BANDS = 16
_MOST_TRIED = 6  # learning rates


def train(name: str, lr: float, seed: int, task: Task, args: Any) -> dict[str, float]:
    """One run: its test accuracy, noise multiplier and epsilon."""
    torch.manual_seed(seed)
    chosen = CONTENDERS[name]
    model: Any = task.model().to(task.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = chosen.make(parameters, lr)
    loader: Any = DataLoader(task.train, args.batch_size, shuffle=chosen.clipping is None)
    criterion: Any = nn.CrossEntropyLoss()
    engine = PrivacyEngine(accountant=args.accountant)
    sigma = 0.0
    if chosen.clipping is not None:
        how = _noise(chosen, len(loader), args)
        sigma = how["noise_multiplier"]
        made: Any = engine.make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            clipping=chosen.clipping,
            max_grad_norm=_norms(chosen, len(parameters)),
            noise_generator=torch.Generator().manual_seed(seed),
            grad_sample_mode="hooks" if chosen.clipping == "per_layer" else "ghost_bk",
            **how,
        )
        model, optimizer, loader = made[0], made[1], made[-1]
        criterion = made[2] if len(made) == 4 else criterion
    for _ in range(args.epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            criterion(model(inputs.to(task.device)), labels.to(task.device)).backward()
            optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()  # DiSK's parameters are a point ahead while it trains
    model.eval()
    inputs, labels = task.test.tensors
    with torch.no_grad():
        found = [model(part.to(task.device)).argmax(1).cpu() for part in inputs.split(512)]
    right = (torch.cat(found) == labels).float().mean()
    spent = engine.get_epsilon(args.delta) if chosen.clipping is not None else 0.0
    return {"accuracy": float(right), "noise_multiplier": sigma, "epsilon": spent}


def _norms(chosen: Contender, parameters: int) -> Any:
    """C, shared out evenly if it is one for each parameter."""
    if chosen.clipping != "per_layer":
        return chosen.max_grad_norm
    return [chosen.max_grad_norm / parameters**0.5] * parameters


def _noise(chosen: Contender, batches: int, args: Any) -> dict[str, Any]:
    """Arguments that spend the budget: with Poisson sampling, or correlated without it."""
    budget = (args.epsilon, args.delta, args.accountant)
    steps = args.epochs * batches
    if chosen.noise == "correlated":
        noise = _correlated(min(BANDS, batches), steps, batches)
        return {"noise_multiplier": _sigma(*budget, 1.0, 1), "correlated_noise": noise}
    return {"noise_multiplier": _sigma(*budget, 1 / batches, steps)}


@functools.cache
def _correlated(bands: int, steps: int, batches: int) -> CorrelatedNoise:
    return CorrelatedNoise.optimised(bands, steps=steps, separation=batches)


@functools.cache
def _sigma(epsilon: float, delta: float, accountant: str, rate: float, steps: int) -> float:
    return get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=delta,
        accountant=accountant,
        sample_rate=rate,
        steps=steps,
    )


def _best_rate(score_of: Callable[[float], float], lrs: Sequence[float]) -> dict[float, float]:
    """Scores of the rates, and of further ones while the best of them is at an end."""
    tried = {lr: score_of(lr) for lr in lrs}
    while 1 < len(tried) < _MOST_TRIED:
        known = sorted(tried)
        best = max(known, key=lambda lr: tried[lr])
        if best not in (known[0], known[-1]):
            break
        lr = best * best / (known[1] if best == known[0] else known[-2])
        tried[lr] = score_of(lr)
    return tried


def _set_up(counter: Any) -> None:
    """In each process: one thread, and a card of its own turn."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    if torch.cuda.is_available():
        with counter.get_lock():
            torch.cuda.set_device(counter.value % torch.cuda.device_count())
            counter.value += 1


def row(job: tuple[str, str, Task, Any]) -> dict[str, Any]:
    """A row of the results: a contender on a task."""
    name, task_name, task, args = job
    chosen, start = CONTENDERS[name], time.perf_counter()
    tried = _best_rate(lambda lr: train(name, lr, 0, task, args)["accuracy"], chosen.lrs)
    lr = max(tried, key=lambda each: tried[each])
    runs = [train(name, lr, seed, task, args) for seed in range(1, args.seeds + 1)]
    scores = [run["accuracy"] for run in runs]
    return {
        "task": task_name,
        "contender": name,
        "optimizer": chosen.optimizer,
        "clipping": chosen.clipping or "none",
        "noise": chosen.noise if chosen.clipping else "none",
        "max_grad_norm": chosen.max_grad_norm,
        "noise_multiplier": runs[0]["noise_multiplier"],
        "epsilon": runs[0]["epsilon"],
        "delta": args.delta,
        "steps": args.epochs * -(-len(task.train) // args.batch_size),
        "lr": lr,
        "tried": {str(each): score for each, score in tried.items()},
        "accuracies": scores,
        "mean": statistics.fmean(scores),
        "sd": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "seconds": time.perf_counter() - start,
    }


def _rows(jobs: list[tuple[str, str, Task, Any]], processes: int) -> Iterator[dict[str, Any]]:
    """Rows, each as soon as it is there."""
    context = multiprocessing.get_context("spawn")
    counter = context.Value("i", 0)
    if processes <= 1:
        _set_up(counter)
        yield from map(row, jobs)
        return
    with context.Pool(processes, _set_up, (counter,)) as pool:
        yield from pool.imap_unordered(row, jobs, chunksize=1)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run all, write and print them."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, help="result file")
    add("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--model", help="folder of a language model: LoRA of it is a second task")
    add("--device", default="cpu", help="where that model is trained; words are on the CPU")
    add("--no-words", action="store_true", help="of the second task alone")
    add("--rows", type=int, help="reviews, instead of all")
    add("--epsilon", type=float, default=3.0)
    add("--delta", type=float, default=1e-5)
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=512)
    add("--accountant", default="pld")
    add("--seeds", type=int, default=5)
    add("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    tasks = {} if args.no_words else {"reviews": reviews(args.rows)}
    if args.model:
        name = f"reviews, LoRA of {Path(args.model).name}"
        tasks[name] = language_model(args.model, args.rows, args.device)
    jobs = [(name, label, task, args) for label, task in tasks.items() for name in args.only]
    setting = {
        k: getattr(args, k) for k in ("epsilon", "delta", "epochs", "batch_size", "accountant")
    }
    device = torch.cuda.get_device_name() if args.device != "cpu" else ""
    rows: list[dict[str, Any]] = []
    for found in _rows(jobs, args.jobs):
        rows.append(found)
        rows.sort(
            key=lambda one: (list(tasks).index(one["task"]), args.only.index(one["contender"]))
        )
        print(
            f"{found['task'][:24]:24} {found['contender']:22} {found['mean']:.1%} "
            f"+- {found['sd']:.1%}  noise {found['noise_multiplier']:.2f}  lr {found['lr']:g}",
            flush=True,
        )
        if args.output is not None:
            whole = {**head(WHAT, device, versions()), "setting": setting, "utility": rows}
            write_json(args.output, whole)
    return rows


if __name__ == "__main__":
    main()
