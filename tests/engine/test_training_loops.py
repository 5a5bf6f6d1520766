"""Ways in which people write their training loops, and copy their models."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers.modes import B, assert_close, oracle, private, trainable
from tests.helpers.problems import PROBLEMS, build


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


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_input_gradients_of_one_graph_many_times(mode: str) -> None:
    """As saliency maps and Jacobians do; the same graph is then clipped as ever."""
    inputs, targets = PROBLEMS["mlp"].batch(B)
    model, optimizer, loss_fn = private("mlp", mode, 0.5)
    outputs = model(inputs.requires_grad_())
    for column in range(2):
        (got,) = torch.autograd.grad(outputs[:, column].sum(), inputs, retain_graph=True)
        assert bool(got.any())
    loss_fn(outputs, targets).backward()
    optimizer.step()
    want, _ = oracle("mlp", *PROBLEMS["mlp"].batch(B), 0.5)
    assert_close([p.grad for p in trainable(model)], [w / B for w in want])


@pytest.mark.parametrize("mode", ["ghost", "ghost deferred", "ghost_bk", "ghost_bk deferred"])
@pytest.mark.parametrize("finite", [True, False])
def test_saved_tensors_that_come_back_to_one_buffer(mode: str, finite: bool) -> None:
    """What is kept would change: right numbers or a refusal, never others silently."""
    mode, _, deferred = mode.partition(" ")
    inputs, targets = torch.randn(4, 600) * 0.01, torch.tensor([0, 1, 2, 0])
    others, limit = torch.randn(4, 600), 0.05
    if not finite:
        inputs[1, 2] = float("nan")
    model = TwoInputs()
    want = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    wide = copy.deepcopy(model).double()
    for i in range(4):
        row = slice(i, i + 1)
        wide.zero_grad()
        scores = wide((inputs[row].double(), others[row].double()))
        nn.functional.cross_entropy(scores, targets[row]).backward()
        grads = [p.grad for p in wide.parameters()]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for total, grad in zip(want, grads, strict=True):
            if norm.isfinite():
                total += grad * (limit / norm).clamp(max=1)
    rows = TensorDataset(torch.zeros(8, 1), torch.zeros(8))
    module, optimizer, loss_fn, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        data_loader=DataLoader(rows, batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=limit,
        poisson_sampling=False,
        loss_reduction="sum",
        grad_sample_mode=mode,
        deferred_norm=bool(deferred),
    )
    buffers: dict[torch.Size, torch.Tensor] = {}

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return buffers.setdefault(tensor.shape, torch.empty_like(tensor)).copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        loss = loss_fn(module((inputs, others)), targets)
    if mode == "ghost" and not deferred:
        loss.backward()
        optimizer.step()
        assert_close([p.grad for p in model.parameters()], [w.float() for w in want])
        return
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(600, 600), nn.Linear(600, 600)
        self.head = nn.Linear(600, 3)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.head(self.first(inputs[0]) + self.second(inputs[1]))


def test_an_unfinished_batch_is_not_counted_by_adaptive_clipping() -> None:
    """Its samples may come again in the next one, and would count twice."""
    model, optimizer, loss_fn = private(
        "mlp", "hooks", 0.5, clipping="adaptive", target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.2, max_clipbound=5.0, min_clipbound=0.1, unclipped_num_std=1.0,
    )  # fmt: skip
    inputs, targets = PROBLEMS["mlp"].batch(B)
    optimizer.signal_skip_step(True)
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
    assert optimizer.sample_size == B
    optimizer.reset_accumulation()
    assert (optimizer.sample_size, optimizer.unclipped_num, optimizer._count) == (0, 0, 0.0)


def test_a_hook_that_fails_leaves_no_samples_to_be_counted_by_adaptive_clipping() -> None:
    model, optimizer, loss_fn = private(
        "mlp", "hooks", 0.5, clipping="adaptive", unclipped_num_std=1.0
    )
    optimizer.attach_step_hook(lambda _: 1 / 0)
    inputs, targets = PROBLEMS["mlp"].batch(B)
    with pytest.raises(ZeroDivisionError):
        for more in (True, False):
            optimizer.signal_skip_step(more)
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.sample_size == 2 * B
    optimizer.zero_grad()
    assert (optimizer.sample_size, optimizer.unclipped_num, optimizer._count) == (0, 0, 0.0)


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


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_gradients_of_physical_batches_never_cleared(mode: str) -> None:
    """What a physical batch has left is in the sum already, and is replaced."""
    inputs, targets = PROBLEMS["mlp"].batch(B)
    want, _ = oracle("mlp", inputs, targets, 0.5)
    model, optimizer, loss_fn = private("mlp", mode, 0.5)
    for more in (True, False):
        optimizer.signal_skip_step(do_skip=more)
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
    assert_close([p.grad for p in trainable(model._module)], [2 * w / B for w in want])


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


class Interrupted(nn.Module):
    """A layer with a parameter of its own, in which the user interrupts the program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.interrupt = False

    def forward(self, x: Tensor) -> Tensor:
        if self.interrupt:
            raise KeyboardInterrupt
        return x * self.weight


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_an_interrupted_forward_pass_leaves_no_parameter_behind(mode: str) -> None:
    """Hooks that torch calls after every exception do not run after this one."""
    torch.manual_seed(0)
    layer = Interrupted()
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 3))
    inputs, targets = torch.randn(8, 6), torch.arange(8) % 3
    out = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=8),
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    private, optimizer = out[0], out[1]
    loss = out[2] if len(out) == 4 else nn.CrossEntropyLoss()
    layer.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        private(inputs)
    layer.interrupt = False
    loss(private(inputs), targets).backward()
    optimizer.pre_step()
    assert isinstance(layer._parameters["weight"], nn.Parameter)
    assert layer.weight.grad is not None and layer.weight.grad.any()


@pytest.mark.parametrize("mode", ["hooks", "ghost", "no_op"])
def test_attributes_of_the_model_are_its_own(mode: str) -> None:
    """Detectors have ``names``, of their classes."""
    model: Any = nn.Linear(6, 3)
    model.names, model.isolation = ["cat", "dog"], "none"
    out = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(), data_loader=DataLoader(TensorDataset(torch.randn(8, 6))),
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip
    private_model, optimizer = out[0], out[1]
    assert private_model.names == ["cat", "dog"]
    optimizer.zero_grad()
    rows, loss = torch.randn(2, 6), out[2] if len(out) == 4 else nn.CrossEntropyLoss()
    loss(private_model(rows), torch.tensor([0, 1])).backward()
    if mode == "no_op":
        for p in model.parameters():
            p.grad_sample = torch.randn(2, *p.shape)
    optimizer.step()
