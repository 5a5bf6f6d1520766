"""Ways in which people write their training loops, and copy their models."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.engine.test_modes_match_oracle import B, assert_close, oracle, private, trainable
from tests.problems import PROBLEMS, build


def gradients(run: tuple[Any, Any, Any], clear: str, model: nn.Module) -> list[torch.Tensor]:
    """Gradients of the second of two equal steps."""
    inputs, targets = PROBLEMS["mlp"].batch(B)
    private_model, optimizer, loss_fn = run
    for _ in range(2):
        if clear == "before":
            optimizer.zero_grad()
        loss = loss_fn(private_model(inputs), targets)
        if clear == "between":
            optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            weights = [p.clone() for p in trainable(model)]
            optimizer.step()
            for p, w in zip(trainable(model), weights, strict=True):
                p.copy_(w)
        grads = [p.grad.clone() for p in trainable(model)]
        if clear == "model":
            model.zero_grad()
        elif clear == "changed":  # after the step, say by a logger; then cleared
            for p in trainable(model):
                p.grad.mul_(2.0)
            model.zero_grad(set_to_none=True)
        elif clear == "none":
            optimizer.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("clear", ["before", "between", "model", "changed", "none"])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost", "ghost_bk", "flash", "flash_bk"])
def test_gradients_may_be_cleared_anywhere(mode: str, clear: str, wrapped: bool) -> None:
    want, norms = oracle("mlp", *PROBLEMS["mlp"].batch(B), 0.5)
    assert (norms > 0.5).any()
    made, optimizer, loss_fn = private("mlp", mode, 0.5, wrap_model=wrapped)
    model = made._module
    run = (made if wrapped else model, optimizer, loss_fn)
    assert_close(gradients(run, clear, model), [w / B for w in want])


def test_gradients_never_cleared() -> None:
    run = private("mlp", "hooks", 0.5)
    with pytest.raises(ValueError, match="zero_grad"):
        gradients(run, "never", run[0]._module)
    # In ghost modes the used gradient is replaced: each step is private by itself.
    want, _ = oracle("mlp", *PROBLEMS["mlp"].batch(B), 0.5)
    run = private("mlp", "ghost", 0.5)
    assert_close(gradients(run, "never", run[0]._module), [w / B for w in want])


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost", "ghost_bk", "flash", "flash_bk"])
def test_backward_in_eval_mode_is_for_the_inputs_alone(mode: str) -> None:
    """Saliency works; a step on it is refused with the reason, and the next one is right."""
    inputs, targets = PROBLEMS["mlp"].batch(B)
    model, optimizer, loss_fn = private("mlp", mode, 0.5)
    model.eval()
    inputs.requires_grad_()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    assert inputs.grad is not None and bool(inputs.grad.any())
    with pytest.raises((ValueError, RuntimeError), match=r"eval mode|use the criterion"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises((ValueError, RuntimeError), match="eval mode"):
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
    model.train()
    want, _ = oracle("mlp", *PROBLEMS["mlp"].batch(B), 0.5)
    run = (model, optimizer, loss_fn)
    assert_close(gradients(run, "before", model._module), [w / B for w in want])


def test_the_step_that_takes_every_sample_twice_is_refused() -> None:
    """Two backward passes over batches that are the whole data set."""
    model = build("mlp")
    inputs, targets = PROBLEMS["mlp"].batch(B)
    made, optimizer, loss_fn, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=B),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode="ghost",
    )  # fmt: skip
    before = [p.clone() for p in model.parameters()]
    for _ in range(2):
        loss_fn(made(inputs), targets).backward()
    with pytest.raises(ValueError, match=r"2 batches .* before one backward"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_gradients_of_physical_batches_never_cleared() -> None:
    """Also before the first real step: a physical batch is cleared like any other."""
    inputs, targets = PROBLEMS["mlp"].batch(B)
    model, optimizer, loss_fn = private("mlp", "hooks", 0.5)
    with pytest.raises(ValueError, match="zero_grad"):
        for _ in range(2):
            optimizer.signal_skip_step(do_skip=True)
            loss_fn(model(inputs), targets).backward()
            optimizer.step()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk", "functorch"])
def test_a_copy_is_alive(mode: str, how: str) -> None:
    inputs, targets = PROBLEMS["mlp"].batch(B)
    model, _, loss_fn = private("mlp", mode, 0.5)
    loss_fn(model(inputs), targets).backward()
    if how == "deepcopy":
        again = copy.deepcopy(model)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
    again.zero_grad()
    losses = nn.functional.cross_entropy(again(inputs), targets)
    losses.backward()
    if mode.startswith("ghost"):
        _, norms = oracle("mlp", inputs, targets, 0.5)
        torch.testing.assert_close(again.get_norm_sample().double(), norms, rtol=1e-5, atol=1e-6)
    else:
        assert all(p.grad_sample.shape[0] == B for p in again.parameters())
        assert all(
            p.grad_sample is not q.grad_sample
            for p, q in zip(again.parameters(), model.parameters(), strict=True)
        )
