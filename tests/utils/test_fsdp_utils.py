"""FSDP2Wrapper on layers that show parameters of their parts as their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.platform.sharded import is_fsdp
from opacus.grad_sample import GradSampleModule
from opacus.layers import DPLSTM
from opacus.layers.dp_rnn import RNNLinear
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import run_distributed

C = 0.3


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.lstm = DPLSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(ids))[0].mean(1))


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 11, (6, 5)), torch.randint(0, 3, (6,))


def summed(model: nn.Module, mode: str, rows: slice) -> list[Tensor]:
    x, y = data()
    made: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
        loss_reduction="sum",
        noise_multiplier=0.0,
        max_grad_norm=C,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    loss_fn = made[2] if len(made) == 4 else nn.CrossEntropyLoss(reduction="sum")
    loss_fn(made[0](x[rows]), y[rows]).backward()
    made[1].step()
    return [p.grad for p in model.parameters()]


def build() -> nn.Module:
    torch.manual_seed(0)
    return Tagger()


def each_layer_a_unit(rank: int, world_size: int) -> list[Any]:
    results = []
    for mode in ("ghost_fsdp", "ghost_fsdp_bk"):
        model = FSDP2Wrapper(build(), wrap_individual_layers=True)
        units = [name for name, module in model.named_modules() if is_fsdp(module)]
        grads = summed(model, mode, slice(3 * rank, 3 * rank + 3))
        results.append((units, [g.full_tensor() for g in grads]))
    alone = FSDP2Wrapper(DPLSTM(3, 2), wrap_individual_layers=True)
    results.append([name for name, module in alone.named_modules() if is_fsdp(module)])
    return results


def test_wrapping_each_layer_leaves_a_renaming_layer_whole() -> None:
    want = summed(build(), "hooks", slice(None))
    assert all(grad.norm() > 1e-3 for grad in want)
    for *runs, alone in run_distributed(each_layer_a_unit, 2):
        assert alone == [""]
        for units, grads in runs:
            assert units == ["", "table", "lstm", "head"]
            for got, grad in zip(grads, want, strict=True):
                torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-6)


def test_a_part_of_it_in_high_precision_is_refused() -> None:
    model = build()
    said = r"RNNLinear is a part of 'lstm' \(DPLSTM\).*name DPLSTM instead"
    with pytest.raises(ValueError, match=said):
        FSDP2Wrapper(model, opacus_high_precision_layers=(nn.Embedding, RNNLinear))
    assert not any(is_fsdp(module) for module in model.modules())


def test_a_private_model_is_not_sharded() -> None:
    private = GradSampleModule(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="private already: shard it first"):
        FSDP2Wrapper(private)
