"""Audits of users with several rows, and of noise that is correlated: claims are kept, bugs found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import CorrelatedNoise, PrivacyEngine
from opacus.auditing import AuditReport, GradientCanaries
from opacus.auditing.bounds import epsilon_lower_bound
from opacus.core.privacy.correlated import _reciprocal
from opacus.data.users import UserCollate, UserDataset

pytestmark = pytest.mark.usefixtures("reproducible")

CANARIES, ITEMS, SIGMA, CLIP = 128, 60, 1.0, 0.7


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def private(model: Any, loader: Any, mode: str, **kw: Any) -> tuple[PrivacyEngine, Any]:
    engine = PrivacyEngine(accountant="rdp")
    made: Any = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=SIGMA, max_grad_norm=CLIP, grad_sample_mode=mode,
        criterion=nn.CrossEntropyLoss(), **kw,
    )  # fmt: skip
    return engine, made if len(made) == 4 else (*made[:2], nn.CrossEntropyLoss(), made[2])


# --- users: a canary is a user with three rows ---


def of_users(mode: str, patch: pytest.MonkeyPatch | None = None) -> AuditReport:
    torch.manual_seed(0)
    audit = GradientCanaries(CANARIES, seed=0)
    numbers = [-1] * ITEMS + [int(n) for n in np.flatnonzero(audit.included) for _ in range(3)]
    users = list(range(ITEMS)) + [ITEMS + n for n in numbers[ITEMS:]]
    rows = TensorDataset(
        torch.randn(len(users), 6), torch.randint(3, (len(users),)), torch.tensor(numbers)
    )
    items = UserDataset(rows, users)
    loader = DataLoader(items, batch_size=len(items) // 2, collate_fn=UserCollate())
    engine, made = private(audit.model(net()), loader, mode, privacy_unit="unit_ids")
    if patch is not None:
        rows_clipped_one_by_one(made[1], patch)
    audit.watch(made[1], engine)
    while len(audit._steps) < 24:
        for x, y, numbers, ids in made[3]:
            made[1].zero_grad()
            made[2](made[0](x, canary=numbers, unit_ids=ids), y).backward()
            made[1].step()
    return audit.report(delta=1e-5)


def rows_clipped_one_by_one(optimizer: Any, patch: pytest.MonkeyPatch) -> None:
    """A user of three rows gets three times C."""
    from opacus.optimizers import optimizer as optimizer_file

    right = optimizer_file.clip_flat
    patch.setattr(
        optimizer_file, "clip_flat", lambda norms, limit, *rule: right(norms, 3 * limit, *rule)
    )


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_users_are_worth_one_c(mode: str) -> None:
    report = of_users(mode)
    report.raise_if_failed()
    assert report.epsilon is not None and report.epsilon_lower_bound is not None
    assert 0.0 < report.epsilon_lower_bound <= report.epsilon


def test_users_worth_several_c_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report = of_users("hooks", monkeypatch)
    assert "signal of the canaries" in report.failures, str(report)


# --- correlated noise: whoever inverts the correlation sees one Gaussian mechanism ---

PLAN = CorrelatedNoise.square_root(4, steps=12, separation=4)


def whitened_scores(mode: str) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Scores and coin tosses of canaries, the claimed epsilon, and the deviation of white noise.

    The attacker knows the plan and each canary's batches: C of what was released is C G + Z.
    """
    torch.manual_seed(0)
    audit = GradientCanaries(CANARIES, seed=3)
    data = audit.data(TensorDataset(torch.randn(ITEMS, 6), torch.randint(3, (ITEMS,))))
    loader = DataLoader(data, batch_size=math.ceil(len(data) / 4))
    engine, made = private(audit.model(net()), loader, mode, correlated_noise=PLAN)
    optimizer, released, parts = made[1], [], np.zeros((PLAN.steps, CANARIES))
    batches: Any = None
    for step in range(PLAN.steps):
        if step % len(made[3]) == 0:
            batches = iter(made[3])
        x, y, numbers = next(batches)
        parts[step, [int(n) for n in numbers if n >= 0]] = 1.0
        optimizer.zero_grad()
        made[2](made[0](x, canary=numbers), y).backward()
        optimizer.step()
        grad: Tensor = made[0]._module.canaries.weight.grad
        released.append(grad.double().view(-1) * optimizer.expected_batch_size / (SIGMA * CLIP))
    strategy = np.array(_reciprocal(PLAN.weights, PLAN.steps))
    inverse = sum(np.diag(np.full(PLAN.steps - k, c), -k) for k, c in enumerate(strategy))
    white = inverse @ torch.stack(released).numpy()  # [steps, m]
    # A canary that is out: the pattern of one that is in, of its own number.
    known = parts[:, audit.included]
    pattern = np.where(audit.included, parts, known[:, np.arange(CANARIES) % known.shape[1]])
    moved = inverse @ pattern
    spread = float(white[:, ~audit.included].std())
    return (moved * white).sum(0), audit.included, engine.get_epsilon(1e-5), spread


def told_apart(scores: np.ndarray, included: np.ndarray) -> float:
    """How many deviations the means of those that are in and out are apart."""
    out = scores[~included]
    return float((scores[included].mean() - out.mean()) / out.std())


MARGIN = 5 * 2 / math.sqrt(CANARIES)  # five standard errors


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_correlated_noise_keeps_its_epsilon(mode: str) -> None:
    scores, included, epsilon, spread = whitened_scores(mode)
    drawn = PLAN.steps * int((~included).sum())
    assert spread == pytest.approx(PLAN.sensitivity, rel=5 / math.sqrt(2 * drawn))
    bound = epsilon_lower_bound(scores, included, delta=1e-5, confidence=0.999)
    assert 0.0 < bound <= epsilon
    assert told_apart(scores, included) == pytest.approx(1 / SIGMA, abs=MARGIN), "one mechanism"


def test_a_forgotten_sensitivity_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.core.ranks.parallelism import Single

    monkeypatch.setattr(Single, "noise_growth", 1.0)
    scores, included, _, spread = whitened_scores("hooks")
    assert spread < 0.7 * PLAN.sensitivity
    assert told_apart(scores, included) > 1 / SIGMA + MARGIN
