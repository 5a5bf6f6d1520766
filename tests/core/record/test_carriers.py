"""The tap of a carried layer: its backward gives the carriers what their form makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.core.record.carriers import BOTH, Carriers, carries, carry
from opacus.core.rules import rule_for
from opacus.core.rules.linear import TransposedLinearRule
from opacus.core.rules.spec import LayerSpec

B, D, P = 3, 4, 5


class Hooks:
    """Those of a layer, as a compiled graph sees them: it may not read what names the layer."""

    class _Layer:
        @property
        def spec(self) -> Any:
            raise AssertionError("the name of a layer is read in a compiled graph")

    def __init__(self, compiled: bool, carriers: Carriers) -> None:
        self.layer: Any = self._Layer()
        if not compiled:
            self.layer = type("Layer", (), {"spec": "layer 'a'"})
        self.carriers: Carriers | None = carriers


class Transposed(nn.Module):
    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d, p)), nn.Parameter(torch.zeros(p))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, P),
    "weight": lambda: nn.Linear(D, P, bias=False),
    "transposed": lambda: Transposed(D, P),
    "layer norm": lambda: nn.LayerNorm(D, eps=0.1),
    "its bias": lambda: nn.LayerNorm(D),
    "RMS norm": lambda: nn.RMSNorm(D),
}


def spec_of(module: nn.Module, name: str) -> tuple[Any, LayerSpec]:
    if name == "its bias":
        module.weight.requires_grad_(False)
    rule = TransposedLinearRule() if name == "transposed" else rule_for(module)
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    return rule, LayerSpec("a", type(module), tuple(shapes), shapes, rule.options(module))


def carriers_of(form: Any, *shapes: tuple[int, ...], dims: int = 3) -> Carriers:
    return Carriers(form, tuple([torch.zeros(B, *s, requires_grad=True) for s in shapes]), dims)


@pytest.mark.filterwarnings("ignore")  # torch.compile causes them in torch
@pytest.mark.parametrize("name", [*LAYERS, "both"])
@pytest.mark.parametrize(
    ("compiled", "tokens"), [(False, ()), (False, (2,)), (False, (2, 3)), (True, (2, 3))]
)
def test_carriers_get_what_their_form_makes(
    compiled: bool, name: str, tokens: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module = LAYERS.get(name, LAYERS["linear"])()
    x = torch.randn(B, *tokens, D)
    output = module(x).detach().requires_grad_()
    factor = torch.randn(output.shape)
    rule, spec = spec_of(module, name)
    if name == "both":
        own = carriers_of(BOTH, x.shape[1:], output.shape[1:], dims=x.dim())
    else:
        own = carriers_of(rule.carried(spec), *spec.shapes.values(), dims=x.dim())
    hooks = Hooks(compiled, own)

    def tapped(x: Tensor, output: Tensor) -> Tensor:
        carriers = hooks.carriers
        assert carriers is not None and carries(carriers, (x,), {}, output)
        return carry(hooks, carriers, x, output) * factor

    run = torch.compile(tapped, backend="aot_eager", fullgraph=True) if compiled else tapped
    value = run(x, output)
    assert torch.equal(value, output * factor)
    # Two inputs must not be added: a layer that is kept can be used once.
    assert hooks.carriers is (None if name == "both" else own)
    value.sum().backward()
    assert torch.equal(output.grad, factor)
    if name == "both":
        assert torch.equal(own.tensors[0].grad, x) and torch.equal(own.tensors[1].grad, factor)
        return
    trained = [p for p in module.parameters() if p.requires_grad]
    for row in range(B):  # plain autograd, a sample at a time
        wanted = torch.autograd.grad((module(x[row]) * factor[row]).sum(), trained)
        for carrier, grad in zip(own.tensors, wanted, strict=True):
            torch.testing.assert_close(carrier.grad[row], grad)


def test_a_gradient_is_not_differentiated_again() -> None:
    output = torch.randn(B, P, requires_grad=True)
    own = carriers_of(BOTH, (D,), (P,))
    tapped = carry(Hooks(False, own), own, torch.randn(B, D), output)
    with pytest.raises(RuntimeError, match="through layer 'a' is taken with create_graph=True"):
        torch.autograd.grad(tapped.sum(), output, create_graph=True)


def test_other_calls_are_not_carried() -> None:
    rule, spec = spec_of(nn.Linear(D, P), "linear")
    x, output = torch.ones(B, 2, D), torch.ones(B, 2, P)
    form = rule.carried(spec)
    for own in (carriers_of(form, (P, D), (P,)), carriers_of(BOTH, (2, D), (2, P))):
        assert carries(own, (x,), {}, output)
        for args, kwargs, result in [
            ((x, x), {}, output),
            ((x,), {"mask": None}, output),
            ((x[:1],), {}, output),
            ((x,), {}, output[:2]),
            ((x,), {}, (output,)),
            ((x.long(),), {}, output),
            ((x[0],), {}, output),
            ((x[:, 0],), {}, output[:, 0]),
        ]:
            assert not carries(own, args, kwargs, result)
    # These would be the gradients of carriers of other shapes and dtypes, which autograd changes.
    for args, result in [((x[:, :1],), output), ((x.double(),), output), ((x,), output.double())]:
        assert not carries(own, args, {}, result)
    assert not carries(carriers_of(form, (P, D), (P,)), (x,), {}, output.double())
    assert carries(carriers_of(form, (P, D), (P,)), (x,), {}, output.half())  # rounds nothing


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["linear", "both"])
def test_an_input_changed_in_place_is_refused_in_a_graph(name: str) -> None:
    """Else the graph would save what it has become."""
    rule, spec = spec_of(nn.Linear(D, P), "linear")
    if name == "both":
        own = carriers_of(BOTH, (2, D), (2, P))
    else:
        own = carriers_of(rule.carried(spec), *spec.shapes.values())

    def changing(x: Tensor, output: Tensor) -> Tensor:
        hidden = x + 1
        value = carry(Hooks(True, own), own, hidden, output)
        hidden.mul_(3)
        return value.sum() + hidden.sum()

    output = torch.randn(B, 2, P, requires_grad=True)
    with pytest.raises(RuntimeError, match="changed in place after the layer has run"):
        torch.compile(changing, backend="aot_eager")(torch.randn(B, 2, D), output)
