"""FSDP2: what the optimizer does not hold takes no part; gradients are summed whenever they come."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers.distributed import progress, run_distributed

MODES = ["ghost_fsdp", "ghost_fsdp_bk"]
C, ROWS = 0.05, 8


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))


def private(net: Any, mode: str, held: Any) -> Any:
    return PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(held, lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        data_loader=DataLoader(TensorDataset(torch.zeros(32, 1)), batch_size=8),
        noise_multiplier=0.0,
        max_grad_norm=C,
        poisson_sampling=False,
        loss_reduction="sum",
        grad_sample_mode=mode,
    )


def shares(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = data()
    return inputs[4 * rank :][:4], targets[4 * rank :][:4]


def whole(parameters: Any) -> list[torch.Tensor]:
    return [p.grad.full_tensor().clone() for p in parameters]


def partly_held(rank: int, mode: str, names: tuple[str, ...]) -> Any:
    """The gradients of what is held, and whether the others have any."""
    net = FSDP2Wrapper(build())
    held = [p for name, p in net.named_parameters() if name.endswith(names)]
    left = [p for name, p in net.named_parameters() if not name.endswith(names)]
    model, optimizer, criterion, _ = private(net, mode, held)
    inputs, targets = shares(rank)
    for _ in range(2):
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
    return whole(held), all(p.grad is None or not p.grad.full_tensor().any() for p in left)


def synchronised_late(rank: int, mode: str) -> Any:
    net = FSDP2Wrapper(build())
    model, optimizer, criterion, _ = private(net, mode, net.parameters())
    inputs, targets = shares(rank)
    for _ in range(2):
        optimizer.zero_grad()
        for start in (0, 2):
            net.set_requires_gradient_sync(start == 2)
            criterion(model(inputs[start : start + 2]), targets[start : start + 2]).backward()
        optimizer.step()
    return whole(net.parameters())


def unfrozen(rank: int, mode: str) -> str:
    net = build()
    net[0].requires_grad_(False)
    net = FSDP2Wrapper(net)
    model, _, _, _ = private(net, mode, net.parameters())
    net[0].weight.requires_grad_(True)
    try:
        model(shares(rank)[0])
    except RuntimeError as error:
        return str(error)
    return ""


def cases(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for mode in MODES:
        progress(mode)
        parts = {names: partly_held(rank, mode, names) for names in HELD}
        found[mode] = (parts, synchronised_late(rank, mode), unfrozen(rank, mode))
    return found


HELD = [("2.weight", "2.bias"), ("0.weight", "2.bias"), ("0.bias",)]


def expected(names: tuple[str, ...]) -> list[torch.Tensor]:
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)

    def loss(model: nn.Module, sample: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(sample[0]), sample[1])

    gradients = oracle.per_sample_gradients(model, loss, data())
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0)
    assert squares.sqrt().min() > C
    sums = oracle.clipped_sum(gradients, C)
    return [sums[name] for name, p in model.named_parameters() if p.requires_grad]


def test_only_what_is_held_is_clipped_and_late_sums_are_whole() -> None:
    every = tuple(name for name, _ in build().named_parameters())
    for found in run_distributed(cases, 2):
        for mode, (parts, late, refusal) in found.items():
            for names, (grads, others_are_empty) in parts.items():
                assert others_are_empty, (mode, names)
                for got, want in zip(grads, expected(names), strict=True):
                    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
            for got, want in zip(late, expected(every), strict=True):
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
            assert "0.weight'] were made trainable after make_private" in refusal, mode
