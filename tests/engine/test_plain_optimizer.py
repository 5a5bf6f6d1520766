"""Steps that the plain optimizer takes by itself are refused: nothing would be private in them."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.optimizers.adam import DPAdamW
from opacus.utils.batch_memory_manager import BatchMemoryManager


def private(plain: Any, model: nn.Module, mode: str = "hooks") -> Any:
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    made: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=plain,
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    return made if len(made) == 4 else (*made[:2], nn.CrossEntropyLoss(), made[2])


def backward(made: Any) -> None:
    x, y = next(iter(made[3]))
    made[2](made[0](x), y).backward()


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_the_variable_that_still_holds_the_plain_optimizer(mode: str) -> None:
    model = nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    made = private(plain, model, mode)
    before = model.weight.detach().clone()
    plain.zero_grad()
    backward(made)
    with pytest.raises(RuntimeError, match="plain optimizer"):
        plain.step()
    assert torch.equal(model.weight, before)
    made[1].step()
    assert not torch.equal(model.weight, before)
    made[1].zero_grad()
    plain.step()  # without gradients nothing is released


MODES = ["hooks", "functorch", "ew", "ghost", "ghost_bk"]


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_was_built_later(mode: str) -> None:
    model = nn.Linear(4, 2)
    made = private(torch.optim.SGD(model.parameters(), lr=0.1), model, mode)
    later = torch.optim.Adam(made[0].parameters())
    unrelated = nn.Linear(2, 2)
    elsewhere = torch.optim.SGD(unrelated.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    backward(made)
    unrelated(torch.ones(1, 2)).sum().backward()
    elsewhere.step()
    with pytest.raises(RuntimeError, match=r"another optimizer \(Adam\)"):
        later.step()
    assert torch.equal(model.weight, before)
    made[1].step()
    later.step()  # with what was released
    made[1].zero_grad()
    later.step()
    made[0].disable_hooks()
    model.weight.grad = None  # what follows is public
    made[0](torch.ones(2, 4)).square().sum().backward()
    before = model.weight.detach().clone()
    later.step()
    assert not torch.equal(model.weight, before)
    del made  # nothing private is left
    model.weight.grad = torch.ones_like(model.weight)
    later.step()


@pytest.mark.parametrize("mode", MODES)
def test_the_private_optimizer_that_nobody_holds(mode: str) -> None:
    """The gradients are the model's: as long as that is private, no other optimizer steps."""
    model = nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper, _, criterion, loader = private(plain, model, mode)
    del _
    gc.collect()
    before = model.weight.detach().clone()
    backward((wrapper, None, criterion, loader))
    with pytest.raises(RuntimeError, match="plain optimizer"):
        plain.step()
    assert torch.equal(model.weight, before)
    public = wrapper.to_standard_module()
    del wrapper, criterion
    gc.collect()
    public.weight.grad = torch.ones_like(before)
    plain.step()
    assert torch.equal(model.weight, before - 0.1)


def abandon(made: Any) -> None:
    """A loop over physical batches is left between backward and step."""
    with BatchMemoryManager(
        data_loader=made[3], max_physical_batch_size=4, optimizer=made[1]
    ) as physical:
        for x, y in physical:
            made[2](made[0](x), y).backward()
            break


DROPS: dict[str, Any] = {
    "to_standard_module": lambda made: (backward(made), made[0].to_standard_module()),
    "reset_accumulation": lambda made: (backward(made), made[1].reset_accumulation()),
    "a loop that is left": abandon,
}


@pytest.mark.parametrize("how", DROPS)
@pytest.mark.parametrize("mode", MODES)
def test_no_gradient_of_a_batch_that_was_dropped_is_left(mode: str, how: str) -> None:
    """Nothing tells any more that it is private; loops that clear after steps would use it."""
    model = nn.Linear(4, 2)
    made = private(torch.optim.SGD(model.parameters(), lr=0.1), model, mode)
    later = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    DROPS[how](made)
    later.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_private_no_longer_is_trained_by_its_plain_optimizer(mode: str) -> None:
    model = nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    made = private(plain, model, mode)
    backward(made)
    public = made[0].to_standard_module()
    before = model.weight.detach().clone()
    public(torch.ones(2, 4)).square().sum().backward()
    plain.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("as_keyword", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_a_closure_forms(mode: str, as_keyword: bool) -> None:
    """Lightning steps so: one that was given the plain optimizer would train without noise."""
    model = nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    made = private(plain, model, mode)
    later = torch.optim.SGD(model.parameters(), lr=0.1)
    public = nn.Linear(2, 2)
    elsewhere = torch.optim.SGD(public.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def closure() -> float:
        backward(made)
        return 2.0

    how: Any = ((), {"closure": closure}) if as_keyword else ((closure,), {})
    for optimizer in (plain, later):
        made[1].zero_grad()
        with pytest.raises(RuntimeError, match="not private"):
            optimizer.step(*how[0], **how[1])
        assert torch.equal(model.weight, before)
    made[1].zero_grad()
    assert elsewhere.step(*how[0], **how[1]) == 2.0
    made[1].zero_grad()
    assert made[1].step(*how[0], **how[1]) == 2.0
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("mode", MODES)
def test_no_gradient_of_a_physical_batch_is_left(mode: str) -> None:
    """Not for the plain optimizer, nor for others: it is neither clipped nor noised."""
    model = nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    made = private(plain, model, mode)
    later = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    made[1].signal_skip_step(do_skip=True)
    backward(made)
    made[1].step()
    plain.step()
    later.step()
    assert torch.equal(model.weight, before)


def test_another_private_optimizer_clips_what_it_finds() -> None:
    """Also while one that was made before, of the same parameters, is alive."""
    model = nn.Linear(4, 2)
    first = private(torch.optim.SGD(model.parameters(), lr=0.1), model)
    first[0].to_standard_module()
    second = private(torch.optim.SGD(model.parameters(), lr=0.1), model)
    backward(second)
    second[1].step()
    with pytest.raises(ValueError, match="zero_grad"):
        first[1].step()


def test_an_optimizer_of_clipped_sums_refuses_a_model_that_leaves_samples() -> None:
    model = GradSampleModule(nn.Linear(4, 2))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DPOptimizerFastGradientClipping(
        plain, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4
    )
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="use DPOptimizer"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_parts_of_a_joint_optimizer_are_guarded_and_told_the_noise() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    corrected = DPAdamW(model[0].parameters())
    other = torch.optim.SGD(model[1].parameters(), lr=0.1)
    made = private([corrected, other], model)
    backward(made)
    with pytest.raises(RuntimeError, match="plain optimizer"):
        other.step()
    made[1].step()
    assert corrected.noise_std == pytest.approx(1.0 / 8)
    assert not hasattr(made[1].original_optimizer.optimizers[1], "noise_std")


def test_steps_by_hand_and_a_second_private_optimizer_work() -> None:
    model = nn.Linear(4, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    first = private(plain, model)
    backward(first)
    assert first[1].pre_step()
    plain.step()  # as loops do that call the two parts of a step
    first[0].to_standard_module()
    second = private(plain, model)
    second[1].zero_grad()
    backward(second)
    second[1].step()  # the guard of the first is gone


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_would_be_another_run(how: Any, mode: str) -> None:
    model = nn.Linear(4, 2)
    made = private(torch.optim.SGD(model.parameters(), lr=0.1), model, mode)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        how(made[1])
