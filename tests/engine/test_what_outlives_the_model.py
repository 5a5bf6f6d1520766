"""A kept output does not keep the private model, or its gradients, in memory."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import GradSampleModule, PrivacyEngine

MODES = ["hooks", "functorch", "ew", "ghost", "flash", "ghost_bk", "flash_bk"]


def steps(mode: str, batch: int, number: int) -> tuple[dict[str, Any], Tensor]:
    """What the model consists of, held weakly, and the output of its last forward pass."""
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    refs: dict[str, Any] = {"net": weakref.ref(net), "weight": weakref.ref(net[0].weight)}
    model, optimizer, *rest = PrivacyEngine().make_private(
        module=net,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.zeros(64)), batch_size=batch),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        poisson_sampling=False,
    )
    criterion = rest[0] if len(rest) == 2 else nn.CrossEntropyLoss()
    refs |= {"model": weakref.ref(model), "optimizer": weakref.ref(optimizer)}
    for _ in range(number):
        optimizer.zero_grad()
        output = model(torch.randn(batch, 8))
        criterion(output, torch.randint(4, (batch,))).backward()
        optimizer.step()
    return refs, output


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [1, 4])
def test_the_model_is_let_go(mode: str, batch: int) -> None:
    refs, output = steps(mode, batch, number=3)
    gc.collect()
    assert output.grad_fn is not None
    assert [name for name, ref in refs.items() if ref() is not None] == []


def test_a_copy_has_layers_of_its_own() -> None:
    model = GradSampleModule(nn.Linear(3, 2))
    twin = copy.deepcopy(model)
    assert twin._recorder.layers[0].module is twin._module
    del model
    gc.collect()
    twin(torch.randn(4, 3)).sum().backward()
    assert twin._module.weight.grad_sample.shape == (4, 2, 3)


def test_a_backward_pass_without_its_model_says_so() -> None:
    model = GradSampleModule(nn.Linear(3, 2))
    output = model(torch.randn(4, 3))
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="was deleted before"):
        output.sum().backward()
