"""Empty batches, which Poisson sampling draws, in models that cannot run on no rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.record.empty import with_a_row, without_the_row

transformers = pytest.importorskip("transformers")
MODES = ["hooks", "functorch", "ghost", "ghost_bk", "flash_bk"]


class Viewed(nn.Module):
    """Fails on no rows, flattens tokens, looks up positions, and has a layer that sees no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(10, 8), nn.Embedding(6, 8)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids) + self.places(torch.arange(ids.shape[1])[None])
        h = self.inner(h.view(len(ids), -1, 8).tanh())
        return self.head(h.mean(1))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=10, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForSequenceClassification(config)


def train(model: nn.Module, mode: str, batches: list[int], **changes: Any) -> Any:
    """Optimizer and engine after a step on a batch of each size."""
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.arange(32)), batch_size=4),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **changes,
    )
    private, optimizer = made[:2]
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    for n in batches:
        ids, labels = torch.randint(1, 10, (n, 6)), torch.randint(0, 3, (n,))
        optimizer.zero_grad()
        output = private(ids)
        logits = output if isinstance(output, Tensor) else output.logits
        assert logits.shape == (n, 3)
        loss = criterion(logits, labels)
        if n or len(made) == 4:
            loss.backward()
        else:
            logits.sum().backward()  # the mean of no losses is NaN
        optimizer.step()
    return optimizer, engine


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Viewed, llama])
def test_they_change_nothing_without_noise(mode: str, make: Any) -> None:
    torch.manual_seed(0)
    model = make().train()
    before = [p.detach().clone() for p in model.parameters()]
    _, engine = train(model, mode, [0, 0])
    assert len(engine.accountant) == 2
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("mode", MODES)
def test_batches_around_them_are_as_without(mode: str) -> None:
    results = []
    for batches in ([3, 2], [3, 0, 2]):
        torch.manual_seed(0)
        model = Viewed()
        torch.manual_seed(1)
        train(model, mode, batches)
        results.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_without_a_wrapper() -> None:
    torch.manual_seed(0)
    model = llama().train()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, _ = train_unwrapped(model)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is not None and not p.grad.any() for p in optimizer.params)


def train_unwrapped(model: nn.Module) -> Any:
    engine = PrivacyEngine()
    _, optimizer, criterion, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.arange(32)), batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost_bk",
        wrap_model=False,
    )
    logits = model(torch.zeros(0, 6, dtype=torch.long)).logits
    criterion(logits, torch.zeros(0, dtype=torch.long)).backward()
    optimizer.step()
    return optimizer, engine


def test_the_row_lets_masks_be_seen() -> None:
    args, kwargs = with_a_row(
        (torch.zeros(0, 4, dtype=torch.long), 3), {"attention_mask": torch.zeros(0, 4)}, 0
    )
    assert args[0].shape == (1, 4) and not args[0].any() and args[1] == 3
    assert kwargs["attention_mask"].shape == (1, 4) and kwargs["attention_mask"].all()


def test_outputs_lose_it() -> None:
    given = {"loss": torch.tensor(5.0), "logits": torch.ones(1, 3), "steps": torch.ones(2, 3)}
    output = without_the_row(given, 0)
    assert output["loss"] == 0 and output["logits"].shape == (0, 3)
    assert output["steps"].shape == (2, 3)
