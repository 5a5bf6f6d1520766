"""FSDP2 with compiled blocks: ranks get the clipped sums that eager blocks give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed

B, CLIP = 7, 0.4
WAYS: dict[str, dict[str, Any]] = {
    "one pass": {"grad_sample_mode": "ghost_fsdp_bk"},
    "deferred": {"grad_sample_mode": "flash_fsdp_bk", "deferred_norm": True},
    "two passes": {"grad_sample_mode": "ghost_fsdp"},
    "replicated": {"grad_sample_mode": "ghost_fsdp_bk", "data_layout": "replicated"},
    "empty ranks": {"grad_sample_mode": "ghost_fsdp_bk"},
    "checkpoints": {"grad_sample_mode": "ghost_fsdp_bk", "deferred_norm": True},
    "blocks' own checkpoints": {"grad_sample_mode": "ghost_fsdp_bk"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.checkpoints = way == "checkpoints"
        self.stem = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if "own" in way:
            self.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in self.blocks)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        output: Tensor = self.head(x.mean(1))
        return output


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(B, 6, 5), torch.randint(0, 4, (B,))


def mine(rank: int, world_size: int, way: str) -> slice:
    """Samples of a rank: three and four, say, or all of them on the first one."""
    if way == "replicated":
        return slice(0, B)
    if way == "empty ranks":
        return slice(0, B if rank == 0 else 0)
    borders = [i * B // world_size for i in range(world_size + 1)]
    return slice(borders[rank], borders[rank + 1])


def summed(rank: int, world_size: int, way: str, compiled: bool) -> tuple[list[Tensor], Tensor]:
    """What two steps release without noise, and the norms of all samples."""
    progress((way, compiled))
    torch._dynamo.reset()
    counters.clear()
    options = dict(WAYS[way])
    torch.manual_seed(4)
    net = Net(way)
    for block in net.blocks if compiled else ():
        block.compile(backend="aot_eager")
    model = FSDP2Wrapper(net)
    x, y = data()
    model, optimizer, loss_fn, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=B),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        loss_reduction="sum",
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        **options,
    )
    rows = mine(rank, world_size, way)
    for _ in range(2):
        optimizer.zero_grad()
        loss_fn(model(x[rows]), y[rows]).backward()
        norms = model.gather_norm_samples()
        optimizer.step()
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [v.detach().clone() for v in values], norms


def compare(rank: int, world_size: int, ways: list[str]) -> None:
    import warnings

    # torch.compile causes them in torch, and hides them from stderr only.
    warnings.filterwarnings("ignore")
    for way in ways:
        eager, norms = summed(rank, world_size, way, False)
        compiled, again = summed(rank, world_size, way, True)
        assert (norms > CLIP * 1.01).any(), "nothing is clipped"
        if "own" in way and len(range(B)[mine(rank, world_size, way)]) > 1:
            # One to learn from, one with carriers; none where they run again.
            assert counters["stats"]["unique_graphs"] == 2
        torch.testing.assert_close(again, norms, rtol=1e-5, atol=1e-6)
        for value, other in zip(compiled, eager, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_compiled_blocks_under_fsdp2(world_size: int) -> None:
    run_distributed(compare, world_size, list(WAYS))
