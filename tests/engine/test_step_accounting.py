"""The step itself counts with the engine's accountant, whatever is attached or goes wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant, create_accountant

MODES = ["hooks", "ghost", "ghost_bk"]


def private(mode: str, engine: PrivacyEngine | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    given: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=4),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "poisson_sampling": False,
        "grad_sample_mode": mode,
    }
    out = (engine or PrivacyEngine()).make_private(**{**given, **changes})
    return (out[0], out[1], out[2] if len(out) == 4 else nn.CrossEntropyLoss(), out[-1])


def step(model: Any, optimizer: Any, criterion: Any, clear: bool = True) -> None:
    if clear:
        optimizer.zero_grad()
    criterion(model(torch.randn(4, 6)), torch.zeros(4).long()).backward()
    optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_own_hooks_are_added(mode: str) -> None:
    engine = PrivacyEngine()
    model, optimizer, criterion, _ = private(mode, engine)
    seen: list[str] = []
    optimizer.attach_step_hook(lambda _: seen.append("one"))
    optimizer.attach_step_hook(lambda _: seen.append("two"))
    for _ in range(3):
        step(model, optimizer, criterion)
    assert seen == ["one", "two"] * 3
    assert engine.accountant.history == [(1.0, 0.25, 3)]


def test_hooks_see_the_released_gradient() -> None:
    model, optimizer, criterion, _ = private("hooks")
    seen = []
    optimizer.attach_step_hook(lambda o: seen.append(o.params[0].grad.clone()))
    step(model, optimizer, criterion)
    assert torch.equal(seen[0], optimizer.params[0].grad)


@pytest.mark.parametrize("chained", [False, True])
def test_accountants_hook_counts_once(chained: bool) -> None:
    engine = PrivacyEngine()
    model, optimizer, criterion, _ = private("hooks", engine)
    if chained:  # the way to keep Opacus' only hook
        before = optimizer.step_hook
        optimizer.attach_step_hook(lambda o: before(o))
    else:
        optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=0.25))
    step(model, optimizer, criterion)
    assert engine.accountant.history == [(1.0, 0.25, 1)]


def test_larger_rate_counts(caplog: pytest.LogCaptureFixture) -> None:
    engine = PrivacyEngine()
    model, optimizer, criterion, _ = private("hooks", engine)
    for rate in (0.1, 0.5):
        optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=rate))
    assert "larger rate" in caplog.text
    step(model, optimizer, criterion)
    assert engine.accountant.history == [(1.0, 0.5, 1)]


def test_second_accountant_counts_too() -> None:
    engine, other = PrivacyEngine(), RDPAccountant()
    model, optimizer, criterion, _ = private("hooks", engine)
    optimizer.attach_step_hook(other.get_optimizer_hook_fn(sample_rate=0.25))
    step(model, optimizer, criterion)
    assert other.history == engine.accountant.history == [(1.0, 0.25, 1)]


@pytest.mark.parametrize("mode", MODES)
def test_replaced_accountant_takes_the_history_over(mode: str) -> None:
    engine = PrivacyEngine()
    model, optimizer, criterion, _ = private(mode, engine)
    step(model, optimizer, criterion)
    engine.accountant = create_accountant(mechanism="rdp")
    step(model, optimizer, criterion)
    assert engine.accountant.history == [(1.0, 0.25, 2)]
    spent = engine.get_epsilon(1e-5)
    # One that has the history already, as after loading a state, does not get it twice.
    copied = create_accountant(mechanism="rdp")
    copied.history = [*engine.accountant.history]
    engine.accountant = copied
    assert engine.get_epsilon(1e-5) == spent > 0
    engine.accountant = engine.accountant
    assert len(engine.accountant) == 2


def failing(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory")


@pytest.mark.parametrize("mode", MODES)
def test_failure_while_noise_is_drawn_leaves_nothing(mode: str) -> None:
    engine = PrivacyEngine()
    model, optimizer, criterion, _ = private(mode, engine)
    noised = optimizer._parallelism.noised

    def after_one(*args: Any) -> Any:
        yield next(iter(noised(*args)))
        failing()

    optimizer._parallelism.noised = after_one
    weight = model._module.weight.detach().clone()
    with pytest.raises(MemoryError):
        step(model, optimizer, criterion)
    optimizer._parallelism.noised = noised
    for parameter in optimizer.params:  # neither the sum nor a part of what was noised
        assert parameter.grad is None
        assert parameter.summed_grad is None and parameter.grad_sample is None
    assert torch.equal(weight, model._module.weight) and len(engine.accountant) == 0
    step(model, optimizer, criterion, clear=False)
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("mode", MODES)
def test_failure_after_the_noise_counts(mode: str) -> None:
    engine = PrivacyEngine()
    model, optimizer, criterion, _ = private(mode, engine)
    optimizer.original_optimizer.step = failing
    with pytest.raises(MemoryError):
        step(model, optimizer, criterion)
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("mode", MODES)
def test_accountant_that_refuses_stops_the_release(mode: str) -> None:
    engine = PrivacyEngine()
    model, optimizer, criterion, _ = private(mode, engine)
    engine.accountant.step = failing  # type: ignore[method-assign]
    weight = model._module.weight.detach().clone()
    with pytest.raises(MemoryError):
        step(model, optimizer, criterion)
    assert all(p.grad is None and p.summed_grad is None for p in optimizer.params)
    assert torch.equal(weight, model._module.weight)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("mode", MODES)
def test_state_dict_of_a_new_optimizer_takes_no_step(mode: str, kind: Any) -> None:
    engine = PrivacyEngine()
    model = nn.Linear(6, 3)
    plain = kind(model.parameters(), lr=0.1)
    wrapped, optimizer, criterion, _ = private(mode, engine, module=model, optimizer=plain)
    before = copy.deepcopy(model.state_dict())
    _, state = get_state_dict(model, optimizer)
    assert len(engine.accountant) == 0 and optimizer.param_groups[0]["lr"] == 0.1
    assert all(not s["exp_avg"].any() for s in plain.state.values())
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    set_state_dict(model, optimizer, model_state_dict=before, optim_state_dict=state)
    assert len(engine.accountant) == 0
    for _ in range(2):
        optimizer.zero_grad()
        criterion(wrapped(torch.randn(4, 6)), torch.zeros(4).long()).backward()
        optimizer.step()
    assert len(engine.accountant) == 2
    get_state_dict(model, optimizer)
    assert len(engine.accountant) == 2
