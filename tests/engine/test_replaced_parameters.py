"""Parameters that take the place of those that the optimizer holds are refused, not ignored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.distributed import run_distributed

MODES = ["hooks", "functorch", "ew", "ghost", "flash", "ghost_bk", "flash_bk"]
REFUSED = r"parameters \['0\.bias'.*are not those that make_private was given.*without assign=True"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 3)))


class Run:
    def __init__(self, module: nn.Module, mode: str) -> None:
        data = TensorDataset(torch.randn(16, 4), torch.randint(3, (16,)))
        made: Any = PrivacyEngine(accountant="rdp").make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
        )
        self.module, self.optimizer, *loss, _ = made
        self.loss = loss[0] if loss else nn.CrossEntropyLoss()

    def step(self) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(8, 4, dtype=next(self.module.parameters()).dtype)
        self.loss(self.module(inputs), torch.zeros(8, dtype=torch.long)).backward()
        self.optimizer.step()


def of_the_wrapper(module: Any) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


def of_the_model(module: Any) -> None:
    of_the_wrapper(module._module)


def of_a_layer(module: Any) -> None:
    of_the_wrapper(module._module[0])


def by_hand(module: Any) -> None:
    layer = module._module[0]
    layer.weight, layer.bias = map(nn.Parameter, (layer.weight.data, layer.bias.data))


WAYS = [of_the_wrapper, of_the_model, of_a_layer, by_hand]


@pytest.mark.parametrize("replace", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_other_parameters_are_refused(mode: str, replace: Callable[[Any], None]) -> None:
    run = Run(model(), mode)
    run.step()
    replace(run.module)
    with pytest.raises(RuntimeError, match=REFUSED):
        run.step()
    run.module.eval()  # of which nothing is released
    run.module(torch.randn(2, 4))
    # What the error says helps.
    again = Run(run.module.to_standard_module().train(), mode)
    before = [p.detach().clone() for p in again.module.parameters()]
    again.step()
    assert not any(map(torch.equal, again.module.parameters(), before))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_parameters_with_other_values_or_types_go_on(mode: str) -> None:
    run = Run(model(), mode)
    run.module.load_state_dict(copy.deepcopy(run.module.state_dict()))
    run.step()
    run.module.double()
    run.step()
    run.module.eval().train()
    twin = copy.deepcopy(run.module)
    twin(torch.randn(2, 4).double())
    with torch.no_grad():
        of_a_layer(twin)
        twin(torch.randn(2, 4).double())
    run.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_after_a_forward_pass_that_failed(mode: str) -> None:
    """Layers run on aliases of their parameters, which it may have left in their places."""
    run = Run(model(), mode)
    for rows in (8, 1):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            run.module(torch.randn(rows, 7))
        run.step()


def test_tensors_that_are_lent_for_a_call() -> None:
    """As `torch.func.functional_call` does with values of other runs."""
    run = Run(model(), "hooks")
    run.step()
    lent = {name: torch.zeros_like(p) for name, p in run.module.named_parameters()}
    out = torch.func.functional_call(run.module, lent, torch.randn(2, 4))
    assert not out.any()
    run.step()


def sharded(rank: int, world_size: int, mode: str) -> list[str]:
    errors = []
    for replace in WAYS[:3]:
        torch.manual_seed(0)
        module = model()
        for part in (module[2], module):
            fully_shard(part)
        run = Run(module, mode)
        torch.manual_seed(rank)
        run.step()
        run.module.load_state_dict(run.module.state_dict())
        with torch.no_grad():
            run.module(torch.randn(3, 4))  # leaves parameters of the last part whole
        run.step()
        replace(run.module)
        try:
            run.step()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk"])
def test_sharded_ones(mode: str) -> None:
    for errors in run_distributed(sharded, 2, mode):
        assert all("are not those that make_private was given" in error for error in errors), errors
