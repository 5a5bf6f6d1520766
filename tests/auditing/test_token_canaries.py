"""New-token canaries show what a language model has learnt, and fail where too much is claimed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.auditing import AuditReport, TokenCanaries

# The same noise in each run of the tests: an audit that fails by chance is no news.
pytestmark = pytest.mark.usefixtures("reproducible")

V, M, T = 12, 60, 4


class Tiny(nn.Module):
    """The next token from the embeddings of the ones before: `[B, T]` -> `[B, T, V + M]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V + M, 24)
        self.hidden = nn.Linear(24, 48)
        self.head = nn.Linear(48, V + M)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = self.embedding(tokens)  # [B, T, d]
        counts = torch.arange(1, tokens.shape[1] + 1).view(1, -1, 1)
        means = seen.cumsum(1) / counts
        out: Tensor = self.head(torch.tanh(self.hidden(means)))
        return out


def trained(sigma: float, claimed: float | None = None, epochs: int = 10) -> AuditReport:
    torch.manual_seed(0)
    canaries = TokenCanaries(torch.randint(V, (M, T)), V, seed=3)
    inputs, labels = canaries.items()
    plain = torch.randint(V, (20, T + 1))
    data = TensorDataset(torch.cat([plain, inputs]), torch.cat([plain, labels]))
    net = Tiny()
    before = canaries.losses(net)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.02),
        data_loader=DataLoader(data, batch_size=25),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
    )
    for _ in range(epochs):
        for tokens, wanted in loader:
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            each = nn.functional.cross_entropy(
                logits.transpose(1, 2), wanted[:, 1:], reduction="none", ignore_index=-100
            ).sum(1)  # [B]
            (each.sum() / max(1, len(each))).backward()
            optimizer.step()
    epsilon = engine.get_epsilon(1e-5) if claimed is None else claimed
    if claimed is not None:  # the history, too, is of a run with much noise
        engine.accountant.history = [
            (30.0, rate, steps) for _, rate, steps in engine.accountant.history
        ]
    model.eval()
    return canaries.report(
        model, epsilon=epsilon, delta=1e-5, before=before, accountant=engine.accountant
    )


def test_a_true_run_passes() -> None:
    report = trained(1.0, epochs=4)
    report.raise_if_failed()
    assert report.scores.shape == (M,)


def test_missing_noise_is_found() -> None:
    """The run has next to no noise, and claims epsilon 1."""
    report = trained(1e-6, claimed=1.0)
    assert report.failures == ("epsilon", "trade-off curve"), str(report)
    assert report.epsilon_lower_bound is not None and report.epsilon_lower_bound > 1.5


def test_only_new_tokens_are_learnt_and_only_of_those_that_are_in() -> None:
    canaries = TokenCanaries(torch.randint(V, (M, T)), V, seed=3)
    inputs, labels = canaries.items()
    assert len(inputs) == canaries.included.sum() and len(canaries) == M
    assert (labels[:, :-1] == -100).all() and torch.equal(labels[:, -1], inputs[:, -1])
    assert inputs[:, -1].unique().numel() == len(inputs) and int(inputs[:, -1].min()) >= V


def test_bad_vocabularies_are_refused() -> None:
    contexts = torch.randint(V, (M, T))
    with pytest.raises(ValueError, match="below vocabulary"):
        TokenCanaries(contexts + V, V)
    with pytest.raises(ValueError, match="m >= 16"):
        TokenCanaries(contexts[:3], V)
    with pytest.raises(ValueError, match="the canaries need"):
        TokenCanaries(contexts, V).losses(lambda t: torch.zeros(len(t), t.shape[1], V))
