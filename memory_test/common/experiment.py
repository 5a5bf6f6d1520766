"""One measurement: a model trained for some steps in one mode, and everything about it."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from memory_test.common.failures import UsageError, fail_if_planted
from memory_test.common.launch import Runtime
from memory_test.common.memory import MB, MemoryWatch, held_mb, peak_mb, reset_peak
from memory_test.common.models import ModelRequest, build_model, vocabulary
from memory_test.common.modes import RunMode, resolve_mode
from memory_test.common.phases import PHASES, PhaseClock, collective_times, watch_private_step
from memory_test.common.results import time_summary
from memory_test.common.schema import versions
from memory_test.common.tasks import criterion_for, loss_of, random_batch
from memory_test.common.timing import milliseconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEARNING_RATE = 1e-5
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        mode: Name of the mode.
        model: Which model.
        batch_size: Samples of a process.
        num_iter: Timed steps.
        warmup_iter: Steps before them.
        sigma: Noise multiplier.
        max_grad_norm: Clipping norm.
        dtype: ``"fp32"``, ``"bf16"``, ``"fp16"``, or ``"auto"``: bf16 on a GPU, else fp32.
        seed: Of weights, data and noise.
        optimizer: ``"sgd"`` or ``"adamw"``.
        lora_rank: Train adapters of this rank instead of the weights; 0 for none.
        deferred: Whether norms are deferred; ``None`` as the environment says.
        profile_collectives: Measure collectives in one more step, under the profiler.
    """

    mode: str
    model: ModelRequest
    batch_size: int = 1
    num_iter: int = 3
    warmup_iter: int = 1
    sigma: float = 1.0
    max_grad_norm: float = 1.0
    dtype: str = "auto"
    seed: int = 0
    optimizer: str = "sgd"
    lora_rank: int = 0
    deferred: bool | None = None
    profile_collectives: bool = True

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """The type of the arithmetic."""
        name = self.dtype
        if name == "auto":
            name = "bf16" if device.type == "cuda" else "fp32"
        return DTYPES[name]


@dataclass
class Trained:
    """What a step needs."""

    mode: RunMode
    model: Any
    optimizer: Any
    criterion: Any
    inner: nn.Module
    vocab: int
    wrapped_loss: bool = False
    clock: PhaseClock = field(default_factory=lambda: PhaseClock(torch.device("cpu")))


def run_experiment(settings: Settings, runtime: Runtime) -> dict[str, Any]:
    """Measure; a collective call. The result is the same on all processes.

    Raises:
        UsageError: The mode or the model is not available.
    """
    mode = resolve_mode(settings.mode, runtime.world_size)
    fail_if_planted(settings.mode, runtime.rank)
    torch.manual_seed(settings.seed)
    held = held_mb(runtime.device)
    trained = prepare(settings, mode, runtime)
    step = stepper(settings, trained, runtime)
    for _ in range(settings.warmup_iter):
        step()
    trained.clock.take()
    reset_peak(runtime.device)
    times, phases = _timed(settings, trained, runtime, step)
    peak = runtime.largest([peak_mb(runtime.device)])[0]
    collectives: dict[str, float] = {}
    if settings.profile_collectives and runtime.world_size > 1:
        collectives = _largest(collective_times(step, runtime.device), runtime)
    memory = _memory(settings, trained, runtime)
    return {
        **_description(settings, trained, runtime),
        "peak_memory_mb": round(peak, 1),
        "held_before_mb": round(runtime.largest([held])[0], 1),
        "peak_memory_gb": round(peak / 1024, 3),
        **time_summary(times),
        "phases_ms": _with_reduction(phases, collectives),
        "collectives_ms": collectives,
        "memory_mb": memory,
    }


def prepare(settings: Settings, mode: RunMode, runtime: Runtime) -> Trained:
    """Build the model, shard it, and make it private, as the mode says."""
    device, dtype = runtime.device, settings.dtype_on(runtime.device)
    model = build_model(settings.model, device)
    vocab = vocabulary(model, settings.model)
    if settings.lora_rank:
        model = _with_adapters(model, settings.lora_rank)
    model = _sharded(model, dtype) if mode.sharded else model.to(dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[settings.optimizer](parameters, lr=LEARNING_RATE)
    criterion = criterion_for(settings.model.resolved_task)
    trained = Trained(mode, model, optimizer, criterion, model, vocab)
    if mode.private:
        _make_private(settings, trained, runtime)
    trained.clock = PhaseClock(device)
    trained.clock.wrap(optimizer, "step", "step")
    if mode.private:
        watch_private_step(trained.clock, trained.model, trained.optimizer)
    return trained


def stepper(
    settings: Settings,
    trained: Trained,
    runtime: Runtime,
    around_forward: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[[], Any]:
    """A function that does one whole step on new data and returns the loss."""
    task, clock = settings.model.resolved_task, trained.clock
    generator = torch.Generator(runtime.device).manual_seed(settings.seed + 1 + runtime.rank)
    dtype = settings.dtype_on(runtime.device)

    def step() -> Any:
        with clock.phase("other"):
            trained.optimizer.zero_grad(set_to_none=True)
            batch = random_batch(
                task,
                trained.inner,
                batch=settings.batch_size,
                length=settings.model.seq_length,
                vocab=trained.vocab,
                generator=generator,
                dtype=dtype,
            )
            with clock.phase("forward"), around_forward():
                output = trained.model(**batch.inputs)
                loss = loss_of(task, trained.criterion, output, batch.targets, trained.wrapped_loss)
                del output
            with clock.phase("first_backward"):
                loss.backward()
            with clock.phase("step"):
                trained.optimizer.step()
        return loss

    return step


def _timed(
    settings: Settings, trained: Trained, runtime: Runtime, step: Callable[[], Any]
) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of each step, the slowest process; mean milliseconds of each phase."""
    times: list[float] = []
    total = dict.fromkeys(PHASES, 0.0)
    for _ in range(settings.num_iter):
        runtime.barrier()
        times.append(milliseconds(step, runtime.device))
        for name, value in trained.clock.take().items():
            total[name] += value
    mean = {name: value / settings.num_iter for name, value in total.items()}
    return runtime.largest(times), _largest(mean, runtime)


def _memory(settings: Settings, trained: Trained, runtime: Runtime) -> dict[str, float]:
    watch = MemoryWatch(trained.model, trained.optimizer, runtime.device)
    stepper(settings, trained, runtime, watch.forward)()
    return _largest(watch.breakdown(), runtime)


def _largest(values: dict[str, float], runtime: Runtime) -> dict[str, float]:
    found = runtime.largest(list(values.values()))
    return {name: round(value, 3) for name, value in zip(values, found, strict=True)}


def _with_reduction(phases: dict[str, float], collectives: dict[str, float]) -> dict[str, float]:
    reduction = collectives.get("reduce_scatter", 0.0) + collectives.get("all_reduce", 0.0)
    return {**phases, "reduction": round(reduction, 3)}


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError("--lora-rank needs the package peft (pip install peft)") from error
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise UsageError("--lora-rank: the model has no linear layers")
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")
    return get_peft_model(model, config)  # type: ignore[arg-type]


def _sharded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from opacus.utils.fsdp_utils import FSDP2Wrapper

    half = dtype if dtype is not torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    return FSDP2Wrapper(model, mp_policy=policy)


def _make_private(settings: Settings, trained: Trained, runtime: Runtime) -> None:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from opacus import PrivacyEngine

    samples = TensorDataset(torch.zeros(64 * settings.batch_size * runtime.world_size, 1))
    sampler: Any = DistributedSampler(samples, runtime.world_size, runtime.rank)
    loader = DataLoader(samples, batch_size=settings.batch_size, sampler=sampler)
    options = {} if settings.deferred is None else {"deferred_norm": settings.deferred}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about data loaders; the data are random here
        made = PrivacyEngine().make_private(
            module=trained.model,
            optimizer=trained.optimizer,
            criterion=trained.criterion,
            data_loader=loader,
            noise_multiplier=settings.sigma,
            max_grad_norm=settings.max_grad_norm,
            grad_sample_mode=settings.mode,
            poisson_sampling=False,
            **options,
        )
    trained.model, trained.optimizer = made[0], made[1]
    if len(made) == 4:
        # "auto" returns four also where it chose a mode that leaves the criterion as it is.
        trained.wrapped_loss = made[2] is not trained.criterion
        trained.criterion = made[2]


def is_deferred(trained: Trained) -> bool:
    """Whether the norms of this model wait for the end of the backward pass."""
    return bool(getattr(trained.model, "_use_deferred_norm", False))


def stands_for(trained: Trained) -> str | None:
    """The mode that ``auto`` chose; nothing in other modes."""
    choice = getattr(trained.model, "auto_choice", None)
    return None if choice is None else str(choice.mode)


def _description(settings: Settings, trained: Trained, runtime: Runtime) -> dict[str, Any]:
    device, model = runtime.device, settings.model
    config = {k: v for k, v in asdict(settings).items() if k != "model"}
    config |= {k: v for k, v in asdict(model).items() if k != "token"}
    config["task"] = model.resolved_task
    config["dtype"] = str(settings.dtype_on(device)).removeprefix("torch.")
    config["environment"] = {k: v for k, v in os.environ.items() if k.startswith("OPACUS_")}
    config["weights"] = "random" if model.shape else "of the folder or hub"
    parameters = list(trained.model.parameters())
    config["parameters"] = sum(p.numel() for p in parameters)
    config["trainable_parameters"] = sum(p.numel() for p in parameters if p.requires_grad)
    cuda = device.type == "cuda"
    return {
        "status": "ok",
        "mode": settings.mode,
        "model": model.name,
        "task": model.resolved_task,
        "seq_length": model.seq_length,
        "batch_size": settings.batch_size,
        "total_batch_size": settings.batch_size * runtime.world_size,
        "num_gpus": runtime.world_size if cuda else 0,
        "deferred": is_deferred(trained),
        "stands_for": stands_for(trained),
        "memory_source": "allocator" if cuda else "resident set",
        "device_memory_gb": _device_memory(device),
        "config": config,
        **description(runtime),
    }


def _device_memory(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return round(torch.cuda.get_device_properties(device).total_memory / MB / 1024, 1)


def description(runtime: Runtime) -> dict[str, Any]:
    """Where and when something is measured."""
    device = runtime.device
    cuda = device.type == "cuda"
    return {
        "num_processes": runtime.world_size,
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()})",
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
