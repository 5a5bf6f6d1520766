"""What a model begins to keep of its samples after many steps is refused as what it keeps at once.

Nothing of these steps is looked at anyway: they are not the first of their kind, and take the same
course as those before.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from opacus import IsolationError
from opacus.core.isolation.probe import Probe
from tests.helpers import oracle
from tests.helpers.distributed import run_distributed
from tests.helpers.kept_values import B, D, Net, batch, step
from tests.helpers.releases import CLIP, private

WARM = 38  # steps; the second and some around the 32nd are looked at anyway


def calls(net: Any) -> int:
    net.calls = getattr(net, "calls", 0) + 1
    return int(net.calls)


def average(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h - net.mean)
    if calls(net) > WARM:
        net.mean.lerp_(h.detach().mean(0), 0.1)
    return out


def new_average(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h - net.mean)
    if calls(net) > WARM:
        net.mean = 0.9 * net.mean + 0.1 * h.detach().mean(0)
    return out


def seldom(net: Any, x: Tensor) -> Tensor:
    """In step 40, and in every fifth one after it."""
    h = net.a(x)
    out = net.b(h - net.mean)
    if calls(net) > WARM and net.calls % 5 == 0:
        net.mean.lerp_(h.detach().mean(0), 0.1)
    return out


def looked_at(net: Any, x: Tensor) -> Tensor:
    """In a step in which rows are followed anyway, the next one of which is not."""
    h = net.a(x)
    out = net.b(h - net.mean)
    if calls(net) >= 37:
        net.mean.lerp_(h.detach().mean(0), 0.1)
    return out


def entry(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    net.means = getattr(net, "means", {"mean": torch.zeros(D).double()})
    out = net.b(h - net.means["mean"])
    if calls(net) > WARM:
        net.means["mean"] = h.detach().mean(0)
    return out


def after_a_log(net: Any, x: Tensor) -> Tensor:
    """A list that grows uses up the checks of new settings."""
    net.sizes.append(0.0)
    return average(net, x)


def item(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    net.state = net.state or [torch.zeros(D).double()]
    out = net.b(h - net.state[0])
    if calls(net) > WARM:
        net.state[0].add_(h.detach().mean(0))
    return out


def codes(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h - net.code)
    if calls(net) > WARM:
        net.code.lerp_(h.detach().mean(0), 0.1)
    return out


KEPT = {
    average: 40,
    new_average: 40,
    seldom: 41,
    looked_at: 38,
    entry: 40,
    after_a_log: 40,
}


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("use", list(KEPT))
def test_tensors_that_are_kept_from_some_step_on(use: Any, mode: str) -> None:
    """The first step that would read it is refused, and those after it."""
    made = private(Net(use).double(), mode)
    for seed in range(1, KEPT[use]):
        step(made, *batch(seed))
    for seed in range(3):
        with pytest.raises(ValueError, match="holds what was computed from samples of an earlier"):
            step(made, *batch(seed))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("use", [codes, item])
def test_what_runs_of_the_check_change_too(use: Any, mode: str) -> None:
    made = private(Net(use).double(), mode)
    with pytest.warns(UserWarning, match="cannot be checked"):
        for seed in range(WARM + 1):
            step(made, *batch(seed))
    with pytest.raises(ValueError, match=r"holds what was computed from samples"):
        step(made, *batch(1))


def number(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h * (1 + net.size))
    if calls(net) > WARM and net.calls % 5 == 0:
        net.size = 0.99 * net.size + 0.01 * h.detach().abs().mean().item()
    return out


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_a_number_that_is_kept_from_some_step_on(mode: str) -> None:
    """The step that writes it is refused."""
    made = private(Net(number).double(), mode)
    for seed in range(1, 40):
        step(made, *batch(seed))
    with pytest.raises(IsolationError, match=r"keeps of samples in 'size'"):
        step(made, *batch(0))


def queue(net: Any, x: Tensor) -> Tensor:
    """It is written to from the first step on, and read from some step on."""
    h = net.a(x)
    if calls(net) > WARM:
        keys = torch.cat([*net.queue, net.mean[None]])
        h = (h @ keys.T).softmax(-1) @ keys + h
    net.queue.append(net.a(x).detach())
    return net.b(h)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_a_queue_that_is_read_from_some_step_on(mode: str) -> None:
    """The step that reads it is refused, and those after it."""
    made = private(Net(queue).double(), mode)
    for seed in range(WARM):
        step(made, *batch(seed))
    with pytest.raises(IsolationError, match="holds what was computed from samples of an earlier"):
        step(made, *batch(0))
    with pytest.raises(ValueError, match="holds what was computed from samples of an earlier"):
        step(made, *batch(1))


USES = {"number": number, "tensor": average, "queue": queue}


def ranks(rank: int, world_size: int, mode: str, kind: str) -> tuple[int, str]:
    """The step that is refused."""
    made = private(fully_shard(Net(USES[kind]).double()), mode)
    for seed in range(1, 50):
        try:
            step(made, *batch(2 * seed + rank))
        except (IsolationError, ValueError) as error:
            return seed, str(error)
    return -1, ""


@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk"])
@pytest.mark.parametrize(("kind", "at"), [("number", 40), ("tensor", 40), ("queue", 39)])
def test_on_ranks(kind: str, at: int, mode: str) -> None:
    found = run_distributed(ranks, 2, mode, kind)
    assert [seed for seed, _ in found] == [at, at]
    said = "keeps of samples in 'size'" if kind == "number" else "holds what was computed"
    assert all(said in text for _, text in found)


# --- right ones ---


def counts(net: Any, x: Tensor) -> Tensor:
    """In an attribute, in a buffer, and in what follows from them from some step on."""
    net.register_buffer("steps", getattr(net, "steps", torch.zeros(1)) + 1)
    if calls(net) > WARM:
        net.size = max(0.1, 1 - net.calls / 1000)
        net.mean.fill_(net.size)
    return net.b(net.a(x) * (1 + net.size) + net.mean)


def tables(net: Any, x: Tensor) -> Tensor:
    """Like those of rotary embeddings, and masks by length, which grow as samples get longer."""
    length = D if calls(net) <= WARM else 2 * D
    if net.state is None or len(net.state) < length:
        net.state = torch.arange(length).double() / D
        net.sizes.append(float(length))
    net.masks = getattr(net, "masks", {})
    if length not in net.masks:
        net.masks[length] = torch.ones(length, length).tril().double()
    return net.b(net.a(x) * net.state[:D] + net.masks[length][D - 1, :D])


def diary(net: Any, x: Tensor) -> Tensor:
    """What is for looking at, from some step on."""
    h = net.a(x)
    if calls(net) > WARM:
        net.queue.append(h.detach())
        net.sizes.append(h.detach().norm().item())
        net.state = h.detach()
        net.mean.copy_(h.detach().mean(0))
        net.size = time.time()
        net.array += h.detach().numpy().mean(0)
    return net.b(h)


def other_course(net: Any, x: Tensor) -> Tensor:
    """What is for looking at, and another operation from some step on."""
    h = net.a(x)
    net.queue.append(h.detach())
    net.state = h.detach()
    return net.b(h.sin() if calls(net) > WARM else h)


def draws(net: Any, x: Tensor) -> Tensor:
    """Of a generator of its own; the same for all samples."""
    if calls(net) > WARM and net.state is None:
        net.state = torch.Generator().manual_seed(1)
    if net.state is not None:
        net.mean = torch.rand(D, generator=net.state).double()
    return net.b(net.a(x))


def of_the_pass(net: Any, x: Tensor) -> Tensor:
    """From some step on it hands a value from one part to another by an attribute."""
    h = net.a(x)
    if calls(net) > WARM:
        net.state = h
        h, net.state = net.state * 1, None
    return net.b(h)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("use", [counts, tables, diary, other_course, draws, of_the_pass])
def test_right_models(use: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, made_checks = Net(use).double(), []
    run = Probe.run
    monkeypatch.setattr(Probe, "run", lambda *given: made_checks.append(seed) or run(*given))
    made = private(net, mode)

    def loss(model: Any, one: Any) -> Tensor:
        return nn.functional.cross_entropy(model(one[0]), one[1])

    for seed in range(WARM + 12):
        before = vars(net).copy(), net.mean.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(made, *batch(seed))
        if seed > WARM - 2 and use not in (diary, draws):
            alone = Net(use).double()
            vars(alone).update({k: v for k, v in before[0].items() if k in ("calls", "size")})
            alone.mean.copy_(before[1])
            count = alone.calls

            def at_this_step(model: Any, one: Any, count: int = count) -> Tensor:
                model.calls = count
                return loss(model, one)

            want = oracle.per_sample_gradients(alone, at_this_step, batch(seed))
            for name, one in oracle.clipped_sum(want, CLIP).items():
                torch.testing.assert_close(made[0].get_parameter(f"_module.{name}").grad, one)
    late = [seed for seed in made_checks if seed >= WARM]
    assert 0 < len(late) <= (20 if use is diary else 8)  # whose lists are settings that change


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_states_that_a_program_begins_to_reset(mode: str) -> None:
    def recurrent(net: Any, x: Tensor) -> Tensor:
        h = net.a(x).tanh()
        if net.state is not None:
            h = (h + net.b(net.state)).tanh()
            net.state = h.detach()
        return (net.a(h) + net.b(h)).tanh()

    net = Net(recurrent).double()
    made = private(net, mode)
    for seed in range(WARM + 12):
        if seed > WARM:
            net.state = torch.zeros(B, D).double()
        step(made, *batch(seed))
