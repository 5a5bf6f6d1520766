"""Rows that are moved as values say: those of the data, of Python, of a generator or a counter.

Each model runs on several batches of one structure, so that what was found out in an earlier pass
is not taken for the truth in a later one. Against one sample at a time, by plain autograd.
"""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus.core.record.trail import answers
from tests.helpers.units import CLIP, assert_right, clipped_sum, private, step

B, T, D = 6, 4, 5
MODES = ["hooks", "ghost", "ghost_bk"]


class Net(nn.Module):
    """``use`` may move rows before and after the layers ``a`` and ``b``."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.calls, self.use = itertools.count(1), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self, x).flatten(1, -2).mean(1))


def in_order_of(net: Any, x: Tensor, order: Tensor) -> Tensor:
    return net.a(x[order]).tanh()[order.argsort()]


def of_randperm(net: Any, x: Tensor) -> Tensor:
    return in_order_of(net, x, torch.randperm(len(x)))


def of_python(net: Any, x: Tensor) -> Tensor:
    return in_order_of(net, x, torch.tensor(random.sample(range(len(x)), len(x))))


def of_numpy(net: Any, x: Tensor) -> Tensor:
    norms = x.detach().flatten(1).norm(dim=1).numpy()
    return in_order_of(net, x, torch.from_numpy(np.argsort(norms)))


def of_lists(net: Any, x: Tensor) -> Tensor:
    norms = x.detach().flatten(1).norm(dim=1).tolist()
    order = sorted(range(len(norms)), key=norms.__getitem__)
    rows = net.a(torch.cat([x[i : i + 1] for i in order])).tanh()
    return torch.cat([rows[order.index(i)][None] for i in range(len(x))])


def of_one_hot(net: Any, x: Tensor) -> Tensor:
    """One token of each sample, in the order of their places: as many of each sample."""
    chosen = F.one_hot(x.detach()[:, :, 0].argmax(1), T)
    place, sample = chosen.T.nonzero().unbind(1)
    rows = net.a(x[sample, place]).tanh()
    return torch.zeros_like(rows).index_copy(0, sample, rows)[:, None]


def of_a_mask_that_is_written(net: Any, x: Tensor) -> Tensor:
    chosen = torch.zeros(len(x), T, dtype=torch.bool)
    chosen[torch.arange(len(x)), x.detach()[:, :, 0].argmax(1)] = True
    place, sample = chosen.T.nonzero().unbind(1)
    rows = net.a(x[sample, place]).tanh()
    return torch.zeros_like(rows).index_copy(0, sample, rows)[:, None]


def if_needed(net: Any, x: Tensor) -> Tensor:
    order = x.detach().flatten(1).norm(dim=1).argsort()
    if torch.equal(order, torch.arange(len(x))):
        return net.a(x).tanh()
    return in_order_of(net, x, order)


def each_second_time(net: Any, x: Tensor) -> Tensor:
    return net.a(x.flip(0)).tanh().flip(0) if next(net.calls) % 2 else net.a(x).tanh()


def experts(net: Any, x: Tensor) -> Tensor:
    """Two experts of each token, as transformers routes them to layers of their own."""
    flat = x.reshape(-1, D)
    weights, chosen = net.head(flat).softmax(-1).topk(2, -1)
    masks = F.one_hot(chosen, 3).permute(2, 1, 0)
    out = torch.zeros_like(flat)
    for expert, mask in zip((net.a, net.b, net.a), masks, strict=True):
        number, token = torch.where(mask)
        rows = expert(flat[None, token].reshape(-1, D)).tanh()
        out.index_add_(0, token, rows * weights[token, number, None])
    return out.view(x.shape)


# Some samples may have nothing of what is taken: rows of zeros stand in for them.


def some_tokens(net: Any, x: Tensor) -> Tensor:
    kept = x.detach()[:, :, 0] > 1.0
    out = torch.zeros_like(x)
    out[kept] = net.a(x[kept]).tanh()
    return out


def some_tokens_in_one_line(net: Any, x: Tensor) -> Tensor:
    return net.b(some_tokens(net, x).reshape(-1, D)).view(x.shape)


def some_tokens_time_first(net: Any, x: Tensor) -> Tensor:
    turned = x.transpose(0, 1)
    kept = turned.detach()[:, :, 0] > 1.0
    out = torch.zeros_like(turned)
    out[kept] = net.a(turned[kept]).tanh()
    return net.b(out).transpose(0, 1)


USES = [
    of_randperm, of_python, of_numpy, of_lists, of_one_hot, of_a_mask_that_is_written, experts,
    some_tokens, some_tokens_in_one_line, some_tokens_time_first,
]  # fmt: skip


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Samples in the order of their size first, later in others."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(B, generator=generator) if seed else torch.arange(B)
    x = torch.randn(B, T, D, generator=generator).sign() * torch.rand(B, T, D, generator=generator)
    return (x * torch.logspace(-0.5, 1.0, B)[:, None, None])[order], torch.arange(B) % 3


def compare(made: Any, model: nn.Module, seed: int) -> None:
    x, y = batch(seed)
    want = clipped_sum(copy.deepcopy(model), x, y, list(torch.arange(B)[:, None]))
    assert_right(step(made, x, y), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", USES)
def test_rows_are_followed_in_each_pass(use: Any, mode: str) -> None:
    model = Net(use)
    made = private(copy.deepcopy(model), mode, B)
    for seed in (1, 2, 3):
        compare(made, model, seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", [if_needed, each_second_time])
def test_a_model_that_goes_on_otherwise_is_found_out(use: Any, mode: str) -> None:
    """In its second pass, which is followed again; from then on all are."""
    model = Net(use)
    made = private(copy.deepcopy(model), mode, B)
    compare(made, model, 0)
    with pytest.warns(UserWarning, match="moves rows in another way"):
        compare(made, model, 1)
    for seed in (2, 3):
        compare(made, model, seed)


@dataclass
class Held:
    x: Tensor


CONTAINERS = {
    "dataclass": (Held, lambda batch: batch.x),
    "mapping": (lambda x: UserDict(x=x), lambda batch: batch["x"]),
    "object": (lambda x: SimpleNamespace(x=x), lambda batch: batch.x),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_rows_are_followed_in_what_holds_the_inputs(kind: str, mode: str) -> None:
    wrap, unwrap = CONTAINERS[kind]

    class Unwraps(Net):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch if isinstance(batch, Tensor) else unwrap(batch))

    model = Unwraps(of_numpy)
    made = private(copy.deepcopy(model), mode, B)
    for seed in (1, 2):
        x, y = batch(seed)
        want = clipped_sum(copy.deepcopy(model), x, y, list(torch.arange(B)[:, None]))
        assert_right(step(made, wrap(x), y), want)


def in_stages(later: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, list[str]]:
    """A model that does something more, to its tokens, as soon as there is a stage."""
    stages: list[str] = []

    def use(net: Any, x: Tensor) -> Tensor:
        h = net.a(x).tanh()
        return h + later(net, h) if stages else h

    model = Net(use)
    with torch.no_grad():
        model.b.weight.mul_(30)
    return model, stages


def passes_followed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches of those passes, as they are followed."""
    sizes: list[int] = []
    begin = answers.Trail.__enter__
    monkeypatch.setattr(
        answers.Trail, "__enter__", lambda self: (sizes.append(self.count), begin(self))[1]
    )
    return sizes


# As many rows as there are samples, by a constant of the model: they could be theirs.
TABLES = [
    lambda net, h: net.b(torch.eye(T, D).to(h.dtype)),
    lambda net, h: net.b(torch.linspace(-1, 1, B * D).view(B, D).to(h.dtype)).tanh().mean(0),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", TABLES)
def test_shared_rows_in_a_layer_that_runs_later(table: Any, mode: str) -> None:
    model, stages = in_stages(table)
    made = private(copy.deepcopy(model), mode, B)
    made[1].isolation = None
    for seed in range(5):
        stages += ["more"] if seed == 3 else []
        compare(made, model, seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", TABLES)
def test_shared_rows_in_a_layer_that_is_trained_later(table: Any, mode: str) -> None:
    model, stages = in_stages(table)
    stages.append("from the start")
    made = private(copy.deepcopy(model), mode, B)
    made[1].isolation = None
    made[0].b.requires_grad_(False)
    for seed in range(3):
        x, y = batch(seed)
        made[1].zero_grad()
        made[2](made[0](x), y).backward()
        made[1].step()
    made[0].b.requires_grad_()
    for seed in range(3, 5):
        compare(made, model, seed)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_with_other_dimensions_later_is_refused(mode: str) -> None:
    """Then its rows may be anything's; it is followed the next time."""
    stages: list[str] = []

    def use(net: Any, x: Tensor) -> Tensor:
        h = net.b(net.a(x).tanh())
        return h + net.a(torch.eye(B, D).to(x.dtype) * 30).mean(0) if stages else h

    model = Net(use)
    made = private(copy.deepcopy(model), mode, B)
    made[1].isolation = None
    for seed in range(5):
        if seed == 3:
            stages.append("more")
            with pytest.raises(RuntimeError, match="layer 'a' has other rows than in an earlier"):
                step(made, *batch(seed))
        compare(made, model, seed)


def test_passes_are_followed_until_each_layer_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = passes_followed(monkeypatch)
    model, stages = in_stages(lambda net, h: net.b(h))
    made = private(copy.deepcopy(model), "ghost_bk", B)
    made[1].isolation = None
    counts = []
    for seed in range(8):
        stages += ["more"] if seed == 4 else []
        compare(made, model, seed)
        counts.append(len(followed))
    assert counts == [1, 2, 3, 4, 5, 5, 5, 5]


def test_layers_of_another_structure_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head for each task; a head that runs in the other task's pass is refused once."""
    followed = passes_followed(monkeypatch)

    class Tasks(Net):
        def forward(self, x: Tensor, task: int = 0) -> Tensor:
            return [self.b, self.head][task](self.a(x)).mean(1)[:, :3]

    model, other = Tasks(lambda net, x: x), 0
    made = private(model, "ghost_bk", B)
    made[1].isolation = None
    for number in range(40):
        step(made, *batch(number), task=number % 2)
    assert len(followed) == 4  # the first and second pass of each
    forward = Tasks.forward
    monkeypatch.setattr(Tasks, "forward", lambda self, x, task=0: forward(self, x, 1 - task))
    with pytest.raises(RuntimeError, match="layer 'b' has other rows than in an earlier"):
        step(made, *batch(other), task=1)


def test_a_layer_that_never_runs_is_named_once() -> None:
    model, _ = in_stages(lambda net, h: net.b(h))
    made = private(copy.deepcopy(model), "ghost_bk", B)
    made[1].isolation = None
    x, y = batch(0)
    with pytest.warns(UserWarning, match="did not run in the first forward passes: b. ") as seen:
        for _ in range(40):
            step(made, x, y)
    assert len(seen) == 1


def test_models_that_do_not_are_followed_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = passes_followed(monkeypatch)
    model = Net(lambda net, x: net.b(net.a(x.flatten(0, 1))).view(x.shape))
    made = private(model, "ghost_bk", B)
    x, y = batch(0)
    made[1].isolation = None
    counts = []
    for _ in range(40):
        step(made, x, y)
        counts.append(len(followed))
    assert counts == [1, *[2] * 30, *[3] * 9]


# --- the experts of transformers: one parameter for all of them ---

TEXT = (torch.arange(24).view(4, 6) * 7 % 13, torch.arange(4) % 2)


def mixtral(experts: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=13, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_labels=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=3, pad_token_id=None,
        experts_implementation=experts,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    with torch.no_grad():  # so that norms differ, and tokens do not all take the same experts
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def of_texts(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits.mean(1)[:, :2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts_of_transformers(experts: str, mode: str) -> None:
    exact = mixtral("eager").double()
    wanted, norms = [torch.zeros_like(p) for p in exact.parameters()], []
    for row in range(4):
        loss = F.cross_entropy(of_texts(exact, TEXT[0][row : row + 1]), TEXT[1][row : row + 1])
        grads = torch.autograd.grad(loss, list(exact.parameters()), materialize_grads=True)
        norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))
        wanted = [w + g * min(1.0, CLIP / norms[-1]) for w, g in zip(wanted, grads, strict=True)]
    assert min(norms) > 2 * CLIP
    model, optimizer, criterion, _ = private(mixtral(experts), mode, 4)
    optimizer.zero_grad()
    criterion(of_texts(model, TEXT[0]), TEXT[1]).backward()
    optimizer.step()
    assert_right([p.grad for p in model.parameters()], wanted)


class Router(nn.Module):
    """Flattens its tokens itself, as DeepseekV3's: a row of inputs gives several of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, D))
        self.register_buffer("bias", torch.tensor([0.1, 0.0, -0.1]))  # for the choice alone

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.reshape(-1, D), self.weight).sigmoid()
        chosen = (scores.detach() + self.bias).topk(2, -1)[1]
        return scores.gather(1, chosen), chosen


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head = Router(), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        mixed = weights[:, :1] * (1.0 + chosen[:, :1]) + weights[:, 1:]
        return self.head((x.reshape(-1, D) * mixed).view(x.shape).tanh().mean(1))


@pytest.mark.parametrize("mode", [*MODES, "ghost_bk-deferred"])
def test_a_router_that_flattens_its_tokens(mode: str) -> None:
    model = Routed().double()
    made = private(copy.deepcopy(model), mode, B)
    for seed in (1, 2):
        x, y = batch(seed)
        want = clipped_sum(copy.deepcopy(model), x, y, list(torch.arange(B)[:, None]))
        assert_right(step(made, x.double(), y), want, 1e-9)


# --- a layer without a rule of its own, used several times on rows of other kinds ---


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.shift = nn.Parameter(torch.randn(D, D) / 2), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.shift


def twice_in_one_line(net: Any, x: Tensor) -> Tensor:
    rows = net.a(net.a(x.reshape(-1, D)).tanh())
    return rows.view(x.shape)


def in_one_line_sorted_and_plain(net: Any, x: Tensor) -> Tensor:
    h = in_order_of(net, twice_in_one_line(net, x).tanh(), x.detach()[:, 0, 0].argsort())
    return net.a(h)


@pytest.mark.parametrize("mode", [*MODES, "functorch"])
@pytest.mark.parametrize("use", [twice_in_one_line, in_one_line_sorted_and_plain])
def test_uses_of_several_kinds_add_up(use: Any, mode: str, monkeypatch: Any) -> None:
    """Where the isolation check does not look."""
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    model = Net(use)
    model.a = Custom()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = private(copy.deepcopy(model), mode, B)
    compare(made, model, 1)
