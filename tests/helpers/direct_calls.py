"""What holds of layers that run without hooks, whatever stands for their call."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module

import opacus.core.ranks.carried_layers
import opacus.core.sums.choice
from tests.helpers.carried import ROWS, STEPS, Case, batch, prefer, wanted
from tests.helpers.lone_sample import no_gradient
from tests.helpers.oracle import relative_error


def store_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All gradients that can be are stored, until the end of the test."""
    for module, name in [
        (opacus.core.sums.choice, "KEEP_PASSES"),
        (opacus.core.sums.choice, "STORE_PASSES"),
        (opacus.core.ranks.carried_layers, "OWN_WEIGHT_TOKENS"),
    ]:
        monkeypatch.setattr(module, name, getattr(module, name))  # as it was, afterwards
    prefer("store")


def learnt(ran: list[Any], every: int, **how: Any) -> Case:
    """A model in which so many layers run without hooks now, as ``ran`` notes."""
    case = Case(mode="ghost_bk", **how)
    for step in range(STEPS):
        ran.clear()
        assert case.error(0, 1, step) < 2e-5
    assert len(ran) == len(set(ran)) == every
    return case


def exact(case: Case, ran: list[Any], seed: int = 9, **how: Any) -> int:
    """A step is exact; how many layers ran without hooks."""
    ran.clear()
    assert case.error(0, 1, seed, **how) < 2e-5
    assert not any("_compiled_call_impl" in vars(m) for m in case.model.modules())
    return len(ran)


def check_autocast(case: Case, ran: list[Any], inside: bool) -> None:
    """A step under autocast, or with a block under it, rounds as it does without privacy."""
    x, y = batch(ROWS, 5)
    cast = torch.autocast("cpu", torch.bfloat16)
    sums, norms = wanted(case.double, x, y)
    if inside:
        case.model.blocks[0].forward = cast(case.model.blocks[0].forward)
        for _ in range(2):
            case.module(x)  # followed
    ran.clear()
    with contextlib.nullcontext() if inside else cast:
        output = case.module(x)
    case.loss(output.float(), y).backward()
    assert 1e-5 < relative_error(case.module.per_sample_gradient_norms.double(), norms) < 0.02
    held = [p for p in case.model.parameters() if p.requires_grad]
    for parameter, total in zip(held, sums, strict=True):
        assert relative_error(parameter.grad.double(), total) < 0.05


def check_another_weight_runs(case: Case) -> None:
    """A weight that is in a layer's place for a call is the one that runs."""
    block, other = case.model.blocks[0], torch.randn(2, 8)
    forward = block.forward

    def swapped(x: Tensor) -> Any:
        with _reparametrize_module(block, {"up.a.weight": other}):
            return forward(x)

    x = batch(ROWS, 3)[0]
    block.forward = swapped
    found = case.module(x)
    del block.forward
    case.model.eval()
    with torch.no_grad():
        block.up.a.weight.copy_(other)
    torch.testing.assert_close(found, case.model(x))


def check_what_passes_the_layer_by(case: Case) -> None:
    """Uses of a weight beside its layer, layers in eval mode and second derivatives are refused."""
    x, y = batch(ROWS, 5)
    block, forward = case.model.blocks[0], case.model.blocks[0].forward
    block.forward = lambda t: forward(t) + block.up.a.weight.sum()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.a\.weight"):
        case.loss(case.module(x), y).backward()
    assert no_gradient(case.model)
    del block.forward
    block.up.a.eval()  # alone
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.a\.weight"):
        case.loss(case.module(x), y).backward()
    block.up.a.train()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        case.module(x).sum().backward(create_graph=True)
