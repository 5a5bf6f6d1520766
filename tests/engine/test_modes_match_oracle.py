"""Every mode gives the clipped sum that one backward per sample in float64 gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.modes import B, assert_close, oracle, private, trainable
from tests.helpers.problems import PROBLEMS, criterion


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    "mode",
    [
        "hooks",
        "ghost",
        "ghost-deferred",
        "ghost_bk",
        "ghost_bk-deferred",
        "functorch",
        "flash",
        "flash-deferred",
        "flash_bk",
        "flash_bk-deferred",
    ],
)
def test_clipped_gradient_equals_oracle(name: str, mode: str) -> None:
    inputs, targets = PROBLEMS[name].batch(B)
    _, norms = oracle(name, inputs, targets, 1.0)
    clip = norms.median().item()
    want, _ = oracle(name, inputs, targets, clip)
    assert (norms > clip * 1.001).any() and (norms < clip * 0.999).any()
    kwargs = {"deferred_norm": True} if mode.endswith("-deferred") else {}
    model, optimizer, loss_fn = private(name, mode.split("-")[0], clip, **kwargs)
    for _ in range(2):  # nothing of the first step may reach the second one
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        with torch.no_grad():
            before = [p.clone() for p in trainable(model)]
            optimizer.step()
            assert_close([p.grad for p in trainable(model)], [w / B for w in want])
            for p, b in zip(trainable(model), before, strict=True):
                p.copy_(b)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_ghost_norms_equal_oracle(name: str, mode: str, deferred: bool) -> None:
    inputs, targets = PROBLEMS[name].batch(B)
    _, norms = oracle(name, inputs, targets, 1.0)
    model, _, loss_fn = private(name, mode, 0.5, deferred_norm=deferred)
    loss_fn(model(inputs), targets).backward()
    torch.testing.assert_close(
        model.per_sample_gradient_norms.double(), norms, rtol=1e-5, atol=1e-7
    )


def test_deferred_norms_within_a_budget_are_the_same() -> None:
    inputs, targets = PROBLEMS["language"].batch(B)
    _, norms = oracle("language", inputs, targets, 1.0)
    model, _, loss_fn = private("language", "ghost", 0.5, deferred_norm=True)
    for budget, waiting in ((None, True), (0, False)):
        model.deferred_norm_budget = budget
        loss = loss_fn(model(inputs), targets)
        model._strategy.norm_pass(loss.loss_per_sample)
        assert bool(model._deferred_norm_cache) is waiting
        got = model.compute_all_norms_parallel()
        torch.testing.assert_close(got.double(), norms, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("name", ["mlp", "language", "channels"])
def test_sum_reduction(name: str, mode: str) -> None:
    inputs, targets = PROBLEMS[name].batch(B)
    want, norms = oracle(name, inputs, targets, 0.5)
    assert (norms > 0.5).any()
    model, optimizer, loss_fn = private(name, mode, 0.5, reduction="sum")
    if mode == "hooks":
        losses = criterion(name, "none")(model(inputs), targets)
        losses.sum().backward()
    else:
        loss_fn(model(inputs), targets).backward()
    optimizer.step()
    assert_close([p.grad for p in trainable(model)], want)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("name", ["mlp", "language", "channels", "own_parameters"])
def test_empty_batch_leaves_zero_gradient(name: str, mode: str) -> None:
    inputs, targets = PROBLEMS[name].batch(B)
    model, optimizer, loss_fn = private(name, mode, 0.5)
    loss_fn(model(inputs[:0]), targets[:0]).backward()
    optimizer.step()
    assert all(p.grad.abs().max() == 0 for p in trainable(model))


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_contributes_nothing(mode: str, value: float) -> None:
    inputs, targets = PROBLEMS["mlp"].batch(B)
    kept = [0, 1, 3, 4]
    want, _ = oracle("mlp", inputs[kept], targets[kept], 0.5)
    inputs[2, 1] = value
    model, optimizer, loss_fn = private("mlp", mode, 0.5)
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
    assert_close([p.grad for p in trainable(model)], [w / B for w in want])


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_physical_batches_add_up(mode: str) -> None:
    inputs, targets = PROBLEMS["mlp"].batch(B)
    want, _ = oracle("mlp", inputs, targets, 0.5)
    model, optimizer, loss_fn = private("mlp", mode, 0.5)
    for rows, last in ((slice(0, 2), False), (slice(2, 5), True)):
        optimizer.signal_skip_step(not last)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
    assert_close([p.grad for p in trainable(model)], [w / B for w in want])


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_two_backward_calls_accumulate(mode: str) -> None:
    inputs, targets = PROBLEMS["mlp"].batch(B)
    want, _ = oracle("mlp", inputs, targets, 0.5)
    model, optimizer, loss_fn = private("mlp", mode, 0.5)
    loss_fn(model(inputs[:2]), targets[:2]).backward()
    loss_fn(model(inputs[2:]), targets[2:]).backward()
    assert optimizer.accumulated_iterations == 2
    optimizer.step()
    assert_close([p.grad for p in trainable(model)], [w / (2 * B) for w in want])


def test_unused_layer_gets_zero_and_no_stale_norm() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return self.left(x) + self.right(x) if both else self.left(x)

    torch.manual_seed(0)
    base = Branches()
    inputs, targets = PROBLEMS["mlp"].batch(B)
    for mode in ("hooks", "ghost"):
        model = copy.deepcopy(base)
        data = DataLoader(TensorDataset(inputs, targets), batch_size=B)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        out = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=data, noise_multiplier=0.0,
            max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode,
        )  # fmt: skip
        loss_fn = out[2] if len(out) == 4 else nn.CrossEntropyLoss()
        for both in (True, False):
            out[1].zero_grad()
            loss_fn(out[0](inputs, both), targets).backward()
            out[1].step()
        assert model.right.weight.grad.abs().max() == 0
        single = nn.Linear(6, 3)
        single.load_state_dict(base.left.state_dict())
        grads = []
        for x, y in zip(inputs, targets, strict=True):
            loss = nn.functional.cross_entropy(single(x[None]), y[None])
            g = torch.autograd.grad(loss, list(single.parameters()))
            norm = torch.sqrt(sum(t.square().sum() for t in g))
            grads.append(g[0] * min(1.0, 1 / (norm.item() + 1e-6)))
        torch.testing.assert_close(
            model.left.weight.grad, torch.stack(grads).mean(0), rtol=1e-5, atol=1e-6
        )


def test_parameter_used_past_its_layer_is_named() -> None:
    class Sneaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(nn.functional.linear(self.layer(x), self.layer.weight))

    inputs, targets = PROBLEMS["mlp"].batch(B)
    model = Sneaky()
    out = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=B),
        noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode="ghost",
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"layer\.weight"):
        out[2](out[0](inputs), targets).backward()
    assert model.layer.weight.grad is None


def test_ordinary_loss_is_refused_at_step() -> None:
    inputs, targets = PROBLEMS["mlp"].batch(B)
    model, optimizer, _ = private("mlp", "ghost", 0.5)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(RuntimeError, match="no clipped gradient"):
        optimizer.step()
