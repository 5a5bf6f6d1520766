"""The rule for any module: every way a module can be called, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from opacus.core.rules import rule_for
from opacus.core.rules.generic import Call, GenericRule
from opacus.core.rules.spec import LayerSpec, make_spec
from tests.core.rules.cases import CASES, call_of, norm_sq, observe
from tests.helpers import oracle
from tests.helpers.oracle import relative_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

B = 3


@pytest.mark.parametrize("name", [n for n in CASES if n != "embedding_sparse"])
def test_any_layer_of_the_table(name: str) -> None:
    case = CASES[name]
    seen = observe(case.layer(), case.inputs(B), generic=True)
    grads = seen.rule.per_sample_grad(seen.spec, seen.activations, seen.backprops)
    norms = seen.rule.norm_sq(seen.spec, seen.activations, seen.backprops)
    factors = torch.rand(B, dtype=torch.float64)
    total = seen.rule.weighted_grad(seen.spec, seen.activations, seen.backprops, factors)
    assert grads.keys() == norms.keys() == total.keys() == seen.want.keys()
    for name, want in seen.want.items():
        assert relative_error(grads[name], want) <= 1e-10
        assert relative_error(norms[name], norm_sq(want)) <= 1e-10
        assert relative_error(total[name], torch.tensordot(factors, want, dims=1)) <= 1e-10


def check(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    sample: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
) -> None:
    """Compare with the oracle.

    Args:
        module: Returns a tensor or several ones, batch first.
        args: Its arguments for B samples.
        kwargs: Its keyword arguments.
        sample: Arguments of one sample; by default row i of every argument.
    """
    module, (args, kwargs) = module.double(), oracle.to_double((args, kwargs or {}))
    outputs = _outputs(module(*args, **kwargs))
    backprops = tuple(torch.randn_like(o) for o in outputs)

    def loss_of(module: nn.Module, batch: tuple[Tensor, tuple[Tensor, ...]]) -> Tensor:
        (index,), rows = batch[0].tolist(), batch[1]
        one = sample(index) if sample else oracle.sample((args, kwargs), index)
        one_args, one_kwargs = oracle.to_double(one)
        outputs = _outputs(module(*one_args, **one_kwargs))
        return sum((o * g).sum() for o, g in zip(outputs, rows, strict=True))

    every = oracle.per_sample_gradients(module, loss_of, (torch.arange(B), backprops))
    rule, spec = GenericRule(module), make_spec("net.any", module, {})
    want = {name: every[name] for name in spec.params}
    given = backprops if len(backprops) > 1 else backprops[0]
    call = call_of(module, *args, **kwargs)
    got = rule.per_sample_grad(spec, call, given)
    assert got.keys() == want.keys()
    factors = torch.rand(B, dtype=torch.float64)
    total = rule.weighted_grad(spec, call, given, factors)
    for name in want:
        assert want[name].any()
        assert relative_error(got[name], want[name]) <= 1e-10
        weighted = torch.tensordot(factors, want[name], dims=1)
        assert relative_error(total[name], weighted) <= 1e-10


def _outputs(output: Any) -> tuple[Tensor, ...]:
    values = output.values() if isinstance(output, dict) else output
    return (output,) if isinstance(output, Tensor) else tuple(values)


class Scale(nn.Module):
    """Base of the modules below: one vector as parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)


class TwoOutputs(Scale):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, (x.sum(1) * self.scale.sum()).square()


class Mapping(Scale):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x * self.scale, "b": x.square() * self.scale}


class Keywords(Scale):
    def forward(self, x: Tensor, flag: bool, *, other: Tensor, name: str, none: None) -> Tensor:
        assert flag and name == "sum" and none is None
        return (x + other) * self.scale


class Nested(Scale):
    def forward(self, inputs: dict[str, Any]) -> Tensor:
        return inputs["pair"][0] * self.scale + inputs["pair"][1].sin() * self.scale


class Masked(Scale):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (mask @ x) * self.scale


class CountsCalls(Scale):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * self.scale


class Branches(Scale):
    """Control flow on values, which cannot be mapped."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([r * self.scale if r.sum().item() > 0 else r / self.scale for r in x])


class Squeezes(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).squeeze()


class Indexes(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[i] * self.scale * len(x.shape) for i in range(x.shape[0])])


class Parent(Scale):
    """Owns a parameter beside a child that has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.child(x * self.scale)) * self.scale


ONE_INPUT: list[type[nn.Module]] = [TwoOutputs, Mapping, CountsCalls, Branches, Indexes, Parent]


@pytest.mark.parametrize("kind", ONE_INPUT)
def test_modules_of_one_input(kind: type[nn.Module]) -> None:
    check(kind(), (torch.randn(B, 4),))


def test_keyword_and_other_arguments() -> None:
    kwargs = {"other": torch.randn(B, 4), "name": "sum", "none": None}
    check(Keywords(), (torch.randn(B, 4), True), kwargs)


def test_nested_arguments() -> None:
    check(Nested(), ({"pair": [torch.randn(B, 4), torch.randn(B, 4)]},))


def test_tensors_without_the_batch_are_the_same_for_all() -> None:
    x, mask = torch.randn(B, 5, 4), torch.rand(5, 5)
    check(Masked(), (x, mask), sample=lambda i: ((x[i : i + 1], mask), {}))


def test_tensors_without_the_batch_where_the_batch_is_the_second_dimension() -> None:
    class TimeFirst(Scale):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.einsum("st,tbd->sbd", mask, x) * self.scale

    module = TimeFirst()
    x, mask, g = torch.randn(5, B, 4), torch.rand(5, 5), torch.randn(5, B, 4)
    given = call_of(module, x.transpose(0, 1), mask.transpose(0, 1))
    call = Call(given.args, given.kwargs, given.parameters, given.buffers, batch_dim=1)
    want = torch.einsum("st,tbd,sbd->bd", mask, x, g)
    rule, spec = GenericRule(module), make_spec("", module, {})
    got = rule.per_sample_grad(spec, call, g.transpose(0, 1))["scale"]
    total = rule.weighted_grad(spec, call, g.transpose(0, 1), None)["scale"]
    assert relative_error(got, want) <= 1e-5
    assert relative_error(total, want.sum(0)) <= 1e-5


def test_a_batch_of_one_that_is_squeezed() -> None:
    module = Squeezes()
    x, g = torch.randn(B, 4), torch.randn(B, 4)
    got = GenericRule(module).per_sample_grad(make_spec("", module, {}), call_of(module, x), g)
    assert relative_error(got["scale"], x * g) <= 1e-6


def test_buffers_are_left_alone() -> None:
    module = CountsCalls()
    x, g = torch.randn(B, 4), torch.randn(B, 4)
    rule, spec, call = GenericRule(module), make_spec("", module, {}), call_of(module, x)
    rule.per_sample_grad(spec, call, g)
    rule.weighted_grad(spec, call, g, None)
    assert module.calls == 0 and not module.mean.any()


def test_a_child_that_shares_the_parameter_is_a_constant() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(4, 4, bias=False)
            self.own = self.child.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x) + x @ self.own * 2

    module = Tied()
    x, g = torch.randn(B, 4), torch.randn(B, 4)
    rule, spec, call = GenericRule(module), make_spec("", module, {}), call_of(module, x)
    want = 2 * torch.einsum("bi,bj->bij", x, g)
    assert relative_error(rule.per_sample_grad(spec, call, g)["own"], want) <= 1e-6
    assert relative_error(rule.weighted_grad(spec, call, g, None)["own"], want.sum(0)) <= 1e-6


def test_samples_draw_different_random_numbers() -> None:
    class Noisy(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * torch.rand(4)

    module = Noisy()
    x = torch.ones(B, 4)
    got = GenericRule(module).per_sample_grad(make_spec("", module, {}), call_of(module, x), x)
    assert not torch.allclose(got["scale"][0], got["scale"][1])


@pytest.mark.parametrize("kind", [*ONE_INPUT, Squeezes])
def test_an_empty_batch(kind: type[nn.Module]) -> None:
    module = kind()
    rule, spec = GenericRule(module), make_spec("", module, {})
    call, g = call_of(module, torch.randn(0, 4)), torch.randn(0, 4)
    assert rule.per_sample_grad(spec, call, g)["scale"].shape == (0, 4)
    assert rule.norm_sq(spec, call, g)["scale"].shape == (0,)
    assert not rule.weighted_grad(spec, call, g, torch.zeros(0))["scale"].any()


@pytest.mark.parametrize("layers", [1, B])
def test_a_recurrent_layer_whose_batch_is_the_second_dimension(layers: int) -> None:
    module = nn.GRU(4, 5, num_layers=layers).double()
    x = torch.randn(7, B, 4, dtype=torch.float64)
    output, state = module(x)
    g_output, g_state = torch.randn_like(output), torch.randn_like(state)
    want = {name: [] for name, _ in module.named_parameters()}
    for i in range(B):
        out, last = module(x[:, i : i + 1])
        loss = (out * g_output[:, i : i + 1]).sum() + (last * g_state[:, i : i + 1]).sum()
        grads = torch.autograd.grad(loss, list(module.parameters()))
        for name, grad in zip(want, grads, strict=True):
            want[name].append(grad)
    call = call_of(module, x.transpose(0, 1))
    call = Call(call.args, call.kwargs, call.parameters, call.buffers, batch_dim=1)
    rule, spec = GenericRule(module), make_spec("", module, {})
    backprops = (g_output.transpose(0, 1), g_state.transpose(0, 1))
    got = rule.per_sample_grad(spec, call, backprops)
    total = rule.weighted_grad(spec, call, backprops, None)
    for name in want:
        assert relative_error(got[name], torch.stack(want[name])) <= 1e-10
        assert relative_error(total[name], torch.stack(want[name]).sum(0)) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_module_that_ran_under_autocast(dtype: torch.dtype) -> None:
    class Product(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ torch.outer(self.scale, self.scale))

    module = Product()
    x, g = torch.randn(B, 4).to(dtype), torch.randn(B, 4).to(dtype)
    with pytest.raises(RuntimeError, match="dtype"):
        module(x)
    want = oracle.per_sample_gradients(module, lambda m, b: (m(b[0]) * b[1]).sum(), (x, g))
    rule, spec, call = GenericRule(module), make_spec("", module, {}), call_of(module, x)
    got = rule.per_sample_grad(spec, call, g)["scale"]
    total = rule.weighted_grad(spec, call, g, None)["scale"]
    assert relative_error(got, want["scale"]) <= 5e-2
    assert relative_error(total, want["scale"].sum(0)) <= 5e-2


def run(module: nn.Module, call: Call, backprops: Any) -> LayerSpec:
    spec = make_spec("net.any", module, {})
    GenericRule(module).per_sample_grad(spec, call, backprops)
    return spec


def test_a_module_that_never_sees_the_batch_is_named() -> None:
    class Constant(Scale):
        def forward(self, x: Tensor | None = None) -> Tensor:
            return self.scale.expand(B, 4) * 2

    module, g = Constant(), torch.randn(B, 4)
    for args in ((), (torch.randn(7, 2),)):
        with pytest.raises(
            ValueError, match=r"net\.any.*Constant.*\[3, 4\].*\[1, 4\].*batch is not"
        ):
            run(module, call_of(module, *args), g)


def test_outputs_that_are_not_batch_first_are_named() -> None:
    module = nn.GRU(4, 5, num_layers=B, batch_first=True)  # as many layers as samples
    x = torch.randn(B, 7, 4)
    output, state = module(x)
    with pytest.raises(ValueError, match=r"net\.any.*GRU.*\[3, 7, 5\], \[3, 3, 5\]"):
        run(module, call_of(module, x), (torch.randn_like(output), torch.randn_like(state)))


def test_outputs_of_different_batches_are_named() -> None:
    module = TwoOutputs()
    with pytest.raises(ValueError, match=r"net\.any.*TwoOutputs.*\[3, 4\], \[2\]"):
        run(module, call_of(module, torch.randn(B, 4)), (torch.randn(B, 4), torch.randn(2)))


def test_errors_of_the_module_are_kept() -> None:
    class Fails(Scale):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of paint")

    module = Fails()
    with pytest.raises(ValueError, match=r"net\.any.*out of paint"):
        run(module, call_of(module, torch.randn(B, 4)), torch.randn(B, 4))


def test_children_that_are_sharded_by_themselves_are_refused(one_rank: None) -> None:
    module = Parent()
    fully_shard(module.child)
    with pytest.raises(ValueError, match=r"net\.any.*sharded by themselves"):
        run(module, call_of(module, torch.randn(B, 4)), torch.randn(B, 4))


def test_it_is_what_unknown_layers_get() -> None:
    class MyLinear(nn.Linear):
        pass

    assert isinstance(rule_for(MyLinear(3, 4)), GenericRule)
    assert rule_for(MyLinear(3, 4)).needs_parameters


class Cubes(torch.autograd.Function):
    """Written in the way that torch.func cannot transform."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale**3, (grad * x).sum(0) * 3 * scale**2


class CustomFunction(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return Cubes.apply(x, self.scale)


class ReadsNumPy(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * float(abs(x.detach().numpy()).sum())


class PartlyUnused(Scale):
    def __init__(self) -> None:
        super().__init__()
        self.seldom = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + (x * self.seldom if x[0, 0].item() > 0 else 0)


@pytest.mark.parametrize("kind", [CustomFunction, ReadsNumPy])
def test_custom_functions_without_vmap(kind: type[nn.Module]) -> None:
    module = kind().double()
    x, g = torch.randn(B, 4).double(), torch.randn(B, 4).double()
    rule, spec, call = GenericRule(module), make_spec("", module, {}), call_of(module, x)
    want = oracle.per_sample_gradients(module, lambda m, b: (m(b[0]) * b[1]).sum(), (x, g))
    assert relative_error(rule.per_sample_grad(spec, call, g)["scale"], want["scale"]) <= 1e-10
    if kind is CustomFunction:
        total = rule.weighted_grad(spec, call, g, None)["scale"]
        assert relative_error(total, want["scale"].sum(0)) <= 1e-10


def test_parameters_that_some_samples_do_not_use() -> None:
    module = PartlyUnused().double()
    x, g = torch.randn(B, 4).double(), torch.randn(B, 4).double()
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0])
    got = GenericRule(module).per_sample_grad(make_spec("", module, {}), call_of(module, x), g)
    want = oracle.per_sample_gradients(module, lambda m, b: (m(b[0]) * b[1]).sum(), (x, g))
    assert not want["seldom"][1].any()
    for name in want:
        assert relative_error(got[name], want[name]) <= 1e-10


def test_outputs_without_parameters_have_no_part() -> None:
    class PassesThrough(ReadsNumPy):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x * 2

    module, x = PassesThrough(), torch.randn(B, 4)
    g, other = torch.randn(B, 4), torch.randn(B, 4)
    spec, call = make_spec("", module, {}), call_of(module, x)
    got = GenericRule(module).per_sample_grad(spec, call, (g, other))["scale"]
    want = x * g * x.abs().sum(1, keepdim=True)
    assert relative_error(got, want) <= 1e-6
