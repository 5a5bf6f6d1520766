"""Correlated noise through make_private: what is released, counted, refused and resumed."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import CorrelatedNoise, PrivacyEngine
from opacus.core.privacy.noise import add_noise
from opacus.utils.batch_memory_manager import BatchMemoryManager

ROWS, BATCHES, SIGMA, CLIP = 40, 4, 1.5, 0.05
PLAN = CorrelatedNoise.square_root(3, steps=12, separation=BATCHES)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.arange(ROWS) % 3)


class Run:
    """A private run, and the parts of the noise that its steps had."""

    def __init__(
        self,
        module: nn.Module,
        mode: str = "hooks",
        seed: int | None = 5,
        secure: bool = False,
        **kw: Any,
    ) -> None:
        self.engine = PrivacyEngine(accountant="pld", secure_mode=secure)
        own = None if seed is None else torch.Generator().manual_seed(seed)
        split = None if seed is None else torch.Generator().manual_seed(7)
        self.made: Any = self.engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
            data_loader=DataLoader(data(), batch_size=ROWS // BATCHES, generator=split),
            max_grad_norm=CLIP,
            grad_sample_mode=mode,
            noise_generator=own,
            **{"noise_multiplier": SIGMA, "correlated_noise": PLAN, **kw},
        )
        self.model, self.optimizer, self.loader = self.made[0], self.made[1], self.made[-1]
        self.loss = self.made[2] if len(self.made) == 4 else nn.CrossEntropyLoss()

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()

    def train(self, passes: int = 3) -> list[Tensor]:
        """The batches' targets."""
        seen = []
        for _ in range(passes):
            for x, y in self.loader:
                self.step(x, y)
                seen.append(y)
        return seen

    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.optimizer.params]


def clipped_sum(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """One sample at a time, by plain autograd."""
    parameters = list(module.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for row, target in zip(x.split(1), y.split(1), strict=True):
        grads = torch.autograd.grad(nn.functional.cross_entropy(module(row), target), parameters)
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        assert norm > CLIP
        for t, g in zip(total, grads, strict=True):
            t += g * CLIP / (norm + 1e-6)
    return total


def white(run: Run, number: int) -> list[Tensor]:
    """The draws of one step, of standard deviation 1."""
    layout, params = run.optimizer._layout, run.optimizer.params
    names, zeros = run.optimizer._noise_names(params), [torch.zeros_like(p) for p in params]
    for zero, name in zip(zeros, names, strict=True):
        add_noise(1.0, [(zero, zero, name)], layout.key, "noise", layout.secure_mode, number)
    return zeros


def reference(run: Run, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The weights after steps with these batches, in float64, the noise summed term by term."""
    module = model()
    drawn: list[list[Tensor]] = []
    for number, (x, y) in enumerate(batches):
        drawn.append(white(run, number))
        total = clipped_sum(module, x, y)
        for place, parameter in enumerate(module.parameters()):
            noise = sum(
                weight * drawn[number - age][place]
                for age, weight in enumerate(PLAN.weights)
                if age <= number
            )
            step = total[place] + SIGMA * CLIP * PLAN.sensitivity * noise
            parameter.data -= 0.5 * step / (ROWS / BATCHES)
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_a_run_is_the_reference(mode: str) -> None:
    run = Run(model(), mode)
    batches = list(run.loader)  # a look at them before the first step is nobody's part
    run.train()
    torch.testing.assert_close(run.weights(), reference(run, batches * 3), rtol=1e-9, atol=1e-11)


def test_passes_have_the_same_batches_and_each_sample_once() -> None:
    seen = Run(model(), seed=None, noise_multiplier=1e-3).train(2)
    assert [y.tolist() for y in seen[:BATCHES]] == [y.tolist() for y in seen[BATCHES:]]
    assert sum(len(y) for y in seen[:BATCHES]) == ROWS
    assert len({len(y) for y in seen}) > 1  # each item drew its part by itself
    other = Run(model(), seed=None).train(1)
    assert [y.tolist() for y in other] != [y.tolist() for y in seen[:BATCHES]]


def test_epsilon_is_that_of_one_gaussian_mechanism() -> None:
    run = Run(model())
    run.train(1)
    one = PrivacyEngine(accountant="pld").accountant
    one.history = [(SIGMA, 1.0, 1)]
    assert run.engine.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-9)
    run.train(2)
    assert run.engine.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-9)
    assert len(run.engine.accountant) == 12
    with pytest.raises(RuntimeError, match="all 12 steps"):
        run.train(1)


def test_noise_for_a_budget() -> None:
    engine = PrivacyEngine(accountant="pld")
    module = model()
    made = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=10), target_epsilon=3.0, target_delta=1e-5,
        epochs=3, max_grad_norm=1.0, correlated_noise=PLAN,
    )  # fmt: skip
    for x, y in made[-1]:
        made[1].zero_grad()
        nn.functional.cross_entropy(made[0](x), y).backward()
        made[1].step()
    assert 2.8 < engine.get_epsilon(1e-5) <= 3.0


def test_physical_batches_are_the_logical_ones() -> None:
    whole, split = Run(model(), "ghost"), Run(model(), "ghost")
    whole.train(2)
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=split.loader, max_physical_batch_size=3, optimizer=split.optimizer
        ) as loader:
            for x, y in loader:
                split.step(x, y)
    torch.testing.assert_close(split.weights(), whole.weights())


# --- what would make a sample take part too often ---


def test_a_pass_that_is_left_early_is_refused() -> None:
    run = Run(model())
    run.step(*next(iter(run.loader)))
    with pytest.raises(RuntimeError, match="too short"):
        run.train(1)


def test_a_batch_without_a_step_is_refused() -> None:
    run = Run(model())
    with pytest.raises(RuntimeError, match=r"too short|without a step"):
        for _ in range(2):
            for number, (x, y) in enumerate(run.loader):
                if number != 1:
                    run.step(x, y)


def test_batches_from_elsewhere_are_refused() -> None:
    run = Run(model())
    with pytest.raises(RuntimeError, match="iterate over that loader"):
        run.step(*data()[:10])


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm"])
def test_noise_that_changes_is_refused(name: str) -> None:
    run = Run(model())
    batches = iter(run.loader)
    run.step(*next(batches))
    setattr(run.optimizer, name, 2 * getattr(run.optimizer, name))
    before = copy.deepcopy(run.weights())
    with pytest.raises(RuntimeError, match="must not change"):
        run.step(*next(batches))
    torch.testing.assert_close(run.weights(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"correlated_noise": CorrelatedNoise.square_root(2, steps=9, separation=5)},
            "separation=5",
        ),
        ({"correlated_noise": 3}, "must be an opacus.CorrelatedNoise"),
        ({"poisson_sampling": False}, "needs poisson_sampling=True"),
        ({"clipping": "adaptive"}, "adaptive"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run(model(), **change)


# --- checkpoints ---


def saved(run: Run) -> io.BytesIO:
    buffer = io.BytesIO()
    run.engine.save_checkpoint(path=buffer, module=run.model, optimizer=run.optimizer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("secure", [False, True])
def test_a_resumed_run_takes_back_noise_of_before(secure: bool) -> None:
    """Its own draws come from another key; those of before from the key that made them."""
    run = Run(model(), seed=None, secure=secure)
    part = run.train(1)[0]
    file = saved(run)
    resumed = Run(model(), seed=None, secure=secure)
    resumed.engine.load_checkpoint(path=file, module=resumed.model, optimizer=resumed.optimizer)
    for number in range(BATCHES):
        torch.testing.assert_close(white(resumed, number), white(run, number), rtol=0, atol=0)
    new, old = white(resumed, BATCHES)[0], white(run, BATCHES)[0]
    assert not torch.isclose(new, old, rtol=1e-3).any()
    before = copy.deepcopy(resumed.weights())
    x, y = next(iter(resumed.loader))
    assert torch.equal(y, part)
    plain = model()
    plain.load_state_dict(dict(zip(plain.state_dict(), before, strict=True)))
    sums = clipped_sum(plain, x, y)
    resumed.step(x, y)
    drawn = [white(resumed, BATCHES - age) for age in range(3)]
    for place, (a, b) in enumerate(zip(before, resumed.weights(), strict=True)):
        noise = sum(w * d[place] for w, d in zip(PLAN.weights, drawn, strict=True))
        want = a - 0.05 * (sums[place] + SIGMA * CLIP * PLAN.sensitivity * noise)
        torch.testing.assert_close(b, want, rtol=1e-4, atol=1e-5)
    assert len(resumed.engine.accountant) == BATCHES + 1
    assert resumed.engine.get_epsilon(1e-5) == pytest.approx(run.engine.get_epsilon(1e-5))


@pytest.mark.parametrize("other", [None, CorrelatedNoise.square_root(2, steps=12, separation=4)])
def test_other_noise_does_not_go_on(other: CorrelatedNoise | None) -> None:
    run = Run(model())
    run.train(1)
    resumed = Run(model(), correlated_noise=other)
    before = copy.deepcopy(resumed.weights())
    with pytest.raises(ValueError, match="same correlated_noise"):
        resumed.engine.load_checkpoint(
            path=saved(run), module=resumed.model, optimizer=resumed.optimizer
        )
    torch.testing.assert_close(resumed.weights(), before, rtol=0, atol=0)
    assert len(resumed.engine.accountant) == 0
