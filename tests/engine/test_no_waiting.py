"""No step waits for the device: nothing that the host decides depends on the data.

What may wait, and why: ``loss.item()``, which the user asks for; a step under ``GradScaler``,
which reads whether there was an overflow; under FSDP2 the comparison of the ranks' batches, which
must come before they are summed: once with sharded data, in each step with replicated data; and
where records are weighted after the backward pass, an event, once: whether samples are excluded,
since otherwise all that the layers recorded would have to be masked; and where a table and a head
share a weight, whether terms of its norms have cancelled. On a CPU, where that costs nothing, a step looks whether samples are excluded and whether norms by Gram
matrices have cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.kernels.norms import reference
from opacus.core.privacy import clipping
from opacus.core.sums import one_pass, two_pass
from opacus.optimizers import utils
from tests.core.rules.dispatched import Dispatched
from tests.helpers.distributed import run_distributed
from tests.helpers.problems import SequenceLoss

B, T, WORDS = 4, 6, 11
MODES = [
    *(("hooks", False), ("functorch", False), ("ew", False)),
    *((mode, d) for mode in ("ghost", "flash", "ghost_bk", "flash_bk") for d in (False, True)),
]
SHARDED = [
    (mode, d)
    for mode in ("ghost_fsdp", "flash_fsdp", "ghost_fsdp_bk", "flash_fsdp_bk")
    for d in (False, True)
]


class Scale(nn.Module):
    """A layer that only the generic rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def make_model() -> nn.Module:
    layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.RMSNorm(8), Scale()]
    return nn.Sequential(nn.Embedding(WORDS, 8), *layers, nn.Linear(8, WORDS))


def step_of(mode: str, deferred: bool, device: str) -> Callable[[], None]:
    """A whole private step, warmed up: what is measured or agreed on once is known."""
    torch.manual_seed(0)
    model = make_model().to(device)
    if "fsdp" in mode:
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model)
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    samples = torch.randint(0, WORDS, (B, T), device=device)
    made = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        criterion=SequenceLoss(),
        data_loader=DataLoader(TensorDataset(samples.cpu()), batch_size=B),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        grad_sample_mode=mode,
        poisson_sampling=False,
        **({"deferred_norm": True} if deferred else {}),
    )
    private, optimizer = made[0], made[1]
    criterion = made[2] if len(made) == 4 else SequenceLoss()
    targets = samples.roll(1, 1)

    def step() -> None:
        optimizer.zero_grad()
        criterion(private(samples), targets).backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


class Waits(TorchDispatchMode):
    """Names the operations that the host waits for, DTensors' too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        if any(name in func.__name__ for name in Dispatched.WAITS):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def waits_of(step: Callable[[], None]) -> list[str]:
    with Waits() as seen:
        step()
    assert seen.total > 50
    return seen.names


def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (clipping, utils):
        monkeypatch.setattr(module, "excluded_or_none", lambda excluded: excluded)
    # There the device itself decides on a replay that differs, and on norms to be mended.
    for module in (two_pass, one_pass):
        monkeypatch.setattr(module, "compared", lambda seen, advice: (seen.differs(), None)[1])
    monkeypatch.setattr(reference, "_settle", lambda pairs, total: total[0].sum(2).unbind())


@pytest.mark.parametrize(("mode", "deferred"), MODES)
def test_a_step_reads_nothing(mode: str, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(mode, deferred, "cpu")
    # Whether samples are excluded, and whether a layer's norms have cancelled.
    assert set(waits_of(step)) == {"_local_scalar_dense.default"}
    as_on_a_device(monkeypatch)
    assert waits_of(step) == []


def sharded_waits(rank: int, world_size: int) -> list[tuple[list[str], list[str]]]:
    found = []
    for mode, deferred in SHARDED:
        step = step_of(mode, deferred, "cpu")
        first = waits_of(step)
        with pytest.MonkeyPatch.context() as patch:
            as_on_a_device(patch)
            found.append((first, waits_of(step)))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sharded_step_reads_nothing(world_size: int) -> None:
    for rank in run_distributed(sharded_waits, world_size):
        assert [(set(first), later) for first, later in rank] == [
            ({"_local_scalar_dense.default"}, [])
        ] * len(SHARDED)


def test_waits_are_noticed() -> None:
    step = step_of("ghost_bk", False, "cpu")
    seen: list[float] = []
    assert "_local_scalar_dense.default" in waits_of(
        lambda: (step(), seen.append(torch.ones(1).item()))[0]
    )
    assert seen == [1.0]


def run_strictly(step: Callable[[], None]) -> None:
    """A step in which whatever makes the host wait for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "deferred"), MODES)
def test_a_step_does_not_wait_for_the_gpu(mode: str, deferred: bool) -> None:
    run_strictly(step_of(mode, deferred, "cuda"))


def strict_sharded_steps(rank: int, world_size: int) -> int:
    for mode, deferred in SHARDED:
        run_strictly(step_of(mode, deferred, "cuda"))
    assert dist.get_backend() == "nccl"
    return len(SHARDED)


@pytest.mark.gpu
def test_a_sharded_step_does_not_wait_for_the_gpu() -> None:
    assert run_distributed(strict_sharded_steps, 1, backend="nccl") == [len(SHARDED)]


@pytest.mark.gpu
def test_waiting_for_the_gpu_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"):
        run_strictly(lambda: torch.ones(1, device="cuda").item())  # type: ignore[arg-type, return-value]
