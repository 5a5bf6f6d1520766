"""grad_sample_mode="auto" on two ranks: one choice, and the numbers of the two-pass mode."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus import PrivacyEngine
from opacus.core.kernels.host.operands import triton_is_installed
from opacus.core.step import auto
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.grad_sample import wrap_model
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.modes import assert_close
from tests.helpers.oracle import clipped_sum, per_sample_gradients

B, CLIP = 6, 0.4
# How a model is spread over two ranks, the mode to compare with, and the one that is chosen.
LAYOUTS = {
    "fsdp": ("ghost_fsdp", "ghost_fsdp_bk"),
    "ddp": ("ghost", "ghost_bk"),
    "dpddp": ("ghost", "ghost_bk"),
    "tensor": ("ghost_tp", "ghost_tp"),
    "both": ("ghost_fsdp", "ghost_fsdp"),
}


class Net(nn.Module):
    """A layer to split in columns, one in rows, and one with no rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.scale(x))))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Plain(Net):
    """Without it, for layouts in which activations are DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Identity()


def net(layout: str) -> Net:
    torch.manual_seed(0)
    with torch.device("cpu"):  # the same weights on every device
        return Plain() if layout in ("tensor", "both") else Net()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    with torch.device("cpu"):
        return torch.randn(B, 4) * 3, torch.arange(B) % 2


def spread(layout: str, world_size: int) -> nn.Module:
    model = net(layout).to(torch.get_default_device())
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "dpddp":
        return DPDDP(model)
    if layout == "fsdp":
        return FSDP2Wrapper(model)
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(model, mesh["tensor"], plan)
    return FSDP2Wrapper(model, mesh=mesh["data"]) if layout == "both" else model


def private(layout: str, mode: str, world_size: int) -> tuple[Any, ...]:
    model = spread(layout, world_size)
    data = TensorDataset(*batch())
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=B, sampler=DistributedSampler(data, shuffle=False)),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )


def train(rank: int, world_size: int, layout: str) -> dict[str, Any]:
    """One step with the mode that is known to be right, and with auto."""
    progress(layout)
    found: dict[str, Any] = {}
    device = torch.get_default_device()
    inputs, targets = (tensor.to(device) for tensor in batch())
    rows = slice(None) if layout in ("tensor", "both") else slice(rank, None, world_size)
    for mode in (LAYOUTS[layout][0], "auto"):
        model, optimizer, loss_fn, _ = private(layout, mode, world_size)
        loss_fn(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
        grads = [p.grad for p in optimizer.params]
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        found[mode] = (model.per_sample_gradient_norms, full)
    found["choice"] = model.auto_choice
    found["text"] = model.explain()
    return found


def train_all(rank: int, world_size: int, layouts: Sequence[str]) -> dict[str, Any]:
    """All layouts in one set of processes; starting those is what takes the time."""
    return {layout: train(rank, world_size, layout) for layout in layouts}


@functools.cache
def results_of(backend: str = "gloo", layouts: tuple[str, ...] = tuple(LAYOUTS)) -> list[Any]:
    return run_distributed(train_all, 2, layouts, backend=backend)


def check(layout: str, results: list[dict[str, Any]], known: str, chosen: str) -> None:
    """The same choice on all ranks; the numbers of ``known``, which are those of the oracle."""
    loss = nn.CrossEntropyLoss()
    samples = per_sample_gradients(net(layout), lambda m, b: loss(m(b[0]), b[1]), batch())
    want = [w / B for w in clipped_sum(samples, CLIP).values()]
    assert [r["choice"].mode for r in results] == [chosen, chosen]
    assert results[0]["choice"] == results[1]["choice"]
    for result in results:
        assert result["text"].startswith(f"grad_sample_mode='auto' chose {chosen!r}")
        assert ("extra ms" in result["text"]) == chosen.endswith("_bk")
        torch.testing.assert_close(result["auto"][0], result[known][0])
        for got, same in zip(result["auto"][1], result[known][1], strict=True):
            torch.testing.assert_close(got, same)
        assert_close(result["auto"][1], want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_choose_the_same_and_the_numbers_are_right(layout: str) -> None:
    check(layout, [r[layout] for r in results_of()], *LAYOUTS[layout])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", ["fsdp", "dpddp"])
def test_two_gpus(layout: str) -> None:
    known, chosen = LAYOUTS[layout]
    if triton_is_installed() and layout != "fsdp":  # why not there: auto._kernels
        chosen = chosen.replace("ghost", "flash")
    check(layout, [r[layout] for r in results_of("nccl", ("fsdp", "dpddp"))], known, chosen)


def helpers(rank: int, world_size: int) -> tuple[str, str]:
    model = wrap_model(spread("fsdp", world_size), "auto")
    return type(model).__name__, model.auto_choice.mode


def unlike(rank: int, world_size: int) -> str:
    """Rank 1 pretends to be a host on which another mode would be chosen."""
    if rank:
        auto._kernels = lambda facts, one_pass: (True, "a host with a GPU")  # type: ignore[assignment]
    try:
        private("fsdp", "auto", world_size)
    except ValueError as error:
        return str(error)
    return "accepted"


def no_criterion(rank: int, world_size: int) -> str:
    """Rank 1 has forgotten the criterion: rank 0 must not wait for it."""
    model = spread("fsdp", world_size)
    data = DataLoader(TensorDataset(*batch()), batch_size=B)
    try:
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=data,
            noise_multiplier=0.0,
            max_grad_norm=CLIP,
            grad_sample_mode="auto",
            criterion=None if rank else nn.CrossEntropyLoss(),
        )
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


def several(rank: int, world_size: int) -> list[Any]:
    return [job(rank, world_size) for job in (helpers, no_criterion, unlike)]


def test_helpers_and_ranks_that_differ() -> None:
    for wrapped, without, differing in run_distributed(several, 2):
        assert wrapped == ("GradSampleModuleFastGradientClippingFSDP", "ghost_fsdp_bk")
        assert "criterion" in without
        assert "ranks must agree" in differing
        assert "ghost_fsdp_bk" in differing and "flash_fsdp_bk" in differing
