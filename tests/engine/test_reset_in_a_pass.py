"""A logical batch that is dropped in the middle of a pass, also by loops that fetch ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager


def private(mode: str) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    made: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.randn(12, 4), torch.arange(12) % 2), 4),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    return made if len(made) == 4 else (*made[:2], nn.CrossEntropyLoss(), made[2])


def fetched_ahead(loader: Any, number: int) -> Iterator[Any]:
    batches = iter(loader)
    waiting = deque(itertools.islice(batches, number))
    for batch in batches:
        waiting.append(batch)
        yield waiting.popleft()
    yield from waiting


def weights(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_the_rest_of_a_batch_that_was_dropped_is_not_released(mode: str, number: int) -> None:
    """Each later part keeps its signal: the batches after it are released whole, as they are."""
    model, optimizer, criterion, loader = private(mode)
    moved = []
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as physical:
        for part, (x, y) in enumerate(fetched_ahead(physical, number)):
            before = weights(model)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            if part == 3:
                with pytest.raises(RuntimeError, match="physical batch of this logical batch"):
                    optimizer.step()
            else:
                optimizer.step()
            moved.append(not torch.equal(weights(model), before))
            if part == 2:
                optimizer.reset_accumulation()
    assert moved == [False, True, False, False, False, True]
    other, again, loss, _ = private(mode)
    x, y = loader.dataset.tensors
    for rows in (slice(0, 4), slice(8, 12)):
        again.zero_grad()
        loss(other(x[rows]), y[rows]).backward()
        again.step()
    torch.testing.assert_close(weights(model), weights(other))
