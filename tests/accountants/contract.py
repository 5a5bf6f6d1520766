"""What every accountant must do; a test class per accountant inherits it."""

from __future__ import annotations

import io
import json
import math
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opacus.accountants import IAccountant, create_accountant

DELTA = 1e-5
BAD_STEPS = [
    ({"noise_multiplier": -1.0, "sample_rate": 0.1}, ValueError, "noise_multiplier"),
    ({"noise_multiplier": math.nan, "sample_rate": 0.1}, ValueError, "noise_multiplier"),
    ({"noise_multiplier": math.inf, "sample_rate": 0.1}, ValueError, "noise_multiplier"),
    ({"noise_multiplier": "1", "sample_rate": 0.1}, TypeError, "noise_multiplier"),
    ({"noise_multiplier": None, "sample_rate": 0.1}, TypeError, "noise_multiplier"),
    ({"noise_multiplier": 1.0, "sample_rate": 1.1}, ValueError, "sample_rate"),
    ({"noise_multiplier": 1.0, "sample_rate": -0.1}, ValueError, "sample_rate"),
    ({"noise_multiplier": 1.0, "sample_rate": math.nan}, ValueError, "sample_rate"),
]
BAD_STATES = [
    None,
    {},
    {"history": [(1.0, 0.1, 2)]},
    {"mechanism": "MECHANISM"},
    {"history": [(1.0, 0.1, 2)], "mechanism": "another"},
    {"history": [(1.0, 0.1)], "mechanism": "MECHANISM"},
    {"history": [(1.0, 1.5, 2)], "mechanism": "MECHANISM"},
    {"history": [(1.0, 0.1, -2)], "mechanism": "MECHANISM"},
]


@pytest.mark.filterwarnings("ignore:The GDP accountant", "ignore:The .* Renyi order")
class AccountantContract:
    mechanism: str

    def make(self, *history: tuple[float, float, int]) -> IAccountant:
        accountant = create_accountant(self.mechanism)
        accountant.history = list(history)
        return accountant

    def epsilon(self, sigma: float, rate: float, steps: int, delta: float = DELTA) -> float:
        return self.make((sigma, rate, steps)).get_epsilon(delta)

    def test_name(self) -> None:
        assert self.make().mechanism() == type(self.make()).mechanism() == self.mechanism

    @pytest.mark.parametrize("history", [[], [(1.0, 0.0, 5)], [(0.0, 0.0, 5)], [(1.0, 0.5, 0)]])
    def test_nothing_costs_nothing(self, history: list[Any]) -> None:
        assert self.make(*history).get_epsilon(DELTA) == 0.0

    def test_no_noise_is_no_privacy(self) -> None:
        assert self.epsilon(0.0, 0.1, 1) == math.inf

    def test_steps_are_recorded_and_counted(self) -> None:
        accountant = self.make()
        for expected in (1, 2, 3):
            accountant.step(noise_multiplier=1.5, sample_rate=0.25)
            assert len(accountant) == expected
        assert accountant.history == [(1.5, 0.25, 3)]

    def test_numbers_become_plain(self) -> None:
        accountant = self.make()
        accountant.step(noise_multiplier=torch.tensor(1.5), sample_rate=np.float64(0.25))
        assert [type(value) for value in accountant.history[0]] == [float, float, int]

    @pytest.mark.parametrize("step, error, match", BAD_STEPS)
    def test_refused_step_leaves_history(
        self, step: dict[str, Any], error: type[Exception], match: str
    ) -> None:
        accountant = self.make((1.0, 0.1, 7))
        with pytest.raises(error, match=match):
            accountant.step(**step)
        assert accountant.history == [(1.0, 0.1, 7)]

    @pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan])
    def test_refused_delta(self, delta: float) -> None:
        with pytest.raises(ValueError, match="delta"):
            self.make((1.0, 0.1, 7)).get_epsilon(delta)

    def test_unknown_argument(self) -> None:
        with pytest.raises(TypeError, match="epsilon_eror"):
            self.make((1.0, 0.1, 7)).get_epsilon(DELTA, epsilon_eror=0.1)

    def test_reading_twice_changes_nothing(self) -> None:
        accountant = self.make((1.0, 0.01, 300))
        first = accountant.get_epsilon(DELTA)
        assert accountant.get_epsilon(DELTA) == first > 0.0
        assert accountant.history == [(1.0, 0.01, 300)]
        accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        assert accountant.get_epsilon(DELTA) > first

    @pytest.mark.parametrize("delta", [0.5, 0.9, 0.99])
    def test_never_negative(self, delta: float) -> None:
        assert self.epsilon(20.0, 0.01, 10, delta) == 0.0

    @pytest.mark.parametrize("sigma, rate", [(0.6, 0.01), (1.0, 0.2), (2.0, 1.0)])
    def test_monotone(self, sigma: float, rate: float) -> None:
        base = self.epsilon(sigma, rate, 100)
        assert math.isfinite(base)
        assert type(base) is float
        assert self.epsilon(sigma, rate, 200) > base
        assert self.epsilon(1.2 * sigma, rate, 100) < base
        assert self.epsilon(sigma, 0.8 * rate, 100) < base
        assert self.epsilon(sigma, rate, 100, 10 * DELTA) < base

    def test_order_and_grouping_do_not_matter(self) -> None:
        split = self.make((1.0, 0.01, 100), (1.0, 0.01, 50), (1.0, 0.01, 150))
        assert split.get_epsilon(DELTA) == self.epsilon(1.0, 0.01, 300)

    def test_state_survives_every_format(self) -> None:
        accountant = self.make((1.0, 0.1, 3))
        state = accountant.state_dict()
        assert state == {"history": [(1.0, 0.1, 3)], "mechanism": self.mechanism}
        assert state["history"] is not accountant.history
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        for copy in (
            pickle.loads(pickle.dumps(state)),
            json.loads(json.dumps(state)),
            torch.load(file, weights_only=True),
        ):
            other = self.make()
            other.load_state_dict(copy)
            assert other.history == accountant.history
            other.step(noise_multiplier=1.0, sample_rate=0.1)
            assert other.history == [(1.0, 0.1, 4)]
        assert state["history"] == [(1.0, 0.1, 3)]

    def test_state_is_written_into_destination(self) -> None:
        destination = {"kept": 1}
        assert self.make((1.0, 0.1, 3)).state_dict(destination) is destination
        assert destination["kept"] == 1
        assert destination["mechanism"] == self.mechanism

    @pytest.mark.parametrize("state", BAD_STATES)
    def test_bad_state_leaves_history(self, state: dict[str, Any] | None) -> None:
        if state and state.get("mechanism") == "MECHANISM":
            state = {**state, "mechanism": self.mechanism}
        accountant = self.make((2.0, 0.2, 5))
        with pytest.raises(ValueError):
            accountant.load_state_dict(state)  # type: ignore[arg-type]
        assert accountant.history == [(2.0, 0.2, 5)]

    def test_accountant_pickles(self) -> None:
        accountant = self.make((1.0, 0.1, 3))
        assert pickle.loads(pickle.dumps(accountant)).history == accountant.history

    def test_hook_reads_the_optimizer(self) -> None:
        accountant = self.make()
        hook = accountant.get_optimizer_hook_fn(sample_rate=1 / 49)
        hook(SimpleNamespace(noise_multiplier=1.5, accumulated_iterations=3))
        assert accountant.history == [(1.5, 3 / 49, 1)]
        full = self.make()
        full.get_optimizer_hook_fn(0.1 + 1e-17)(
            SimpleNamespace(noise_multiplier=1.5, accumulated_iterations=10)
        )
        assert full.history == [(1.5, 1.0, 1)]
        with pytest.raises(ValueError, match="sample_rate"):
            hook(SimpleNamespace(noise_multiplier=1.5, accumulated_iterations=50))
        assert len(accountant) == 1

    def test_hook_refuses_a_bad_rate_at_once(self) -> None:
        with pytest.raises(ValueError, match="sample_rate"):
            self.make().get_optimizer_hook_fn(sample_rate=2.0)


class BoundContract(AccountantContract):
    """What an accountant must do besides if its value is a bound and noise may change."""

    def test_mixed_history_in_any_order(self) -> None:
        first = self.make((1.0, 0.01, 100), (2.0, 0.02, 100), (1.0, 0.01, 100))
        second = self.make((2.0, 0.02, 100), (1.0, 0.01, 200))
        epsilon = first.get_epsilon(DELTA)
        assert epsilon == pytest.approx(second.get_epsilon(DELTA), rel=1e-9)
        assert epsilon > self.epsilon(1.0, 0.01, 200)
        assert epsilon > self.epsilon(2.0, 0.02, 100)

    @pytest.mark.parametrize("sigma, steps", [(0.5, 1), (1.0, 1), (3.0, 4), (10.0, 100)])
    @pytest.mark.parametrize("delta", [1e-7, 1e-5, 1e-2])
    def test_never_below_the_exact_gaussian_mechanism(
        self, sigma: float, steps: int, delta: float
    ) -> None:
        exact = gaussian_epsilon(sigma / math.sqrt(steps), delta)
        assert exact <= self.epsilon(sigma, 1.0, steps, delta) <= 1.3 * exact + 0.1


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Exact epsilon of one Gaussian mechanism of sensitivity 1 (arXiv 1805.06530, theorem 8)."""
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    def excess(eps: float) -> float:
        left = log_ndtr(0.5 / sigma - eps * sigma)
        return math.exp(left) - math.exp(eps + log_ndtr(-0.5 / sigma - eps * sigma)) - delta

    return 0.0 if excess(0.0) <= 0.0 else float(brentq(excess, 0.0, 500.0, xtol=1e-12))
