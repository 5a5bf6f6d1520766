"""A private parameter takes gradients from its layers' records alone, in the hook modes too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from opacus import GradSampleModule
from tests.helpers.releases import CLIP, B, batch, build, check, private, want

HOOKS = ["hooks", "functorch"]
MODES = [*HOOKS, "ghost", "ghost_bk"]


class Net(nn.Module):
    """Logits of an MLP, and what ``extra`` adds to them."""

    def __init__(self, extra: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.a(x)))
        return self.b(hidden) + (0.0 if self.extra is None else self.extra(self, hidden))


DIRECT: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "F.linear": (lambda net, h: F.linear(h, net.b.weight), r"\['b.weight'\]"),
    "matmul": (lambda net, h: h @ net.b.weight.T, r"\['b.weight'\]"),
    "norm": (
        lambda net, h: F.layer_norm(h, (10,), net.norm.weight, net.norm.bias)[:, :3],
        r"\['norm.bias', 'norm.weight'\]",
    ),
    "forward": (lambda net, h: net.b.forward(h), r"\['b.bias', 'b.weight'\]"),
    "penalty": (lambda net, h: net.a.weight.square().sum(), r"\['a.weight'\]"),
}


@pytest.mark.parametrize("kind", DIRECT)
@pytest.mark.parametrize("mode", HOOKS)
def test_a_parameter_used_directly_is_refused_by_name(mode: str, kind: str) -> None:
    extra, named = DIRECT[kind]
    model, (inputs, targets) = Net(extra), batch()
    wrapped, optimizer, criterion, _ = private(model, mode)
    loss = criterion(wrapped(inputs), targets)
    with pytest.raises(RuntimeError, match=rf"{named} received gradients that were not clipped"):
        loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is None and parameter.grad_sample is None
    with pytest.raises(RuntimeError, match="backward pass of this batch has failed"):
        optimizer.step()
    model.extra = None
    expected = want(Net(), inputs, targets)
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()
    check(model, expected)


@pytest.mark.parametrize("mode", HOOKS)
def test_a_parameter_used_only_directly_is_refused(mode: str) -> None:
    model, (inputs, targets) = build(), batch()
    _, _, criterion, _ = private(model, mode)
    hidden = model[1](model[0](inputs))
    with pytest.raises(RuntimeError, match=r"\['2.bias', '2.weight'\] received"):
        criterion(F.linear(hidden, model[2].weight, model[2].bias), targets).backward()


def test_a_loss_of_weights_alone_is_refused() -> None:
    model, (inputs, targets) = build(), batch()
    wrapped, _, criterion, _ = private(model, "hooks")
    criterion(wrapped(inputs), targets).backward()
    with pytest.raises(RuntimeError, match=r"\['0.weight'\] received .* penalty on weights"):
        model[0].weight.square().sum().backward()


def test_copies_of_a_private_model_refuse_as_well() -> None:
    model = GradSampleModule(Net())
    inputs = batch()[0]
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        with pytest.raises(RuntimeError, match=r"\['b.weight'\] received"):
            (copied(inputs).sum() + copied.b.weight.sum()).backward()


def test_passes_that_are_not_private_may_use_parameters() -> None:
    module, inputs = Net(), batch()[0]
    model = GradSampleModule(module)
    model.eval()
    (model(inputs).sum() + module.b.weight.sum()).backward()
    model.train()
    model.disable_hooks()
    (model(inputs).sum() + module.b.weight.sum()).backward()
    model.enable_hooks()
    assert module.b.weight.grad is not None
    assert not model.to_standard_module().b.weight._backward_hooks
    (module(inputs).sum() + module.b.weight.sum()).backward()


class Uses(nn.Module):
    """A layer that runs twice, tied tables, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.twice = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 7)
        self.head.weight = self.table.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        for _ in range(2):
            hidden = torch.tanh(self.twice(hidden))
        return self.head(self.norm(hidden)).mean(1)


@pytest.mark.parametrize("functorch", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("length", [1, 30])  # sums of records, sums of gradients
def test_gradients_are_those_of_ordinary_training(
    reduction: str, length: int, functorch: bool
) -> None:
    plain = Uses().double()
    model = GradSampleModule(
        copy.deepcopy(plain), loss_reduction=reduction, force_functorch=functorch
    )
    for step in range(2):  # the second one is added
        torch.manual_seed(step)
        ids, targets = torch.randint(0, 7, (4 + step, length)), torch.randint(0, 7, (4 + step,))
        for module in (plain, model):
            F.cross_entropy(module(ids), targets, reduction=reduction).backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (not parameter.requires_grad)
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-10, atol=1e-12)
            assert len(parameter.grad_sample) == 2


def test_retained_graphs_add_up() -> None:
    model, (inputs, targets) = GradSampleModule(build()), batch()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for parameter, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad)


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_gradients_of_inputs_leave_no_trace(how: str) -> None:
    model, (inputs, targets) = build(), batch()
    expected = want(model, inputs, targets)
    wrapped, optimizer, criterion, _ = private(model, "hooks")
    optimizer.zero_grad(set_to_none=True)
    attacked = inputs.clone().requires_grad_()
    loss = criterion(wrapped(attacked), targets)
    if how == "grad":
        (grad,) = torch.autograd.grad(loss, attacked)
    else:
        loss.backward(inputs=[attacked])
        grad = attacked.grad
    assert grad.norm() > 0
    assert all(p.grad_sample is None and p.grad is None for p in model.parameters())
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()
    check(model, expected)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_gradients_of_gradients_are_refused(mode: str) -> None:
    model, (inputs, _) = build(), batch()
    wrapped, *_ = private(model, mode)
    inputs.requires_grad_()
    with pytest.raises(RuntimeError, match=r"layer '2' \(Linear\).*create_graph=True"):
        torch.autograd.grad(wrapped(inputs).sum(), inputs, create_graph=True)
    wrapped.eval()
    (grad,) = torch.autograd.grad(wrapped(inputs).sum(), inputs, create_graph=True)
    assert grad.norm() > 0


def weight_norm(layer: nn.Linear) -> Any:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


def pruned(layer: nn.Linear) -> Any:
    return prune.l1_unstructured(layer, "weight", amount=0.4)


@pytest.mark.parametrize("change", [weight_norm, pruned])
@pytest.mark.parametrize("mode", MODES)
def test_weights_computed_by_a_hook_before_the_layer(
    mode: str, change: Callable[[nn.Linear], nn.Module]
) -> None:
    model, (inputs, targets) = build(), batch()
    model[0] = change(model[0])
    grads = []  # such a model cannot be copied, so it is its own reference
    for i in range(B):
        loss = F.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1])
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    norms = torch.stack([torch.cat([g.flatten() for g in own]).norm() for own in grads])
    assert norms.min() > CLIP
    each = zip(*grads, strict=True)
    expected = [sum(CLIP / n * g for n, g in zip(norms, gs, strict=True)) for gs in each]
    wrapped, optimizer, criterion, _ = private(model, mode)
    criterion(wrapped(inputs), targets).backward()
    optimizer.step()
    check(model, [g.double() for g in expected])
