"""Attacks on batches of one sample: nothing is clipped together, lost, or refused without need."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opacus.layers import DPGRU, DPLSTM, DPRNN
from tests.helpers import oracle
from tests.helpers.lone_sample import C, no_gradient, private, prove, vectors
from tests.helpers.problems import build

MODES = pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])


def total_norm(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()


def is_clipped_gradient(model: nn.Module, plain: nn.Module, inputs: Tensor, targets: Tensor) -> Any:
    """Whether the model's gradients are those of one sample, clipped."""
    plain = copy.deepcopy(plain).double()
    F.cross_entropy(plain(inputs.double()), targets).backward()
    norm = total_norm(plain)
    assert norm > C
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return all(oracle.relative_error(p.grad, q.grad * C / (norm + 1e-6)) < 2e-5 for p, q in pairs)


# --- several samples that look like one ---


class Rows(nn.Module):
    """Rows are samples, whatever came in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        return self.layer(torch.cat(x) if isinstance(x, list) else x.reshape(-1, 6))


@MODES
@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_samples_that_the_inputs_hide_are_not_clipped_as_one(mode: str, kind: str) -> None:
    """Their losses look like those of one sample's tokens; only layers see the rows."""
    model = Rows()
    plain = copy.deepcopy(model)
    module, optimizer, loss = private(model, mode)
    inputs, targets = vectors()
    if kind == "list":  # the first batch has one sample, and proves too little
        prove(module, optimizer, loss, [inputs[:1]], targets[:1])  # type: ignore[arg-type]
        several: Any = list(inputs.split(1))
    else:
        prove(module, optimizer, loss, inputs, targets)
        several = inputs[None]
    with pytest.raises(RuntimeError, match="one sample, but layer 'layer' saw 4 rows"):
        loss(module(several), targets).backward()
    assert no_gradient(model)
    loss(module(several), targets).backward()  # tapped from now on: four rows of one sample
    assert is_clipped_gradient(model, plain, inputs, targets)


@MODES
@pytest.mark.parametrize("size", [1, 2])
def test_outputs_of_several_passes_are_not_one_batch(mode: str, size: int) -> None:
    """Rows of one pass would be weighted with factors of another's."""
    model = build("mlp")
    module, optimizer, loss = private(model, mode)
    inputs, targets = vectors()
    prove(module, optimizer, loss, inputs, targets)
    with pytest.raises(ValueError, match=f"4 losses for outputs of {4 // size} forward passes"):
        loss(torch.cat([module(part) for part in inputs.split(size)]), targets)
    optimizer.zero_grad()
    for part, labels in zip(inputs.split(size), targets.split(size), strict=True):
        loss(module(part), labels).backward()
    data = (inputs, targets)
    grads = oracle.per_sample_gradients(
        build("mlp"), lambda m, b: F.cross_entropy(m(b[0]), b[1]), data
    )
    for name, want in oracle.clipped_sum(grads, C).items():
        assert oracle.relative_error(model.get_parameter(name).grad, want) < 2e-5  # type: ignore


# --- checkpoints ---


class Block(nn.Module):
    """A block that may be checkpointed."""

    def __init__(self, reentrant: bool | None = False) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.head(self.block(x))
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


@MODES
def test_an_ordinary_backward_through_checkpoints(mode: str) -> None:
    model = Block()
    plain = copy.deepcopy(model)
    module, optimizer, loss = private(model, mode)
    prove(module, optimizer, loss, *vectors())
    inputs, targets = vectors(1)
    x, y = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    (got,) = torch.autograd.grad(module(x).sum(), x)  # a generator's gradient, say
    (want,) = torch.autograd.grad(plain(y).sum(), y)
    assert torch.allclose(got, want, atol=1e-6)
    F.cross_entropy(module(inputs), targets).backward()
    F.cross_entropy(plain(inputs), targets).backward()
    assert no_gradient(model)
    assert torch.allclose(module.get_norm_sample(), total_norm(plain).reshape(1), rtol=1e-5)


@MODES
@pytest.mark.parametrize("first", [1, 4])
def test_checkpoints_are_run_again_as_they_were(mode: str, first: int) -> None:
    """A pass with taps and one without, both waiting for their backward."""
    model = Block()
    plain = copy.deepcopy(model)
    module, optimizer, loss = private(model, mode)
    inputs, targets = vectors()
    prove(module, optimizer, loss, inputs, targets)
    one, other = slice(0, first), slice(0, 5 - first)
    kept = loss(module(inputs[one]), targets[one])
    other_loss = loss(module(inputs[other]), targets[other])
    lone, tapped = (kept, other_loss) if first == 1 else (other_loss, kept)
    lone.backward()
    assert is_clipped_gradient(model, plain, inputs[:1], targets[:1])
    optimizer.zero_grad()
    tapped.backward()
    assert C < total_norm(model) <= 4 * C


@MODES
def test_a_model_checkpointed_as_a_whole_twice(mode: str) -> None:
    model = Block(None)
    plain = copy.deepcopy(model).double()
    module, optimizer, loss = private(model, mode)
    prove(module, optimizer, loss, *vectors())
    inputs, targets = vectors(2)
    parts = [
        loss(checkpoint(module, inputs[i : i + 1], use_reentrant=False), targets[i : i + 1])
        for i in range(2)
    ]
    (parts[0] + parts[1]).backward()
    F.cross_entropy(plain(inputs.double()), targets, reduction="sum").backward()
    norm = total_norm(plain)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert oracle.relative_error(got.grad, want.grad * C / (norm + 1e-6)) < 2e-5  # type: ignore


@MODES
def test_reentrant_checkpoints_that_come_later_are_refused_once(mode: str) -> None:
    model = Block(None)
    plain = copy.deepcopy(model)
    module, optimizer, loss = private(model, mode)
    prove(module, optimizer, loss, *vectors())
    model.reentrant = True
    inputs, targets = vectors(1)
    inputs.requires_grad_()
    with pytest.raises(RuntimeError, match="received gradients that were not clipped"):
        loss(module(inputs), targets).backward()
    assert no_gradient(model)
    optimizer.zero_grad()
    loss(module(inputs), targets).backward()
    plain.reentrant = None  # type: ignore[assignment]
    assert is_clipped_gradient(model, plain, inputs.detach(), targets)


# --- who else has to do with the parameters ---


class Headed(nn.Module):
    """A body that two models may share, and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


@MODES
def test_a_layer_of_two_private_models(mode: str) -> None:
    """The hooks of one leave the aliases of the other alone."""
    body = nn.Linear(6, 6)
    models = [Headed(body), Headed(body)]
    plain = copy.deepcopy(models)
    inputs, targets = vectors()
    parts = [private(model, mode) for model in models]
    for module, optimizer, loss in parts:
        prove(module, optimizer, loss, inputs, targets)
    for (module, optimizer, loss), model, alone in zip(parts, models, plain, strict=True):
        loss(module(inputs[:1]), targets[:1]).backward()
        assert is_clipped_gradient(model, alone, inputs[:1], targets[:1])
        optimizer.zero_grad(set_to_none=True)


class Limited(nn.Module):
    """Limits its weights as the forward pass begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data = self.layer.weight.data.clamp(-0.1, 0.1)
        return self.layer(x)


def test_data_that_the_forward_assigns_stay() -> None:
    model = Limited()
    weight = model.layer.weight
    module, optimizer, loss = private(model)
    prove(module, optimizer, loss, *vectors())
    weight.data.mul_(10)
    module(vectors(1)[0])
    assert model.layer.weight is weight
    assert weight.abs().max() <= 0.1


class Stops(nn.Module):
    """Is interrupted between two layers when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.stop = nn.Linear(6, 6), nn.Linear(6, 3), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.stop:
            raise KeyboardInterrupt
        return self.second(x)


def test_ordinary_training_after_an_interruption() -> None:
    """Of a model without wrapper, which nobody tells of a KeyboardInterrupt."""
    model = Stops()
    hooks, optimizer, loss = private(model, wrap_model=False)
    inputs, targets = vectors()
    prove(model, optimizer, loss, inputs, targets)
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        model(inputs[:1])
    model.stop = False
    hooks.disable_hooks()
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(model(inputs[:1]), targets[:1]).backward()
    assert all(isinstance(p, nn.Parameter) and p.grad is not None for p in model.parameters())


def test_norms_of_an_ordinary_backward_are_of_all_passes() -> None:
    model = build("mlp")
    plain = build("mlp")
    module, optimizer, loss = private(model)
    inputs, targets = vectors()
    prove(module, optimizer, loss, inputs, targets)
    for m in (module, plain):
        (F.cross_entropy(m(inputs[:1]), targets[:1]) + m(inputs[1:2]).square().sum()).backward()
    assert torch.allclose(module.get_norm_sample(), total_norm(plain).reshape(1), rtol=1e-5)


def test_functional_transforms_are_refused_with_advice() -> None:
    module, optimizer, loss = private(build("mlp"))
    prove(module, optimizer, loss, *vectors())
    with pytest.raises(RuntimeError, match=r"call disable_hooks\(\) or eval\(\)"):
        torch.func.grad(lambda x: module(x).sum())(vectors(1)[0])


class Sequences(nn.Module):
    """A recurrent layer, which has its submodules' parameters under other names, and a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.head = kind(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@MODES
@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, DPRNN])
def test_recurrent_layers(kind: type[nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    model = Sequences(kind)
    plain = copy.deepcopy(model)
    inputs, targets = 3 * torch.randn(4, 5, 6), torch.randint(0, 3, (4,))
    module, optimizer, loss = private(model, mode, rows=(inputs, targets))
    prove(module, optimizer, loss, inputs, targets)
    loss(module(inputs[:1]), targets[:1]).backward()
    assert is_clipped_gradient(model, plain, inputs[:1], targets[:1])
