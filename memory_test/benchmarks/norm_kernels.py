"""Times the Triton norm kernels on a GPU against what they replace.

    python memory_test/benchmarks/norm_kernels.py --out result.json [--sections width gram ...]
    python memory_test/benchmarks/norm_kernels.py --sweep

Every case is first checked against float64; one wrong result and nothing is reported. The
kernel and its baseline are timed in turn, so that both see the same clocks. Times are medians with
quartiles, in milliseconds of device time. The section ``grouped`` includes the host time, which one
launch for many layers saves.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memory_test.common.schema import head, versions
from memory_test.common.timing import milliseconds
from opacus.core.kernels.host.operands import Tile
from opacus.core.kernels.norms import bias_and_affine as rows
from opacus.core.kernels.norms import choice, clock, reference
from opacus.core.kernels.norms import embedding as table
from opacus.core.kernels.norms import gram as linear_gram
from opacus.core.kernels.norms import width as linear_width

Row = dict[str, Any]
TOKENS = 16384  # in a batch, for the large layers
TOLERANCE = 1e-3
SECONDS = 0.15  # timed for each case
QUEUED = 6  # calls in one measurement
CYCLES_A_SECOND = 2e9


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


# --- checking and timing ---


def check(name: str, got: Tensor, want: Tensor) -> float:
    """Largest relative error; leaves the program if it is too large."""
    error = ((got.double() - want).abs() / want.clamp(min=1e-300)).max().item()
    if not error <= TOLERANCE:  # also if it is NaN
        sys.exit(f"{name}: relative error {error:.2e} against float64; nothing is reported")
    return error


def definition(a: Tensor, g: Tensor) -> Tensor:
    """The norms in float64, one sample at a time."""
    norms = [(x.double().T @ y.double()).square().sum() for x, y in zip(a, g, strict=True)]
    return torch.stack(norms)


def event_times(ways: dict[str, Callable[[], Any]], seconds: float = SECONDS) -> Row:
    """Milliseconds on the device, the ways in turn.

    Calls are queued while the device sleeps, so that launches do not count: what a launch costs
    is what ``wall_times`` shows.
    """
    naps = {name: 2 * enqueueing_time(way) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or min(map(len, times.values())) < 5:
        for name, way in ways.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(naps[name] * CYCLES_A_SECOND))
            start.record()
            for _ in range(QUEUED):
                way()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / QUEUED)
    return {name: spread(values) for name, values in times.items()}


def enqueueing_time(way: Callable[[], Any]) -> float:
    """Seconds that the host needs for the calls of one measurement."""
    way()
    way()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(QUEUED):
        way()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds


def wall_times(ways: dict[str, Callable[[], Any]], repeats: int = 10) -> Row:
    """Milliseconds with the launches, which is what many small layers cost."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(repeats + 2):
        for name, way in ways.items():
            took = milliseconds(way, "cuda")
            if index >= 2:
                times[name].append(took)
    return {name: spread(values) for name, values in times.items()}


def spread(values: list[float]) -> Row:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 5), "quartiles": [round(low, 5), round(high, 5)]}


def median(times: Row, name: str) -> float:
    """Median milliseconds of one way."""
    return times[name]["median"]


# --- sections ---


def width_row(batch: int, tokens: int, d: int, p: int, dtype: torch.dtype) -> Row:
    """The width kernel against cuBLAS' weight gradient of the same tokens."""
    a, g = draw(batch, tokens, d, dtype=dtype), draw(batch, tokens, p, dtype=dtype)
    flat_a, flat_g = a.flatten(0, 1), g.flatten(0, 1)
    tiles = linear_width.tiles(a.device) if dtype != torch.float32 else (None,)
    want = definition(a, g)
    ways: dict[str, Callable[[], Any]] = {"cublas": lambda: flat_g.t() @ flat_a}
    errors = []
    for tile in tiles:
        ways[str(tile)] = lambda tile=tile: linear_width.norm_sq(a, g, tile=tile)
        errors.append(check(f"width {tile}", ways[str(tile)](), want))
    ways["reference"] = lambda: reference.width_norm_sq(a, g)
    times = event_times(ways)
    best = min((str(tile) for tile in tiles), key=lambda name: median(times, name))
    operations = 2 * batch * tokens * d * p
    return {
        "B": batch, "T": tokens, "d": d, "p": p, "dtype": str(dtype), "tile": best,
        "tflops": round(operations / median(times, best) / 1e9, 1),
        "cublas_tflops": round(operations / median(times, "cublas") / 1e9, 1),
        "of_cublas": round(median(times, "cublas") / median(times, best), 3),
        "over_reference": round(median(times, "reference") / median(times, best), 2),
        "error": max(errors), "ms": times,
    }  # fmt: skip


def width() -> Iterator[Row]:
    """Square and oblong layers, other dtypes, a narrow layer."""
    shapes = [(1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (4096, 1024), (4096, 14336)]
    for (d, p), tokens in itertools.product(shapes, (1024, 2048, 8192)):
        yield width_row(TOKENS // tokens, tokens, d, p, torch.bfloat16)
    yield width_row(4, 4096, 4096, 4096, torch.float16)
    yield width_row(2, 1024, 1024, 1024, torch.float32)
    yield width_row(4, 4096, 4096, 16, torch.bfloat16)


def gram_row(batch: int, tokens: int, d: int, p: int) -> Row:
    """The Gram kernel against two batched products alone, and against the reference."""
    a, g = draw(batch, tokens, d), draw(batch, tokens, p)
    want = definition(a, g)
    ways: dict[str, Callable[[], Any]] = {
        "two bmm": lambda: (torch.bmm(a, a.mT), torch.bmm(g, g.mT)),
        "reference": lambda: reference.gram_norm_sq(a, g),
    }
    errors = []
    for tile in linear_gram.tiles(a.device):
        ways[str(tile)] = lambda tile=tile: linear_gram.norm_sq(a, g, tile=tile)
        errors.append(check(f"gram {tile}", ways[str(tile)](), want))
    ways["width"] = lambda: linear_width.norm_sq(a, g)
    times = event_times(ways)
    best = min(map(str, linear_gram.tiles(a.device)), key=lambda name: median(times, name))
    operations = batch * tokens * (tokens + 1) * (d + p)
    return {
        "B": batch, "T": tokens, "d": d, "p": p, "dtype": str(a.dtype), "tile": best,
        "tflops": round(operations / median(times, best) / 1e9, 1),
        "over_two_bmm": round(median(times, "two bmm") / median(times, best), 2),
        "over_reference": round(median(times, "reference") / median(times, best), 2),
        "over_width": round(median(times, "width") / median(times, best), 2),
        "error": max(errors), "ms": times,
    }  # fmt: skip


def gram() -> Iterator[Row]:
    """From short inputs, where Gram matrices are small, to long ones."""
    for (d, p), tokens in itertools.product(
        [(1024, 1024), (4096, 4096), (4096, 14336)], (128, 512, 1024, 2048, 4096, 8192)
    ):
        yield gram_row(max(1, TOKENS // tokens), tokens, d, p)


def shared_row(batch: int, tokens: int, d: int, widths: tuple[int, ...]) -> Row:
    """Layers with one input: together, each by its own fastest kernel, and as modes choose."""
    a, gs = draw(batch, tokens, d), [draw(batch, tokens, p) for p in widths]
    ways: dict[str, Callable[[], Any]] = {
        "gram of all": lambda: linear_gram.shared_norm_sq(a, gs),
        "one by one": lambda: [choice.product_norm_sq(a, g) for g in gs],
        "chosen": lambda: choice.shared_product_norm_sq(a, gs),
    }
    errors = []
    for name, way in ways.items():
        for value, g in zip(way(), gs, strict=True):
            errors.append(check(f"shared, {name}", value, definition(a, g)))
    times = event_times(ways)
    alone = median(times, "one by one")
    return {
        "B": batch, "T": tokens, "d": d, "p": list(widths), "error": max(errors), "ms": times,
        "speedup_of_gram": round(alone / median(times, "gram of all"), 2),
        "speedup_as_chosen": round(alone / median(times, "chosen"), 2),
    }  # fmt: skip


def shared() -> Iterator[Row]:
    """Query, key and value, gate and up of 1B and 8B shapes: one Gram matrix of their input."""
    layers = [
        (2048, (2048, 512, 512)),
        (2048, (8192, 8192)),
        (4096, (4096, 1024, 1024)),
        (4096, (14336, 14336)),
    ]
    for (d, widths), tokens in itertools.product(layers, (128, 512, 1024, 2048)):
        yield shared_row(max(1, TOKENS // tokens), tokens, d, widths)


def grouped_row(batch: int, tokens: int, layers: int, d: int, r: int, equal: bool) -> Row:
    """One launch for all layers against a launch for each."""
    pairs = []
    for index in range(layers):
        wide = d if equal or index % 2 else d // 2
        pairs.append((draw(batch, tokens, wide), draw(batch, tokens, r)))
    errors = []
    for modules in (linear_width, linear_gram):
        for value, (a, g) in zip(modules.grouped_norm_sq(pairs), pairs, strict=True):
            errors.append(check("grouped", value, definition(a, g)))
    ways: dict[str, Callable[[], Any]] = {
        "one launch": lambda: linear_width.grouped_norm_sq(pairs),
        "one launch, gram": lambda: linear_gram.grouped_norm_sq(pairs),
        "a launch a layer": lambda: [linear_width.norm_sq(a, g) for a, g in pairs],
        "reference": lambda: [reference.product_norm_sq(a, g) for a, g in pairs],
    }
    times = wall_times(ways)
    return {
        "B": batch, "T": tokens, "layers": layers, "d": d, "r": r, "equal": equal,
        "over_a_launch_a_layer": round(
            median(times, "a launch a layer") / median(times, "one launch"), 2
        ),
        "over_reference": round(median(times, "reference") / median(times, "one launch"), 2),
        "gigabytes_per_second": round(
            sum(a.nbytes + g.nbytes for a, g in pairs) / median(times, "one launch") / 1e6
        ),
        "error": max(errors), "ms": times,
    }  # fmt: skip


def grouped() -> Iterator[Row]:
    """LoRA layers of a model with 32 blocks."""
    yield grouped_row(4, 32, 224, 4096, 16, True)
    yield grouped_row(4, 128, 224, 4096, 16, True)
    yield grouped_row(4, 128, 224, 4096, 16, False)
    yield grouped_row(4, 512, 224, 4096, 16, True)


def pass_row(
    name: str, kernel: Callable[[], Tensor], plain: Callable[[], Tensor], want: Tensor, size: int
) -> Row:
    """A kernel against plain PyTorch; ``size`` is the bytes that it has to read."""
    error = check(name, kernel(), want)
    times = event_times({"kernel": kernel, "reference": plain})
    return {
        "what": name,
        "over_reference": round(median(times, "reference") / median(times, "kernel"), 2),
        "gigabytes_per_second": round(size / median(times, "kernel") / 1e6),
        "error": error, "ms": times,
    }  # fmt: skip


def one_pass() -> Iterator[Row]:
    """Kernels that the memory limits."""
    for batch, tokens, d in [(4, 4096, 4096), (64, 512, 1024)]:
        x, g = draw(batch, tokens, d), draw(batch, tokens, d)
        x64, g64 = x.double(), g.double()
        shape = f"[{batch}, {tokens}, {d}]"
        yield (
            pass_row(
                f"bias {shape}",
                lambda g=g: rows.bias_norm_sq(g),
                lambda g=g: reference.sum_of_squares(g.sum(1, dtype=torch.float32)),
                g64.sum(1).square().sum(1),
                g.nbytes,
            )
        )
        for centre, norm in ((True, "layer_norm"), (False, "rms_norm")):
            normalise = getattr(torch.nn.functional, norm)
            yield (
                pass_row(
                    f"{norm} {shape}",
                    lambda x=x, g=g, c=centre: torch.stack(
                        [
                            v
                            for v in rows.affine_norm_sq(x, g, eps=1e-5, centre=c, bias=c)
                            if v is not None
                        ]
                    ).sum(0),
                    lambda x=x, g=g, c=centre: sum(
                        v for v in choice._reference_affine(x, g, 1e-5, c, c, None) if v is not None
                    ),
                    (g64 * normalise(x64, (d,), eps=1e-5)).sum(1).square().sum(1)
                    + centre * g64.sum(1).square().sum(1),
                    x.nbytes + g.nbytes,
                )
            )
        del x64, g64


def lookup() -> Iterator[Row]:
    """Lookup tables, with ids as in text and with one that is everywhere."""
    for batch, tokens, d in [(4, 4096, 4096), (64, 512, 1024)]:
        g = draw(batch, tokens, d)
        # Words occur about as often as the inverse of their rank.
        ranks = torch.rand(batch, tokens, device=g.device).mul(10.4).exp().long()
        hot = ranks.clone()
        hot[:, tokens // 2 :] = 5
        for name, ids in (("zipf", ranks), ("half the same", hot)):
            want = torch.stack(
                [
                    torch.zeros(40000, d, dtype=torch.float64, device=g.device)
                    .index_add_(0, i, v.double())
                    .square()
                    .sum()
                    for i, v in zip(ids, g, strict=True)
                ]
            )
            yield (
                pass_row(
                    f"table [{batch}, {tokens}, {d}] {name}",
                    lambda ids=ids, g=g: table.embedding_norm_sq(ids, g),
                    lambda ids=ids, g=g: choice._reference_embedding(ids, g, None, None),
                    want,
                    g.nbytes,
                )
            )


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "width": width,
    "gram": gram,
    "shared": shared,
    "grouped": grouped,
    "rows": one_pass,
    "table": lookup,
}

# --- sweep ---

WIDTH_TILES = [
    Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(128, 256, 64, 8, 4, group=4),
    Tile(128, 256, 64, 8, 4, group=16), Tile(256, 128, 64, 8, 4), Tile(128, 256, 32, 8, 6),
    Tile(128, 256, 128, 8, 2), Tile(128, 128, 64, 4, 4), Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 4, 3), Tile(128, 128, 128, 8, 3), Tile(64, 256, 64, 4, 4),
    Tile(128, 256, 64, 8, 3, tma=False),
    Tile(128, 128, 64, 8, 3, tma=False), Tile(128, 128, 32, 8, 4, tma=False),
]  # fmt: skip
GRAM_TILES = [
    Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 4, group=4),
    Tile(128, 128, 64, 8, 4, group=16), Tile(128, 128, 64, 8, 6), Tile(128, 128, 128, 8, 2),
    Tile(128, 128, 128, 8, 3), Tile(64, 64, 64, 4, 4), Tile(64, 64, 128, 4, 3),
    Tile(128, 128, 64, 8, 3, tma=False), Tile(64, 64, 64, 4, 4, tma=False),
]  # fmt: skip
WIDTH_SHAPES = [(2, 8192, 4096, 4096), (16, 1024, 4096, 4096), (16, 1024, 1024, 1024)]
GRAM_SHAPES = [(8, 2048, 4096, 4096), (2, 8192, 1024, 1024), (64, 256, 4096, 4096)]


def sweep() -> list[Row]:
    """All tiles at a few shapes; prints the best first."""
    result = []
    for module, tiles, shapes in (
        (linear_width, WIDTH_TILES, WIDTH_SHAPES),
        (linear_gram, GRAM_TILES, GRAM_SHAPES),
    ):
        for batch, tokens, d, p in shapes:
            a, g = draw(batch, tokens, d), draw(batch, tokens, p)
            want, found = definition(a, g), []
            operations = 2 * batch * tokens * d * p
            if module is linear_gram:
                operations = batch * tokens * (tokens + 1) * (d + p)
            for tile in tiles:
                row = {"kernel": module.__name__.split(".")[-1], "B": batch, "T": tokens,
                       "d": d, "p": p, "tile": str(tile)}  # fmt: skip
                try:
                    row["error"] = check(str(tile), module.norm_sq(a, g, tile=tile), want)
                except clock.too_large() as error:
                    print(f"{tile}: {type(error).__name__}: {error}")
                    continue
                times = event_times({"k": functools.partial(module.norm_sq, a, g, tile=tile)}, 0.1)
                row["tflops"] = round(operations / median(times, "k") / 1e9, 1)
                found.append(row)
            found.sort(key=lambda row: -row["tflops"])
            result += found
            print(module.__name__, batch, tokens, d, p)
            for row in found:
                print(f"  {row['tflops']:7.1f} TFLOP/s  {row['tile']}")
    return result


# --- report ---


def about() -> Row:
    """What was measured on what."""
    import triton  # its version is asked for

    found = {**versions(), "cuda": str(torch.version.cuda), "triton": triton.__version__}
    what = "norm kernels against what they replace; median and quartiles of times on the device"
    return {**head(what, torch.cuda.get_device_name(), found), "kernels": []}


def show(row: Row) -> None:
    """Print a row without its times."""
    cells = {k: f"{v:.1e}" if k == "error" else v for k, v in row.items() if k != "ms"}
    print("  " + "  ".join(f"{k}={v}" for k, v in cells.items()), flush=True)


def write(report: Row, file: Path | None) -> None:
    """Keep what has been measured so far."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--sweep", action="store_true", help="try tile sizes instead")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.manual_seed(0)
    report: Row = about()
    print(report)
    if options.sweep:
        report["sweep"] = sweep()
    for name in () if options.sweep else options.sections:
        print(name)
        for row in SECTIONS[name]():
            report["kernels"].append({"section": name, **row})
            show(row)
            write(report, options.out)
            torch.cuda.empty_cache()
    write(report, options.out)


if __name__ == "__main__":
    main()
