"""Under FSDP2 every rank prints its own phases, norms, reductions and layers."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.platform.profiling import (
    ALL_REDUCE,
    CLIP_FACTORS,
    FIRST_BACKWARD,
    LOCAL_COMPUTE,
    NOISE,
    NORM_PARTS,
    PARALLEL_NORMS,
    REDUCTION,
    SECOND_BACKWARD,
    STEP,
    VARIABLES,
    WEIGHTED_SUM,
)
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed

DETAILED, FSDP, FSDP_DETAILED = VARIABLES
WORLD = 2
START = [FIRST_BACKWARD, PARALLEL_NORMS, CLIP_FACTORS]
PHASES = {
    "ghost_fsdp": [*START, SECOND_BACKWARD, NOISE, STEP],
    "ghost_fsdp_bk": [*START, WEIGHTED_SUM, REDUCTION, NOISE, STEP],
}
WAYS = [(mode, deferred) for mode in PHASES for deferred in (False, True)]
LAYERS = ["0.0", "0.2", "1"]
MS = r"(\d+\.\d\d) ms"


def step_of(mode: str, deferred: bool, layout: str = "sharded") -> None:
    """One private step; rank 1 has no samples where data is sharded."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    device = torch.get_default_device()
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), nn.Linear(4, 3)
    )
    model = FSDP2Wrapper(model.to(device))
    with torch.device("cpu"):
        data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    private, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        data_layout=layout,
        deferred_norm=deferred,
    )
    rows = slice(0, 0) if rank and layout == "sharded" else slice(0, 8)
    inputs, targets = (t[rows].to(device) for t in data.tensors)
    criterion(private(inputs), targets).backward()
    optimizer.step()


def printed(mode: str, deferred: bool, *variables: str, layout: str = "sharded") -> str:
    progress((mode, deferred, variables, layout))
    os.environ.update({name: "1" if name in variables else "0" for name in VARIABLES})
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        step_of(mode, deferred, layout)
    return out.getvalue()


def ranges(mode: str, deferred: bool) -> list[str]:
    progress((mode, deferred, "trace"))
    os.environ.update(dict.fromkeys(VARIABLES, "0"))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step_of(mode, deferred)
    return [e.name for e in trace.events() or () if e.name.startswith("opacus::")]


def job(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for way in WAYS:
        found["off", way] = printed(*way)
        found["detailed", way] = printed(*way, DETAILED)
        found["fsdp", way] = printed(*way, FSDP)
        found["layers", way] = printed(*way, FSDP_DETAILED)
        found["trace", way] = ranges(*way)
    found["replicated"] = printed("ghost_fsdp", True, FSDP, layout="replicated")
    # Only one rank is asked to measure: nothing may depend on what the others do.
    alone = (DETAILED,) if rank == 1 else ()
    found["one rank"] = printed("ghost_fsdp_bk", True, *alone)
    return found


@functools.cache
def results(backend: str = "gloo") -> list[dict[Any, Any]]:
    return run_distributed(job, WORLD, backend=backend)


def phases_in(text: str, rank: int) -> list[str]:
    return re.findall(rf"^\[Profile\] Rank {rank} (.*): {MS}$", text, re.M)


def check_phases(found: list[dict[Any, Any]], way: tuple[str, bool]) -> None:
    mode, deferred = way
    for rank, result in enumerate(found):
        text = result["detailed", way]
        assert [name for name, _ in phases_in(text, rank)] == PHASES[mode]
        expected = len(PHASES[mode]) + 2 * deferred
        assert len(text.splitlines()) == expected, text
        assert ("[Deferred Norm] Computed 3 layer norms in parallel: " in text) is deferred


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_rank_prints_its_phases_in_order(way: tuple[str, bool]) -> None:
    check_phases(results(), way)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_gpu_prints_its_phases_in_order(way: tuple[str, bool]) -> None:
    check_phases(results("nccl"), way)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_nothing_is_printed_when_off(way: tuple[str, bool]) -> None:
    assert [result["off", way] for result in results()] == [""] * WORLD


def norm_parts(text: str, rank: int) -> dict[str, float]:
    """The breakdown of the norms; what it must look like is asserted."""
    head, *lines = text.splitlines()
    assert head == f"[FSDP Profile] Rank {rank} get_norm_sample timing breakdown:"
    parts = [re.fullmatch(rf"  - ([\w -]+): +{MS}", line) for line in lines[:5]]
    times = {part[1]: float(part[2]) for part in parts if part}
    assert list(times) == [*NORM_PARTS, "TOTAL"], text
    assert abs(sum(times[name] for name in NORM_PARTS) - times["TOTAL"]) < 0.03
    return times


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_norms_and_reductions_of_a_step(way: tuple[str, bool]) -> None:
    what = {
        "ghost_fsdp": "with the second backward around it",
        "ghost_fsdp_bk": "what was waited for",
    }
    for rank, result in enumerate(results()):
        text = result["fsdp", way]
        times = norm_parts(text, rank)
        assert times[LOCAL_COMPUTE] > 0
        assert times[ALL_REDUCE] == 0, "samples of other ranks do not concern the norm"
        *_, reduction, step = text.splitlines()
        start = re.escape(f"[FSDP Profile] Rank {rank} ")
        assert re.fullmatch(rf"{start}{REDUCTION}, {what[way[0]]}: {MS}", reduction)
        match = re.fullmatch(rf"{start}Step, without forward: {MS} \(norms .*%\)", step)
        assert match and float(match[1]) >= times["TOTAL"]
        assert len(text.splitlines()) == 8


def test_replicated_data_all_reduces_norms() -> None:
    for rank, result in enumerate(results()):
        assert norm_parts(result["replicated"], rank)[ALL_REDUCE] > 0


def of_norms(way: tuple[str, bool]) -> list[str]:
    """The phases in which layers are measured."""
    mode, deferred = way
    if deferred:
        return [PARALLEL_NORMS]
    # Layers that are held for the sum wait for others, and these three are not enough.
    return [FIRST_BACKWARD, PARALLEL_NORMS] if mode == "ghost_fsdp_bk" else [FIRST_BACKWARD]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_line_for_each_layer(way: tuple[str, bool]) -> None:
    mode, when = way[0], "|".join(map(re.escape, of_norms(way)))
    for rank, result in enumerate(results()):
        text = result["layers", way]
        norm_parts(text, rank)
        start = re.escape(f"[FSDP Profile] Rank {rank} ")
        lines = text.splitlines()[8:]
        assert all(re.fullmatch(rf"{start}.*: {MS}", line) for line in lines)
        found = re.findall(rf"^{start}(?:{when}) (.*): {MS}$", text, re.M)
        assert sorted(", ".join(names for names, _ in found).split(", ")) == LAYERS
        if mode == "ghost_fsdp":
            found = re.findall(rf"^{start}{re.escape(SECOND_BACKWARD)} (.*): {MS}$", text, re.M)
            assert sorted(name for name, _ in found) == LAYERS
        else:
            assert f"{REDUCTION} 1.bias, 1.weight" in text


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_trace_names_phases_and_layers(way: tuple[str, bool]) -> None:
    starts = [f"opacus::{phase} " for phase in of_norms(way)]
    for result in results():
        found = result["trace", way]
        assert {f"opacus::{phase}" for phase in PHASES[way[0]]} <= set(found)
        names = ", ".join(n.removeprefix(s) for n in found for s in starts if n.startswith(s))
        assert sorted(names.split(", ")) == LAYERS


def test_one_rank_alone_can_measure() -> None:
    first, second = (result["one rank"] for result in results())
    assert first == ""
    assert [name for name, _ in phases_in(second, 1)] == PHASES["ghost_fsdp_bk"]


def refused(rank: int, world_size: int) -> list[str]:
    """One rank has a wrong value; all raise, and then train without it."""
    found = []
    for name in VARIABLES:
        progress(name)
        os.environ[name] = "on" if rank == 1 else "0"
        try:
            step_of("ghost_fsdp", False)
        except (ValueError, RuntimeError) as error:  # its own; that of another rank
            found.append(str(error))
        os.environ[name] = "0"
    step_of("ghost_fsdp", False)
    return found


def test_a_wrong_value_on_one_rank_is_an_error_on_all() -> None:
    for errors in run_distributed(refused, WORLD):
        assert len(errors) == len(VARIABLES)
        for name, error in zip(VARIABLES, errors, strict=True):
            assert f"{name} must be 0 or 1, got 'on'" in error
