"""Phase times of a step, ranges for torch.profiler, and nothing of either when off."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.platform import profiling
from opacus.core.platform.profiling import (
    CLIP_AND_SUM,
    CLIP_FACTORS,
    FIRST_BACKWARD,
    NOISE,
    PARALLEL_NORMS,
    PER_SAMPLE_GRADIENTS,
    PROFILE,
    SECOND_BACKWARD,
    STEP,
    VARIABLES,
    WEIGHTED_SUM,
    StepProfile,
)
from opacus.grad_sample import GradSampleModule

LINE = re.compile(r"\[Profile\] Rank 0 (.*): (\d+\.\d\d) ms")
GHOST = [FIRST_BACKWARD, PARALLEL_NORMS, CLIP_FACTORS]
PHASES = {
    "hooks": [CLIP_AND_SUM, NOISE, STEP],
    "ghost": [*GHOST, SECOND_BACKWARD, NOISE, STEP],
    "ghost_bk": [*GHOST, WEIGHTED_SUM, NOISE, STEP],
}


@pytest.fixture(autouse=True)
def _off_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*VARIABLES, "OPACUS_USE_DEFERRED_NORM"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    PROFILE.configure()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x).tanh())


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 3))


def private(mode: str, **kwargs: Any) -> tuple[Any, Any, Callable[[], None]]:
    """Model, optimizer, and a function that runs forward and backward once."""
    model = model_of()
    data = TensorDataset(torch.randn(6, 4), torch.arange(6) % 3)
    out = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **kwargs,
    )
    criterion = out[2] if len(out) == 4 else nn.CrossEntropyLoss()

    def backward() -> None:
        out[1].zero_grad()
        criterion(out[0](data.tensors[0]), data.tensors[1]).backward()

    return out[0], out[1], backward


def step_of(mode: str, **kwargs: Any) -> None:
    _, optimizer, backward = private(mode, **kwargs)
    backward()
    optimizer.step()


@pytest.mark.parametrize("mode", PHASES)
def test_a_line_for_each_phase_in_order(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPACUS_PROFILE_DETAILED", "1")
    step_of(mode)
    lines = capsys.readouterr().out.splitlines()
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), lines
    assert [match[1] for match in found if match] == PHASES[mode]
    assert any(float(match[2]) > 0 for match in found if match)


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_deferred_norms_are_counted(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPACUS_PROFILE_DETAILED", "1")
    step_of(mode, deferred_norm=True)
    first, second, *rest = capsys.readouterr().out.splitlines()
    number = r"(\d+\.\d\d) ms"
    whole = re.fullmatch(rf"\[Deferred Norm\] Computed 5 layer norms in parallel: {number}", first)
    each = re.fullmatch(rf"\[Deferred Norm\] Average per layer: {number}", second)
    assert whole and each
    assert abs(float(whole[1]) / 5 - float(each[1])) < 0.01
    assert f"[Profile] Rank 0 {PARALLEL_NORMS}: {whole[1]} ms" in rest


@pytest.mark.parametrize("mode", PHASES)
def test_nothing_is_printed_or_kept_when_off(
    mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a range without a profiler")

    monkeypatch.setattr(profiling, "record_function", refuse)
    monkeypatch.setattr(StepProfile, "_mark", refuse)
    step_of(mode)
    assert capsys.readouterr() == ("", "")
    assert PROFILE._spans == []


def test_physical_batches_are_added_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPACUS_PROFILE_DETAILED", "1")
    _, optimizer, backward = private("ghost")
    optimizer.signal_skip_step(True)
    backward()
    optimizer.step()
    assert capsys.readouterr().out == ""
    optimizer.signal_skip_step(False)
    backward()
    optimizer.step()
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "[Profile] Rank 0 Sum over physical batches: 2"
    assert [match[1] for match in map(LINE.fullmatch, rest) if match] == PHASES["ghost"]


def test_a_phase_does_not_count_the_phases_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0])
    steps = StepProfile()
    steps.on = True
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(clock))
    with steps.phase(STEP), steps.phase(NOISE):
        pass
    times = profiling._phase_times(steps._spans)
    assert times == {NOISE: 2000.0, STEP: 1000.0 + 4000.0}


def test_the_noise_is_not_counted_in_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow phase shows in its own line and in no other."""
    monkeypatch.setenv("OPACUS_PROFILE_DETAILED", "1")
    seconds = [0.0]  # nothing but the noise takes any
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: seconds[0])
    _, optimizer, backward = private("ghost")
    noised = optimizer._parallelism.noised

    def slow(*args: Any) -> Any:
        seconds[0] += 0.25
        return noised(*args)

    optimizer._parallelism.noised = slow
    backward()
    optimizer.step()
    found = map(LINE.fullmatch, capsys.readouterr().out.splitlines())
    times = {match[1]: float(match[2]) for match in found if match}
    assert times.pop(NOISE) == 250.0 and set(times.values()) == {0.0}


def test_a_failing_phase_does_not_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPACUS_PROFILE_DETAILED", "1")
    model, _, _ = private("ghost")
    model.disable_hooks()
    with pytest.raises(ZeroDivisionError), PROFILE.phase(NOISE), PROFILE.layers(["a"]):
        raise ZeroDivisionError
    assert PROFILE.running == [] and not PROFILE._in_layers


# --- bad input ---


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["", "2", "yes", "True"])
def test_other_values_are_refused_before_anything_changes(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    model = model_of()
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    for mode in PHASES:
        with pytest.raises(ValueError, match=f"{name} must be 0 or 1, got {value!r}"):
            engine.make_private(
                module=model,
                optimizer=optimizer,
                data_loader=DataLoader(TensorDataset(torch.randn(6, 4))),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                grad_sample_mode=mode,
            )
    with pytest.raises(ValueError, match=name):
        GradSampleModule(model)
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == before
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    assert engine.dataset is None and not PROFILE.on


@pytest.mark.parametrize("name", VARIABLES[1:])
def test_fsdp_lines_are_for_fsdp(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    step_of("ghost")
    assert capsys.readouterr().out == ""


# --- profiler ranges ---

LAYERS = ["0.up", "0.norm", "1.up", "1.norm", "2"]


def ranges_of(run: Callable[[], None]) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    return [e.name for e in trace.events() or () if e.name.startswith("opacus::")]


@pytest.mark.parametrize("mode", PHASES)
def test_a_trace_names_phases_and_layers(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, optimizer, backward = private(mode)

    def run() -> None:
        backward()
        optimizer.step()

    found = ranges_of(run)
    assert {f"opacus::{phase}" for phase in PHASES[mode]} <= set(found)
    layers = {
        "hooks": [PER_SAMPLE_GRADIENTS],
        "ghost": [FIRST_BACKWARD, SECOND_BACKWARD],
        "ghost_bk": [FIRST_BACKWARD],
    }
    names = [f"{phase} {layer}" for phase in layers[mode] for layer in LAYERS]
    if mode == "ghost_bk":  # linear layers are held for the sum, and wait for each other
        names = [f"{FIRST_BACKWARD} {of}" for of in ("0.norm", "1.norm", "2, 1.up, 0.up")]
    assert {f"opacus::{name}" for name in names} <= set(found)
    assert len(found) == len(set(found)), "a range within itself"
    assert capsys.readouterr().out == "" and PROFILE._spans == []


def test_a_trace_names_the_layers_of_deferred_norms() -> None:
    found = ranges_of(lambda: step_of("ghost", deferred_norm=True))
    groups = [name for name in found if name.startswith(f"opacus::{PARALLEL_NORMS} ")]
    names = ", ".join(name.removeprefix(f"opacus::{PARALLEL_NORMS} ") for name in groups)
    assert sorted(names.split(", ")) == sorted(LAYERS)
    assert not any(name.startswith(f"opacus::{FIRST_BACKWARD} ") for name in found)


def test_a_large_group_is_shortened() -> None:
    assert profiling._joined([str(i) for i in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert profiling._joined([""]) == "(root)"


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_times_on_a_gpu_are_those_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is done long before the device; the phase still lasts as long as its work."""
    monkeypatch.setenv("OPACUS_PROFILE_DETAILED", "1")
    PROFILE.configure()
    big = torch.randn(8192, 8192, device="cuda")
    big @ big
    torch.cuda.synchronize()
    start = profiling.time.perf_counter()
    with PROFILE.phase(NOISE):
        for _ in range(20):
            big @ big
    host = (profiling.time.perf_counter() - start) * 1e3
    assert profiling._phase_times(PROFILE._spans)[NOISE] > 2 * host
