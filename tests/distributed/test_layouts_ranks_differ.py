"""Ranks with different batches run the same collectives, and sum up the same samples."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers.distributed import attempt, run_distributed
from tests.helpers.sharded import full

N, B, CLIP = 12, 6, 2.0
WAYS = [("ghost_fsdp", False), ("ghost_fsdp", True), ("ghost_fsdp_bk", False)]
# Rows of the batch, per rank. Only samples 0, 1, 8 and 9 take the extra branch.
SPLITS = {
    "both": ([0, 2, 3], [1, 4, 5]),
    "one": ([2, 3], [0, 1, 4, 5]),
    "neither": ([2, 3, 4], [5, 6, 7]),
    "empty": ([], [0, 2, 3]),
}


class Extra(nn.Module):
    """Layers that only batches with a marked sample run."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(5, 5)
        self.down = nn.Linear(5, 3)
        self.up = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, 0] > 5
        h = torch.tanh(self.main(x))
        if bool(marked.any()):
            h = h + self.norm(self.up(self.down(x))) * marked.unsqueeze(1)
        return h


class Net(nn.Module):
    """A stem that keeps the mark, two blocks with a branch, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Extra(), Extra()])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.cat([x[:, :1], block(x)[:, 1:]], 1)  # the mark stays
        return self.head(x / 4)


class Data(Dataset[Any]):
    """Samples with their index, so that a test knows which ones were drawn."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.inputs = torch.randn(N, 5) * torch.linspace(0.5, 2, N).unsqueeze(1)
        self.inputs[:, 0] = torch.where(torch.arange(N) % 8 < 2, 9.0, -9.0)
        self.targets = torch.randint(0, 3, (N,))

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], int(index)


class Collectives(TorchDispatchMode):
    """Lists the collectives that are started while it is active, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def build() -> Net:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return Net()


def sharded(how: str) -> nn.Module:
    net = build().to(torch.get_default_device())
    return FSDP2Wrapper(net) if how == "blocks" else fully_shard(net)


def make_private(net: nn.Module, mode: str, deferred: bool, **kwargs: Any) -> Any:
    data = Data()
    sampler = DistributedSampler(data, shuffle=False)
    arguments = {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.0),
        "criterion": nn.CrossEntropyLoss(reduction="sum"),
        "data_loader": DataLoader(data, batch_size=B // 2, sampler=sampler),
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "poisson_sampling": False,
        "loss_reduction": "sum",
        "grad_sample_mode": mode,
        "deferred_norm": deferred,
    }
    return PrivacyEngine().make_private(**{**arguments, **kwargs})


def run_all(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for mode, deferred in WAYS:
        for how in ("blocks", "root"):
            for split in SPLITS:
                key = (split, how, mode, deferred)
                results[key] = attempt(one_step, rank, *key)
        results["accumulated", mode, deferred] = attempt(accumulated, rank, mode, deferred)
        results["poisson", mode, deferred] = attempt(poisson, rank, mode, deferred)
    return results


def one_step(rank: int, split: str, how: str, mode: str, deferred: bool) -> dict[str, Any]:
    net = sharded(how)
    module, optimizer, criterion, _ = make_private(net, mode, deferred)
    rows = SPLITS[split][rank]
    with Collectives() as seen:
        _backward(module, criterion, rows)
        optimizer.step()
    return {"grads": _grads(net), "collectives": seen.names}


def accumulated(rank: int, mode: str, deferred: bool) -> dict[str, Any]:
    """Two batches a step, on one rank empty, with different branches."""
    net = sharded("blocks")
    module, optimizer, criterion, _ = make_private(net, mode, deferred)
    with Collectives() as seen:
        for rows in (SPLITS["one"][rank], SPLITS["empty"][rank]):
            _backward(module, criterion, rows)
        optimizer.step()
    return {"grads": _grads(net), "collectives": seen.names}


def poisson(rank: int, mode: str, deferred: bool, seed: int = 6) -> dict[str, Any]:
    """Poisson batches in physical ones of two samples; what was drawn and summed."""
    net = sharded("blocks")
    engine = PrivacyEngine(accountant="rdp")
    data = Data()
    module, optimizer, criterion, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), max_grad_norm=CLIP,
        criterion=nn.CrossEntropyLoss(), noise_multiplier=1e-9, grad_sample_mode=mode,
        deferred_norm=deferred, data_loader=DataLoader(
            data, batch_size=3, generator=torch.Generator().manual_seed(seed)
        ),
    )  # fmt: skip
    device = torch.get_default_device()
    steps, drawn, sizes = [], [], []
    with (
        BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as physical,
        Collectives() as seen,
    ):
        for x, y, index in physical:
            drawn += index.tolist()
            sizes.append(len(x))
            criterion(module(x.to(device)), y.to(device)).backward()
            optimizer.step()
            if not optimizer._is_last_step_skipped:
                steps.append({"drawn": drawn, "grads": _grads(net), "sizes": sizes})
                drawn, sizes = [], []
            optimizer.zero_grad()
    return {
        "steps": steps,
        "collectives": seen.names,
        "rate": loader.sample_rate,
        "history": [tuple(entry) for entry in engine.accountant.history],
        "expected_batch_size": optimizer.expected_batch_size,
    }


def _backward(module: Any, criterion: Any, rows: list[int]) -> None:
    data, device = Data(), torch.get_default_device()
    inputs, targets = data.inputs[rows].to(device), data.targets[rows].to(device)
    criterion(module(inputs), targets).backward()


def _grads(net: nn.Module) -> dict[str, Tensor]:
    return {n: full(p.grad).clone() for n, p in net.named_parameters()}


@functools.cache
def results_of(backend: str = "gloo") -> list[dict[Any, Any]]:
    return run_distributed(run_all, 2, backend=backend, fresh=True)


@functools.cache
def gradients() -> dict[str, Tensor]:
    """Of all samples, each by itself, in float64."""
    data = Data()

    def loss(net: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(net(one[0]), one[1])

    return oracle.per_sample_gradients(build(), loss, (data.inputs, data.targets))


def clipped_sum(rows: list[int]) -> dict[str, Tensor]:
    return oracle.clipped_sum({n: g[rows] for n, g in gradients().items()}, CLIP)


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    scale = max(w.abs().max().item() for w in want.values())
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert (tensor.double() - want[name]).abs().max() <= 1e-5 * scale + 1e-12, name


def both(key: Any) -> tuple[Any, Any]:
    one, other = (results[key] for results in results_of())
    assert not isinstance(one, str), one
    assert not isinstance(other, str), other
    assert one["collectives"] == other["collectives"] and one["collectives"]
    return one, other


def test_the_samples_are_clipped_and_some_take_the_branch() -> None:
    norms = oracle.norms(gradients())
    assert (norms > 1.01 * CLIP).any() and (norms < 0.99 * CLIP).any()
    branch = gradients()["blocks.0.up.weight"].flatten(1).norm(dim=1)
    assert (branch > 0).nonzero().flatten().tolist() == [0, 1, 8, 9]


@pytest.mark.parametrize("mode,deferred", WAYS)
@pytest.mark.parametrize("how", ["blocks", "root"])
@pytest.mark.parametrize("split", SPLITS)
def test_a_branch_that_some_ranks_skip(split: str, how: str, mode: str, deferred: bool) -> None:
    rows = [*SPLITS[split][0], *SPLITS[split][1]]
    for got in both((split, how, mode, deferred)):
        close(got["grads"], clipped_sum(rows))


@pytest.mark.parametrize("mode,deferred", WAYS)
def test_batches_that_accumulate(mode: str, deferred: bool) -> None:
    rows = [row for split in ("one", "empty") for part in SPLITS[split] for row in part]
    for got in both(("accumulated", mode, deferred)):
        close(got["grads"], clipped_sum(rows))


@pytest.mark.parametrize("how", ["blocks", "root"])
@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk"])
def test_as_many_collectives_whatever_the_batch_and_the_time_of_the_norms(
    mode: str, how: str
) -> None:
    ways = [way for way in WAYS if way[0] == mode]
    seen = [both((s, how, *way))[0]["collectives"] for way in ways for s in SPLITS]
    assert all(names == seen[0] for names in seen)


@pytest.mark.parametrize("mode,deferred", WAYS)
def test_poisson_batches_of_different_size(mode: str, deferred: bool) -> None:
    one, other = both(("poisson", mode, deferred))
    assert len(one["steps"]) == len(other["steps"]) == 4
    uneven = empty = False
    for a, b in zip(one["steps"], other["steps"], strict=True):
        assert len(a["sizes"]) == len(b["sizes"])  # as many physical batches
        uneven |= len(a["drawn"]) != len(b["drawn"])
        empty |= 0 in a["sizes"] or 0 in b["sizes"]
        rows = [*a["drawn"], *b["drawn"]]
        assert len(set(rows)) == len(rows)  # no sample twice, no dummy
        want = {n: t / 3 for n, t in clipped_sum(rows).items()}
        close(a["grads"], want)
        close(b["grads"], want)
    assert uneven and empty
    for result in (one, other):
        assert result["expected_batch_size"] == pytest.approx(1.5)
        assert result["rate"] == pytest.approx(3 / N)
        assert result["history"] == [(1e-9, pytest.approx(3 / N), 4)]
