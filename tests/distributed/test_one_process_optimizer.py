"""A model made private for one process is not trained by several ranks."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.distributed import run_distributed


def step(rank: int, world_size: int) -> list[str]:
    said = []
    for mode in ("hooks", "ghost_bk"):
        for kind in ("plain", "DDP around", "independent", "DDP"):
            os.environ["OPACUS_INDEPENDENT_RANKS"] = str(int(kind == "independent"))
            model: nn.Module = nn.Linear(4, 3)
            if kind == "DDP":
                model = DistributedDataParallel(model)
            engine = PrivacyEngine()
            out = engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                criterion=nn.CrossEntropyLoss(),
                data_loader=DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=4),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                poisson_sampling=False,
                grad_sample_mode=mode,
            )
            private = DistributedDataParallel(out[0]) if kind == "DDP around" else out[0]
            criterion = out[2] if len(out) == 4 else nn.CrossEntropyLoss()
            criterion(private(torch.randn(4, 4)), torch.zeros(4).long()).backward()
            before = [p.detach().clone() for p in model.parameters()]
            try:
                out[1].step()
                assert len(engine.accountant) == 1
                said.append("")
            except RuntimeError as error:
                assert len(engine.accountant) == 0
                assert all(map(torch.equal, before, model.parameters()))
                said.append(str(error))
    return said


def test_first_step_is_refused_unless_meant() -> None:
    for said in run_distributed(step, 2):
        for plain, around, independent, ddp in (said[:4], said[4:]):
            assert "made private for one process, but there are 2 ranks" in plain
            assert "put no wrapper around the private model" in around
            assert independent == ddp == ""
