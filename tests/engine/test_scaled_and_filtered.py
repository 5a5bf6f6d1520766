"""Scale-then-privatise and DiSK, against float64 loops over single samples with the same draws."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus import PrivacyEngine
from opacus.optimizers.adam import DPAdamW
from opacus.optimizers.filtered import DiSK
from opacus.optimizers.scaled import ScaledAdamW
from tests.helpers.correlated import (
    BATCHES,
    CLIP,
    PLAN,
    ROWS,
    SIGMA,
    Run,
    clipped_sum,
    data,
    model,
    white,
)

MODES = ["hooks", "ghost", "ghost_bk"]


def trained(run: Run, passes: int = 2) -> Run:
    run.train(passes)
    return run


# --- scale-then-privatise ---


def scaled(every: int = 1) -> Any:
    return partial(ScaledAdamW, every=every, lr=0.05, betas=(0.8, 0.9), weight_decay=0.0)


def scaled_reference(run: Run, every: int = 1) -> tuple[list[Tensor], list[list[float]]]:
    """The weights, and the scales of each step."""
    module, scales, used = model(), [1.0] * 4, []
    parameters = list(module.parameters())
    means = [torch.zeros_like(p) for p in parameters]
    squares = [torch.zeros_like(p) for p in parameters]
    for number, (x, y) in enumerate(run.seen):
        used.append(scales)
        totals, draws = clipped_sum(module, x, y, scales), white(run, number)
        roots = []
        for p, mean, square, total, z, scale in zip(
            parameters, means, squares, totals, draws, scales, strict=True
        ):
            grad = (total + run.optimizer.noise_multiplier * CLIP * z / scale) / (ROWS / BATCHES)
            mean.lerp_(grad, 0.2)
            square.mul_(0.9).addcmul_(grad, grad, value=0.1)
            first, second = 1 - 0.8 ** (number + 1), 1 - 0.9 ** (number + 1)
            p.data -= 0.05 * (mean / first) / ((square / second).sqrt() + 1e-8)
            roots.append(math.sqrt(float(square.mean()) / second) + 1e-8)
        if (number + 1) % every == 0:
            sizes = [p.numel() for p in parameters]
            energy = sum(n * r * r for n, r in zip(sizes, roots, strict=True)) / sum(sizes)
            scales = [2.0 ** round(math.log2(math.sqrt(energy) / r)) for r in roots]
    return [p.detach() for p in parameters], used


@pytest.mark.parametrize("mode", MODES)
def test_scaled_runs_are_the_reference(mode: str) -> None:
    run = trained(
        Run(model(), mode, made_by=scaled(), correlated_noise=None, noise_multiplier=0.05)
    )
    want, used = scaled_reference(run)
    assert len({tuple(scales) for scales in used}) > 1 and max(map(max, used)) >= 2
    torch.testing.assert_close(run.weights(), want, rtol=1e-8, atol=1e-10)


def test_scales_stay_for_some_steps_and_go_with_the_state() -> None:
    run = trained(
        Run(model(), made_by=scaled(every=3), correlated_noise=None, noise_multiplier=0.05)
    )
    want, used = scaled_reference(run, every=3)
    assert used[0] == used[1] == used[2] != used[3] == used[5]
    torch.testing.assert_close(run.weights(), want, rtol=1e-8, atol=1e-10)
    own: Any = run.optimizer.original_optimizer
    again = scaled(every=3)(model().parameters())
    again.load_state_dict(run.optimizer.state_dict())
    assert again.gradient_scales() == own.gradient_scales() != [1.0] * 4


def test_a_state_of_adamw_begins_with_equal_scales() -> None:
    plain = partial(torch.optim.AdamW, lr=0.05)
    other = Run(model(), made_by=plain, correlated_noise=None, noise_multiplier=0.05)
    state = trained(other).optimizer.state_dict()
    run = Run(model(), made_by=scaled(), correlated_noise=None, noise_multiplier=0.05)
    run.optimizer.load_state_dict(state)
    own: Any = run.optimizer.original_optimizer
    assert own.gradient_scales() == [1.0] * 4
    run.train(1)
    assert own.gradient_scales() != [1.0] * 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [False, True])
def test_one_sample_moves_the_scaled_sum_by_c_at_most(frozen: bool, mode: str) -> None:
    """Without noise: the sums of a batch with and without a sample, in scaled units."""
    exponents = [3, -2, 0, 5]
    released, criterion = [], nn.CrossEntropyLoss(reduction="sum")
    for rows in (slice(0, 8), slice(0, 7)):
        run = Run(
            model(), mode, made_by=scaled(), correlated_noise=None, noise_multiplier=0.0,
            poisson_sampling=False, loss_reduction="sum", criterion=criterion,
        )  # fmt: skip
        own: Any = run.optimizer.original_optimizer
        own.param_groups[0]["exponents"] = [3, -2, 0, 5]
        if frozen:  # one that comes before others in the optimizer
            own.param_groups[0]["params"][1].requires_grad_(False)
            exponents = [3, 0, 5]
        x, y = data()[rows]
        if mode == "hooks":
            run.loss = criterion
        run.step(x, y)
        grads = [p.grad for p in run.optimizer.params]
        released.append([g * 2.0**e for g, e in zip(grads, exponents, strict=True)])
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(*released, strict=True)))
    assert 0.9 * CLIP < moved <= CLIP * (1 + 1e-6)


def test_what_cannot_be_scaled_is_refused() -> None:
    for change in (
        {"clipping": "adaptive", "max_grad_norm": 1.0},
        {"clipping": "per_layer", "max_grad_norm": [1.0] * 4},
    ):
        with pytest.raises(ValueError, match="ScaledAdamW scales gradients"):
            Run(model(), made_by=scaled(), correlated_noise=None, **change)
    with pytest.raises(ValueError, match="must hold all parameters"):
        module = model()
        PrivacyEngine().make_private(
            module=module,
            optimizer=[scaled()(module[0].parameters()), torch.optim.SGD(module[2].parameters())],
            data_loader=torch.utils.data.DataLoader(data(), batch_size=4),
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
    for kw in ({"every": 0}, {"offset": 0.0}):
        with pytest.raises(ValueError, match="offset"):
            ScaledAdamW([nn.Parameter(torch.zeros(1))], **kw)


# --- DiSK ---


def disk(parameters: Any) -> DiSK:
    return DiSK(torch.optim.SGD(parameters, lr=0.5, momentum=0.3, weight_decay=0.01), kappa=0.4)


def disk_reference(run: Run) -> tuple[list[Tensor], list[Tensor]]:
    """The points that gradients are taken at next, and those that the steps led to."""
    module, gamma = model(), 0.6 / 0.4
    parameters = list(module.parameters())
    points = [p.detach().clone() for p in parameters]
    estimates: list[Tensor] = []
    momenta: list[Tensor] = []
    for number, (x, y) in enumerate(run.seen):
        totals, draws = clipped_sum(module, x, y), white(run, number)
        pairs = zip(totals, draws, strict=True)
        grads = [(t + SIGMA * CLIP * z) / (ROWS / BATCHES) for t, z in pairs]
        estimates = [
            g if not estimates else 0.6 * e + 0.4 * g
            for g, e in zip(grads, estimates or grads, strict=True)
        ]
        pushed = [e + 0.01 * x for e, x in zip(estimates, points, strict=True)]
        momenta = [
            g if not momenta else 0.3 * m + g
            for g, m in zip(pushed, momenta or pushed, strict=True)
        ]
        for place, parameter in enumerate(parameters):
            new = points[place] - 0.5 * momenta[place]
            parameter.data = new + gamma * (new - points[place])
            points[place] = new
    return [p.detach() for p in parameters], points


@pytest.mark.parametrize("mode", MODES)
def test_disk_runs_are_the_reference(mode: str) -> None:
    run = trained(Run(model(), mode, made_by=disk, correlated_noise=None))
    ahead, points = disk_reference(run)
    torch.testing.assert_close(run.weights(), ahead, rtol=1e-8, atol=1e-10)
    run.optimizer.eval()
    torch.testing.assert_close(run.weights(), points, rtol=1e-8, atol=1e-10)
    assert all(float((a - b).abs().max()) > 1e-4 for a, b in zip(ahead, points, strict=True))
    with pytest.raises(RuntimeError, match=r"optimizer\.train\(\)"):
        run.train(1)
    run.optimizer.zero_grad()
    run.optimizer.train()
    torch.testing.assert_close(run.weights(), ahead, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inner", [partial(torch.optim.SGD, lr=0.1), torch.optim.AdamW])
def test_disk_that_filters_nothing_is_the_optimizer_itself(inner: Any) -> None:
    ends = []
    for wrap in (lambda o: o, partial(DiSK, kappa=1.0)):
        module = model()
        optimizer = wrap(inner(module.parameters()))
        for x, y in torch.utils.data.DataLoader(data(), batch_size=10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
        ends.append([p.detach() for p in module.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-14)


def test_disk_goes_on_from_its_state() -> None:
    run = trained(Run(model(), made_by=disk, correlated_noise=PLAN), 1)
    module = model()
    module.load_state_dict(dict(zip(module.state_dict(), run.weights(), strict=True)))
    again = disk(module.parameters())
    again.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    again.eval()
    run.optimizer.eval()
    torch.testing.assert_close(list(module.parameters()), run.weights(), rtol=0, atol=0)


def test_disk_refuses() -> None:
    for kappa in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="kappa"):
            DiSK(torch.optim.SGD(model().parameters(), lr=0.1), kappa)
    for asking in (DPAdamW, ScaledAdamW):
        with pytest.raises(ValueError, match="as they are released"):
            DiSK(asking(model().parameters()))
