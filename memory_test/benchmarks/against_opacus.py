"""Times hooks and ghost on one device against pip opacus 1.6.0, a process for each package.

    python memory_test/benchmarks/against_opacus.py --reference FOLDER --out result.json

FOLDER is what ``pip install --no-deps --target FOLDER opacus==1.6.0`` made. The packages take
turns, so that a busy host slows both; of each case the medians of all rounds are compared.

Page faults are counted: where glibc returns memory after each step, thousands of them are part of
the time (``opacus/core/platform/allocator.py`` sees to it that this package has none).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
MODES = ("hooks", "ghost")
WHAT = (
    "one whole step on one device; medians over rounds in which the packages take turns, a process "
    "each; time_ratio below 1: this package is faster; cpu: time on the processor, without "
    "waiting for it"
)
Batch = tuple[Tensor, Tensor]


class Recurrent(nn.Module):
    """Character LSTM, the private version that the package brings."""

    def __init__(self) -> None:
        from opacus.layers import DPLSTM

        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.lstm = DPLSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(ids))[0][:, -1])


class Transformer(nn.Module):
    """Encoder blocks from plain layers, for sequence classification."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def cnn(channels: int) -> nn.Module:
    """Convolutions with GroupNorm, for 32x32 images."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(2 * channels, 2 * channels, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * channels, 10),
    )  # fmt: skip


def mlp(width: int) -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def images(batch: int) -> Batch:
    """Random images and labels."""
    return torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))


def vectors(batch: int) -> Batch:
    """Random vectors and labels."""
    return torch.randn(batch, 784), torch.randint(0, 10, (batch,))


def words(batch: int, length: int, vocabulary: int) -> Batch:
    """Random words and labels."""
    return torch.randint(0, vocabulary, (batch, length)), torch.randint(0, 10, (batch,))


def cases(device: str) -> dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]]:
    """Model and batch of each case, larger on a GPU."""
    if device == "cpu":
        return {
            "mlp": (lambda: mlp(256), lambda: vectors(64)),
            "cnn": (lambda: cnn(16), lambda: images(32)),
            "lstm": (Recurrent, lambda: words(32, 20, 64)),
            "transformer": (lambda: Transformer(128, 2, 1000), lambda: words(8, 64, 1000)),
        }
    return {
        "mlp": (lambda: mlp(2048), lambda: vectors(256)),
        "cnn": (lambda: cnn(64), lambda: images(256)),
        "lstm": (Recurrent, lambda: words(256, 32, 64)),
        "transformer": (lambda: Transformer(1024, 8, 32000), lambda: words(16, 512, 32000)),
    }


def measure(case: str, mode: str, device: str, iterations: int) -> dict[str, Any]:
    """Median step of one case with whichever package is on the path."""
    from torch.utils.data import DataLoader, TensorDataset

    from opacus import PrivacyEngine

    torch.manual_seed(0)
    make, batch_of = cases(device)[case]
    model, (x, y) = make().to(device).train(), batch_of()
    out = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        criterion=nn.CrossEntropyLoss(),
    )
    private, optimizer = out[0], out[1]
    loss_fn = out[2] if len(out) == 4 else nn.CrossEntropyLoss()
    x, y = x.to(device), y.to(device)
    times, cpu, faults = [], [], []
    for step in range(iterations + 3):
        if step == 3 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start, cpu_start, faults_start = time.perf_counter(), time.process_time(), page_faults()
        optimizer.zero_grad(set_to_none=True)
        loss_fn(private(x), y).backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        cpu.append((time.process_time() - cpu_start) * 1e3)
        faults.append(page_faults() - faults_start)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    measured = {"ms": times[3:], "cpu_ms": cpu[3:], "page_faults": faults[3:]}
    return {**measured, "peak_mb": peak, "max_rss_mb": rss}


def page_faults() -> int:
    """Pages that this process has been given so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def in_process(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Run one measurement in a process in which ``folder`` provides opacus."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker", *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200] if done.stderr else "?"}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases and modes; the packages take turns."""
    rows = []
    folders = {"this package": ROOT, "pip opacus 1.6.0": options.reference}
    for case in options.cases or cases(options.device):
        for mode in MODES:
            arguments = [case, mode, options.device, str(options.iterations)]
            found: dict[str, list[dict[str, Any]]] = {package: [] for package in folders}
            for _ in range(options.rounds):
                for package, folder in folders.items():
                    found[package].append(in_process(folder, arguments))
            rows.append(summary(case, mode, found))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def summary(case: str, mode: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over all rounds, and the ratios to pip opacus."""
    row: dict[str, Any] = {"case": case, "mode": mode}
    medians, cpu = [], []
    for package, results in found.items():
        errors = [r["error"] for r in results if "error" in r]
        if errors:
            row[package] = {"error": errors[0]}
            continue
        times = sorted(t for r in results for t in r["ms"])
        medians.append(statistics.median(times))
        cpu.append(statistics.median(t for r in results for t in r["cpu_ms"]))
        quarter = len(times) // 4
        row[package] = {
            "median_ms": round(medians[-1], 3),
            "quartiles_ms": [round(times[quarter], 3), round(times[-quarter - 1], 3)],
            "cpu_median_ms": round(cpu[-1], 3),
            "page_faults": statistics.median(f for r in results for f in r["page_faults"]),
            "peak_mb": results[0]["peak_mb"] and round(max(r["peak_mb"] for r in results), 1),
            "max_rss_mb": round(max(r["max_rss_mb"] for r in results), 1),
        }
    if len(medians) == 2:
        row["time_ratio"] = round(medians[0] / medians[1], 3)
        row["cpu_time_ratio"] = round(cpu[0] / cpu[1], 3)
    return row


def main() -> None:
    """Compare, or, as a worker, measure once."""
    if sys.argv[1:2] == ["--worker"]:
        warnings.simplefilter("ignore")
        case, mode, device, iterations = sys.argv[2:]
        print(json.dumps(measure(case, mode, device, int(iterations))))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reference", type=Path, required=True, help="folder with pip opacus")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="*", help="by default all")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path.append(str(ROOT))
    from memory_test.common.schema import head, versions  # not in processes of another opacus

    card = torch.cuda.get_device_name() if options.device == "cuda" else ""
    report = {
        **head(WHAT, card, versions()),
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "packages": compare(options),
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
