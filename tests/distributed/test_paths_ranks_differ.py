"""Ranks whose batches leave out all layers of an FSDP2 unit, or those of one call of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers.distributed import attempt, run_distributed
from tests.helpers.sharded import full

B, D, CLIP = 3, 5, 0.5
MODES = [("ghost_fsdp", False), ("ghost_fsdp", True), ("ghost_fsdp_bk", False)]
# Of each rank, for each call of the model before one backward pass: blocks that do nothing in it.
PATHS: dict[str, list[list[set[int]]]] = {
    "crossed": [[{0}], [{1}]],
    "one rank": [[{0, 1}], [set()]],
    "one call": [[{0}, set()], [set(), {1}]],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, rests: bool) -> Tensor:
        return x if rests else x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(D, D), nn.Linear(D, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.resting: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for place, block in enumerate(self.blocks):
            x = block(x, place in self.resting)
        output: Tensor = self.head(x)
        return output


def batch(rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(B, D, generator=random) * torch.tensor([0.1, 1.0, 3.0]).view(B, 1)
    return x, torch.randint(4, (B,), generator=random)


def error_of(rank: int, name: str, mode: str, deferred: bool) -> float:
    torch.manual_seed(0)
    net, double = Net(), Net()
    double.load_state_dict(net.state_dict())
    paths, data = PATHS[name][rank], batch(rank)

    def loss_of(model: Any, one: tuple[Tensor, Tensor]) -> Tensor:
        total = torch.zeros(())
        for view, resting in enumerate(paths):
            model.resting = resting
            total = total + nn.functional.cross_entropy(model(one[0] + view), one[1])
        return total

    grads = oracle.per_sample_gradients(double, loss_of, data)
    norms = oracle.norms(grads)
    assert (norms > 1.1 * CLIP).any()
    want = oracle.clipped_sum(grads, CLIP)
    for total in want.values():
        dist.all_reduce(total)

    model = FSDP2Wrapper(net)
    module, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=8),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        loss_reduction="sum",
        grad_sample_mode=mode,
        deferred_norm=deferred or len(paths) > 1,
    )
    losses = []
    for view, resting in enumerate(paths):
        net.resting = resting
        losses.append(criterion(module(data[0] + view), data[1]))
    sum(losses[1:], losses[0]).backward()
    optimizer.step()
    found = {n: full(p.grad) for n, p in net.named_parameters() if p.grad is not None}
    return max(oracle.relative_error(found[n], total) for n, total in want.items())


def errors(rank: int, world_size: int) -> dict[Any, Any]:
    cases = [(name, *mode) for name in PATHS for mode in MODES]
    return {case: attempt(error_of, rank, *case) for case in cases}


def test_the_sum_is_the_oracles() -> None:
    for rank in run_distributed(errors, 2):
        for case, error in rank.items():
            assert not isinstance(error, str) and error < 2e-5, (case, error)
