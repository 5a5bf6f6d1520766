"""Gradient canaries pass on true runs and fail on each planted bug."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import CorrelatedNoise, PrivacyEngine
from opacus.auditing import AuditError, AuditReport, GradientCanaries
from opacus.core.privacy.key import NOISE
from opacus.optimizers import optimizer as optimizer_file

# The same noise in each run of the tests: an audit that fails by chance is no news.
pytestmark = pytest.mark.usefixtures("reproducible")

CANARIES, STEPS = 128, 24
Plant = Callable[[Any, PrivacyEngine, GradientCanaries, pytest.MonkeyPatch], None]


def audited(
    mode: str = "hooks",
    plant: Plant | None = None,
    patch: pytest.MonkeyPatch | None = None,
    seed: int = 1,
    **changes: Any,
) -> AuditReport:
    torch.manual_seed(seed)
    data = TensorDataset(torch.randn(60, 6), torch.randint(3, (60,)))
    audit = GradientCanaries(CANARIES, seed=seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model: Any = audit.model(net)
    engine = PrivacyEngine(accountant="rdp")
    out = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(audit.data(data), batch_size=64),
        grad_sample_mode=mode,
        **{"noise_multiplier": 1.0, "max_grad_norm": 0.7, **changes},
    )
    model, optimizer, loader = out[0], out[1], out[-1]
    criterion = out[2] if len(out) == 4 else nn.CrossEntropyLoss()
    if plant is not None:
        assert patch is not None
        plant(optimizer, engine, audit, patch)
    audit.watch(optimizer, engine)
    for _ in range(100):
        for inputs, targets, canary in loader:
            optimizer.zero_grad()
            criterion(model(inputs, canary=canary), targets).backward()
            optimizer.step()
            if len(audit._steps) == STEPS:
                return audit.report(delta=1e-5)
    raise AssertionError("unreachable")


# --- planted bugs ---


def noise_scaled(by: float) -> Plant:
    def plant(optimizer: Any, engine: Any, audit: Any, patch: pytest.MonkeyPatch) -> None:
        noised = optimizer._parallelism.noised

        def wrong(std: float, *others: Any) -> Iterable[Tensor]:
            return noised(std * by, *others)  # type: ignore[no-any-return]

        patch.setattr(optimizer._parallelism, "noised", wrong)

    return plant


def same_noise_each_step(
    optimizer: Any, engine: Any, audit: Any, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(optimizer._parallelism.key, "advance", lambda purpose: 0)


def same_noise_now_and_then(optimizer: Any, engine: Any, audit: Any, patch: Any) -> None:
    """As after a checkpoint that was loaded without its counter."""
    key = optimizer._parallelism.key
    steps = iter([*range(STEPS // 2), *range(3, STEPS)])
    advance = key.advance
    patch.setattr(key, "advance", lambda p: next(steps) if p == NOISE else advance(p))


def same_noise_on_ranks(optimizer: Any, engine: Any, audit: Any, patch: pytest.MonkeyPatch) -> None:
    """What two shards with one stream each would draw."""
    noised = optimizer._parallelism.noised

    def wrong(std: float, sums: list[Tensor], *others: Any) -> Iterable[Tensor]:
        for total, result in zip(sums, noised(std, sums, *others), strict=True):
            if total.shape == (CANARIES, 1):
                half = (result - total)[: CANARIES // 2]
                result = total + torch.cat([half, half])
            yield result

    patch.setattr(optimizer._parallelism, "noised", wrong)


def factors_are(change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(optimizer: Any, engine: Any, audit: Any, patch: pytest.MonkeyPatch) -> None:
        right = optimizer_file.clip_flat

        def wrong(*given: Any) -> Any:
            clipped = right(*given)
            return replace(clipped, factors=change(clipped.factors))

        patch.setattr(optimizer_file, "clip_flat", wrong)

    return plant


def clipped_to_twice_the_norm(optimizer: Any, engine: Any, audit: Any, patch: Any) -> None:
    right = optimizer_file.clip_flat
    patch.setattr(
        optimizer_file, "clip_flat", lambda norms, limit, *rule: right(norms, 2 * limit, *rule)
    )


def half_of_the_steps_counted(optimizer: Any, engine: Any, audit: Any, patch: Any) -> None:
    count, calls = optimizer._count_step, iter(range(10**6))
    patch.setattr(
        optimizer, "_count_step", lambda counts: count(counts) if next(calls) % 2 else None
    )


def drawn_more_often_than_counted(optimizer: Any, engine: Any, audit: Any, patch: Any) -> None:
    for counter in optimizer._counters:
        counter.sample_rate /= 4


def rows_are_lost(optimizer: Any, engine: Any, audit: Any, patch: Any) -> None:
    """No privacy bug, but an audit that sees nothing must not pass."""
    factors_are(torch.zeros_like)(optimizer, engine, audit, patch)


BUGS: dict[str, tuple[Plant, str]] = {
    "noise missing": (noise_scaled(0.0), "noise scale"),
    "half of the noise": (noise_scaled(0.5), "noise scale"),
    "nine tenths of the noise": (noise_scaled(0.9), "noise scale"),
    "clipping missing": (factors_are(torch.ones_like), "clipped"),
    "clipped to 2 C": (clipped_to_twice_the_norm, "signal of the canaries"),
    "rows shifted": (factors_are(lambda f: f.roll(1)), "clipped"),
    "same noise in each step": (same_noise_each_step, "fresh noise in each"),
    "noise of earlier steps again": (same_noise_now_and_then, "fresh noise in each step"),
    "same noise on two ranks": (same_noise_on_ranks, "fresh noise in each element"),
    "steps uncounted": (half_of_the_steps_counted, "steps counted"),
    "rate understated": (drawn_more_often_than_counted, "signal of the canaries"),
    "rows lost": (rows_are_lost, "signal of the canaries"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = BUGS[bug]
    report = audited(plant=plant, patch=monkeypatch)
    assert any(name.startswith(check) for name in report.failures), str(report)
    with pytest.raises(AuditError, match=check):
        report.raise_if_failed()


@pytest.mark.parametrize("seed", range(20))
def test_true_runs_pass(seed: int) -> None:
    """In 20 runs what is proven stays below what is claimed: epsilon, and the whole curve."""
    report = audited(("ghost", "ghost_bk", "hooks")[seed % 3], seed=seed)
    report.raise_if_failed()
    assert report.epsilon is not None and report.epsilon_lower_bound is not None
    assert 0.0 < report.epsilon_lower_bound <= report.epsilon
    # Sampled at half, no worse than 24 steps with all: mu of those is sqrt(24).
    assert report.mu_lower_bound is not None and 0.3 < report.mu_lower_bound < math.sqrt(STEPS)


def test_an_understated_epsilon_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is as counted, but the accountant's formula is wrong."""
    monkeypatch.setattr(PrivacyEngine, "get_epsilon", lambda self, delta: 0.3)
    report = audited(noise_multiplier=0.3)
    assert report.failures == ("epsilon",), str(report)


def test_a_history_that_claims_too_much_is_refuted() -> None:
    """Each step as promised, but the accountant wrote down a 30th of the rate."""

    def plant(optimizer: Any, engine: Any, audit: Any, patch: Any) -> None:
        step = engine.accountant.step
        patch.setattr(
            engine.accountant,
            "step",
            lambda **kw: step(**{**kw, "sample_rate": kw["sample_rate"] / 30}),
        )

    with pytest.MonkeyPatch.context() as patch:
        report = audited(plant=plant, patch=patch)
    assert "trade-off curve" in report.failures, str(report)


def test_the_outputs_are_the_model_s() -> None:
    audit = GradientCanaries(CANARIES, seed=0)
    net = nn.Linear(3, 2)
    inputs, numbers = torch.randn(4, 3), torch.tensor([-1, 0, 5, -1])
    model = audit.model(net)
    output = model(inputs, canary=numbers)
    assert torch.equal(output, net(inputs))
    output.sum().backward()
    seen = model.canaries.weight.grad.view(-1)  # type: ignore[union-attr]
    assert seen.nonzero().view(-1).tolist() == [0, 5]
    assert seen[5].item() == pytest.approx(1e4 * 2**0.5)
    assert torch.equal(model.eval()(inputs, canary=numbers), net(inputs))


def test_items_have_numbers() -> None:
    audit = GradientCanaries(CANARIES, seed=0)
    base = [{"x": torch.ones(2)} for _ in range(5)]
    data = audit.data(base)
    assert len(data) == 5 + audit.included.sum()
    numbers = [data[i]["canary"] for i in range(len(data))]
    assert numbers == [-1] * 5 + np.flatnonzero(audit.included).tolist()
    assert audit.data([torch.ones(1)])[0][1] == -1


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    audited().plot(str(tmp_path / "audit.png"))
    assert (tmp_path / "audit.png").stat().st_size > 5000


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 64"):
        GradientCanaries(10)
    with pytest.raises(ValueError, match="noise_multiplier is 0"):
        audited(noise_multiplier=0.0)
    with pytest.raises(ValueError, match="not correlated"):
        audited(correlated_noise=CorrelatedNoise.square_root(2, steps=50, separation=2))
    audit = GradientCanaries(CANARIES)
    with pytest.raises(ValueError, match="nothing can be said"):
        audit.report(delta=1e-5)
    with pytest.raises(ValueError, match="call model"):
        audit.watch(None, None)
    with pytest.raises(ValueError, match="batch of 3 first"):
        audit.model(nn.Linear(2, 2))(torch.ones(2, 2), canary=torch.zeros(3, dtype=torch.long))
