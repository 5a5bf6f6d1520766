"""`ft_compute_sample_grad`, the attribute of layers that no rule is written for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.bias = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x @ self.weight) + self.bias


def test_only_layers_without_a_rule_have_it_and_lose_it() -> None:
    model = nn.Sequential(Affine(), nn.Linear(2, 2))
    private = GradSampleModule(model)
    assert hasattr(model[0], "ft_compute_sample_grad")
    assert not hasattr(model[1], "ft_compute_sample_grad")
    private.to_standard_module()
    assert not hasattr(model[0], "ft_compute_sample_grad")
    everywhere = GradSampleModule(model, force_functorch=True)
    assert hasattr(model[1], "ft_compute_sample_grad")
    everywhere.to_standard_module()
    assert not any("ft_compute_sample_grad" in vars(module) for module in model.modules())


@pytest.mark.parametrize("make", [lambda m: m, copy.deepcopy], ids=["itself", "copy"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_it_computes_per_sample_gradients(
    make: Callable[[nn.Module], nn.Module], batch_first: bool
) -> None:
    private = make(GradSampleModule(Affine(), batch_first=batch_first))
    layer = private._module
    x, weights = torch.randn(5, 5, 3), torch.randn(5, 5, 2)
    (private(x) * weights).sum().div(5).backward()
    batch = 0 if batch_first else 1
    values = [p.detach() for p in layer.parameters()]
    results = layer.ft_compute_sample_grad(
        values, x.movedim(batch, 0).contiguous(), weights.movedim(batch, 0).contiguous()
    )
    for parameter, result in zip(layer.parameters(), results, strict=True):
        torch.testing.assert_close(result, parameter.grad_sample)
    assert layer.ft_compute_sample_grad.layer is layer


@pytest.mark.parametrize("wrap", [GradSampleModule, GradSampleModuleFastGradientClipping])
def test_torch_func_on_a_private_model_is_refused_with_what_to_do(
    wrap: Callable[[nn.Module], Any],
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(5, 4)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x[None],)).sum()

    compute = vmap(grad(loss), (None, 0))
    known = compute(parameters, x)
    private = wrap(model)
    with pytest.raises(RuntimeError, match=r"layer '0'.*not under torch.func.*disable_hooks"):
        compute(parameters, x)
    private.disable_hooks()
    assert_same(compute(parameters, x), known)
    private.enable_hooks()
    private.eval()
    assert_same(compute(parameters, x), known)
    private.to_standard_module().train()
    assert_same(compute(parameters, x), known)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)
