"""The tap of a carried layer: its backward gives the carriers the per-sample gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opacus.core.record.carriers import carries, carry
from opacus.core.rules.linear import LinearRule, TransposedLinearRule

B, D, P = 3, 4, 5


class Unnamed:
    """What a compiled graph may read of a layer: equal layers would not share it otherwise."""

    def __init__(self, transposed: bool) -> None:
        self.rule = TransposedLinearRule() if transposed else LinearRule()

    @property
    def spec(self) -> Any:
        raise AssertionError("the name of a layer is read in a compiled graph")


class Named(Unnamed):
    spec = "layer 'a'"


def carriers_of(transposed: bool) -> tuple[Tensor, Tensor]:
    weight = torch.zeros(()).expand(B, *((D, P) if transposed else (P, D)))
    return weight.clone().requires_grad_(), torch.zeros(B, P, requires_grad=True)


@pytest.mark.filterwarnings("ignore")  # torch.compile causes them in torch
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("compiled", "tokens"), [(False, ()), (False, (2,)), (False, (2, 3)), (True, (2, 3))]
)
def test_carriers_get_the_gradients_of_rows(
    compiled: bool, transposed: bool, tokens: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(B, *tokens, D)
    output = torch.randn(B, *tokens, P, requires_grad=True)
    factor = torch.randn(B, *tokens, P)
    layer: Any = (Unnamed if compiled else Named)(transposed)

    def tapped(carriers: tuple[Tensor, ...], x: Tensor, output: Tensor) -> Tensor:
        return carry(carriers, layer, x, output) * factor

    own = carriers_of(transposed)
    assert carries(own, (x,), {}, output)
    run = torch.compile(tapped, backend="aot_eager", fullgraph=True) if compiled else tapped
    value = run(own, x, output)
    assert torch.equal(value, output * factor)
    value.sum().backward()
    assert torch.equal(output.grad, factor)
    for row in range(B):  # plain autograd, a sample at a time
        weight = torch.zeros(D, P, requires_grad=True)
        bias = torch.zeros(P, requires_grad=True)
        ((x[row] @ weight + bias) * factor[row]).sum().backward()
        wanted = weight.grad if transposed else weight.grad.t()
        torch.testing.assert_close(own[0].grad[row], wanted)
        torch.testing.assert_close(own[1].grad[row], bias.grad)


def test_a_gradient_is_not_differentiated_again() -> None:
    output = torch.randn(B, P, requires_grad=True)
    layer: Any = Named(False)
    tapped = carry(carriers_of(False), layer, torch.randn(B, D), output)
    with pytest.raises(RuntimeError, match="through layer 'a' is taken with create_graph=True"):
        torch.autograd.grad(tapped.sum(), output, create_graph=True)


def test_other_calls_are_not_carried() -> None:
    own, x, output = carriers_of(False), torch.ones(B, 2, D), torch.ones(B, 2, P)
    for args, kwargs, result in [
        ((x, x), {}, output),
        ((x,), {"mask": None}, output),
        ((x[:1],), {}, output),
        ((x,), {}, output[:2]),
        ((x,), {}, (output,)),
        ((x.long(),), {}, output),
        ((x[0],), {}, output),
    ]:
        assert not carries(own, args, kwargs, result)
