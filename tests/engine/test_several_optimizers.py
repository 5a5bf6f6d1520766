"""Several optimizers under one engine: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from opacus.optimizers import JointOptimizer
from opacus.optimizers.filtered import DiSK
from tests.helpers.oracle import clipped_sum, norms, per_sample_gradients, trainable
from tests.helpers.several_optimizers import (
    B,
    C,
    ScheduleFree,
    batch,
    muon_and_adamw,
    net,
    parts,
    private,
    take_steps,
)

MODES = ("hooks", "ghost", "ghost_bk")


def two_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = parts(model)
    return [torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(rest, lr=0.1)]


def loss(model: nn.Module, one: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(one[0]), one[1])


@pytest.mark.parametrize("mode", MODES)
def test_muon_and_adamw_step_on_one_clipped_sum(mode: str) -> None:
    plain, model = net(), net()
    optimizers = muon_and_adamw(plain)
    for _ in range(2):
        rows = per_sample_gradients(plain, loss, batch())
        assert (norms(rows) > C).all()
        want = clipped_sum(rows, C)
        for name, parameter in plain.named_parameters():
            parameter.grad = (want[name] / B).float()
        for optimizer in optimizers:
            optimizer.step()
    engine, wrapped, joint, criterion = private(model, muon_and_adamw(model), mode)
    take_steps(wrapped, joint, criterion)
    assert len(engine.accountant) == 2
    for ours, theirs, start in zip(*(m.parameters() for m in (model, plain, net())), strict=True):
        assert (theirs - start).abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writes", [False, True])
def test_two_optimizers_are_one_with_noise(writes: bool, mode: str) -> None:
    """One C, one noise: the same numbers as one optimizer over all."""
    one, two = net(), net()
    first = private(one, torch.optim.SGD(one.parameters(), lr=0.1), mode, sigma=1.0)
    several = two_sgd(two)
    if writes:  # to its gradients, which may share memory with those of the other optimizer
        several[0] = DiSK(several[0], kappa=1.0)
    second = private(two, several, mode, sigma=1.0)
    for engine, model, optimizer, criterion in (first, second):
        take_steps(model, optimizer, criterion)
        assert len(engine.accountant) == 2
    assert first[0].get_epsilon(1e-3) == second[0].get_epsilon(1e-3)
    for a, b, start in zip(one.parameters(), two.parameters(), net().parameters(), strict=True):
        assert not torch.equal(a, start)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_schedules_reach_each() -> None:
    model = net()
    both = muon_and_adamw(model)
    _, wrapped, optimizer, criterion = private(model, both, "ghost")
    every = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    own = torch.optim.lr_scheduler.StepLR(both[1], 1, gamma=0.1)
    take_steps(wrapped, optimizer, criterion, 1)
    every.step()
    assert [g["lr"] for o in both for g in o.param_groups] == [0.05, 0.005]
    own.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.0005])


def test_states_are_saved_and_loaded() -> None:
    model, other = net(), net()
    engine, wrapped, optimizer, criterion = private(model, muon_and_adamw(model), "ghost", 1.0)
    take_steps(wrapped, optimizer, criterion)
    buffer = io.BytesIO()
    engine.save_checkpoint(path=buffer, module=wrapped, optimizer=optimizer)
    again, fresh, second, loss_fn = private(other, muon_and_adamw(other), "ghost", 1.0)
    buffer.seek(0)
    again.load_checkpoint(path=buffer, module=fresh, optimizer=second)
    third = JointOptimizer(muon_and_adamw(other))
    third.load_state_dict(optimizer.state_dict())
    for loaded in (second.original_optimizer, third):
        assert loaded.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        for mine, p, q in zip(range(6), *map(all_parameters, (optimizer, loaded)), strict=True):
            assert optimizer.state[p].keys() == loaded.state[q].keys() != set(), mine
            for name, value in optimizer.state[p].items():
                assert torch.equal(value, loaded.state[q][name])
    take_steps(wrapped, optimizer, criterion, 1)
    take_steps(fresh, second, loss_fn, 1)
    assert len(again.accountant) == 3


def all_parameters(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def low_bit(name: str) -> Any:
    return getattr(pytest.importorskip("torchao.optim"), name)


KINDS: dict[str, Any] = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "8 bits": lambda p: low_bit("AdamW8bit")(p, lr=1e-2),
    "4 bits": lambda p: low_bit("AdamW4bit")(p, lr=1e-2),
}


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_optimizers_step_as_without_privacy(kind: str, mode: str) -> None:
    """Without noise and with a huge C. States of low-bit ones need 4,096 elements."""

    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 1024), nn.Tanh(), nn.Linear(1024, 3))

    plain, model = wide(), wide()
    _, wrapped, optimizer, criterion = private(model, KINDS[kind](model.parameters()), mode, c=1e6)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        take_steps(wrapped, optimizer, criterion, 3)
        take_steps(plain, KINDS[kind](plain.parameters()), nn.CrossEntropyLoss(), 3)
    for ours, theirs, start in zip(*(m.parameters() for m in (model, plain, wide())), strict=True):
        assert (theirs - start).abs().max() > 1e-4
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_train_and_eval_reach_those_that_have_them() -> None:
    model = net()
    matrices, rest = parts(model)
    own = ScheduleFree(matrices, lr=0.1)
    optimizer = private(model, [own, torch.optim.AdamW(rest)], "hooks")[2]
    optimizer.train()
    assert own.training
    optimizer.eval()
    assert not own.training
    other = net()
    assert not hasattr(private(other, two_sgd(other), "hooks")[2], "train")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a, b: [], "at least one"),
        (lambda a, b: [torch.optim.Muon(a)], r"'0.bias'.*in none of the optimizers"),
        (lambda a, b: [torch.optim.SGD(a), torch.optim.SGD([*a, *b])], "2 parameters are in two"),
        (lambda a, b: [torch.optim.SGD(a), torch.optim.LBFGS(b)], "LBFGS.*first-order"),
        (lambda a, b: torch.optim.LBFGS([*a, *b]), "LBFGS.*first-order"),
        (lambda a, b: [torch.optim.SGD(a), nn.Linear(1, 1)], r"got \['Linear'\]"),
        (lambda a, b: {"a": torch.optim.SGD(a)}, "optimizer is a dict"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=message):
        private(model, make(*parts(model)), "hooks")
    assert not any(m._forward_hooks for m in model.modules())


def test_a_state_of_other_groups_is_refused() -> None:
    model = net()
    joint = JointOptimizer(two_sgd(model))
    single = torch.optim.SGD(trainable(model)[1], lr=0.5)
    with pytest.raises(ValueError, match=r"groups of \[6\] parameters, .* \[2, 4\]"):
        joint.load_state_dict(single.state_dict())
    assert {g["lr"] for g in joint.param_groups} == {0.1}
