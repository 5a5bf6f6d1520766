"""What a model keeps of one batch, and reads in a later one, is refused: no clipping bounds it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from enum import IntEnum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from opacus import IsolationError
from tests.helpers import oracle
from tests.helpers.distributed import run_distributed
from tests.helpers.kept_values import (
    B,
    D,
    Net,
    batch,
    number,
    plain,
    running_mean,
    step,
    written_numbers,
)
from tests.helpers.releases import CLIP, private


def new_buffer(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h - net.mean)
    net.mean = 0.9 * net.mean + 0.1 * h.detach().mean(0)
    return out


def state(net: Any, x: Tensor) -> Tensor:
    h = net.a(x).tanh()
    before, net.state = net.state, h.detach()
    return net.b(h if before is None else h + before.mean(0))


def queue(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    keys = torch.cat([*net.queue, net.mean[None]])
    net.queue.append(h.detach())
    return net.b((h @ keys.T).softmax(-1) @ keys + h)


def frozen(net: Any, x: Tensor) -> Tensor:
    """A codebook: it is a parameter that no optimizer has."""
    h = net.a(x)
    out = net.b(h - net.code)
    with torch.no_grad():
        net.code.lerp_(h.mean(0), 0.1)
    return out


def new_frozen(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h - net.code)
    net.code = nn.Parameter(0.9 * net.code + 0.1 * h.detach().mean(0), requires_grad=False)
    return out


def weight(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h)
    net.b.bias.data = net.b.bias.data - 0.1 * h.detach().mean(0)
    return out


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("use", [running_mean, new_buffer, state, queue])
def test_of_an_earlier_batch(use: Any, mode: str) -> None:
    made = private(Net(use).double(), mode)
    step(made, *batch(0))
    for seed in range(1, 4):  # whoever goes on after a refusal is refused again
        with pytest.raises(ValueError, match="holds what was computed from samples of an earlier"):
            step(made, *batch(seed))
    x, y = batch(5)
    for rows in (1, 3):
        with pytest.raises(ValueError, match="holds what was computed from samples of an earlier"):
            step(made, x[:rows], y[:rows])


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("use", [running_mean, new_buffer, state, queue])
def test_of_a_batch_of_one_sample(use: Any, mode: str) -> None:
    """Physical batches of one sample tell the next one nothing, either."""
    made = private(Net(use).double(), mode)
    x, y = batch(0)
    step(made, x[:1], y[:1])
    for place in range(1, B):
        with pytest.raises(ValueError, match="holds what was computed from samples of an earlier"):
            step(made, x[place : place + 1], y[place : place + 1])
    with pytest.raises(ValueError, match="holds what was computed from samples of an earlier"):
        step(made, x, y)


def places_set(net: Any, x: Tensor) -> Tensor:
    """What is written is the same for all samples, but not where."""
    largest = net.a(x).detach().argmax(-1)
    out = net.b(net.a(x) - net.mean)
    net.mean[largest] = 0.5
    return out


def places_added(net: Any, x: Tensor) -> Tensor:
    largest = net.a(x).detach().argmax(-1)
    out = net.b(net.a(x) - net.mean)
    net.mean.index_add_(0, largest, torch.ones(len(x)).double())
    return out


def places_scattered(net: Any, x: Tensor) -> Tensor:
    largest = net.a(x).detach().argmax(-1)
    out = net.b(net.a(x) - net.mean)
    net.mean.scatter_(0, largest, 0.5)
    return out


def places_masked(net: Any, x: Tensor) -> Tensor:
    out = net.b(net.a(x) - net.mean)
    net.mean[net.a(x).detach().mean(0) > 0] = 0.5
    return out


def filled_by_a_tensor(net: Any, x: Tensor) -> Tensor:
    out = net.b(net.a(x) - net.mean)
    net.mean.fill_(net.a(x).detach().mean())
    return out


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize(
    "use", [places_set, places_added, places_scattered, places_masked, filled_by_a_tensor]
)
def test_constants_in_places_that_samples_choose(use: Any, mode: str) -> None:
    made = private(Net(use).double(), mode)
    made[0].isolation.on = False
    step(made, *batch(0))
    for seed in range(1, 3):
        with pytest.raises(ValueError, match="holds what was computed from samples of an earlier"):
            step(made, *batch(seed))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("use", [frozen, new_frozen, weight])
def test_in_a_parameter(use: Any, mode: str) -> None:
    made = private(Net(use).double(), mode)
    made[0].isolation.on = False  # its runs change parameters, too
    step(made, *batch(0))
    for seed in range(1, 4):
        with pytest.raises(
            ValueError, match=r"parameter '.*' holds what was computed from samples"
        ):
            step(made, *batch(seed))


def numbers(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h / net.sizes[-1])
    net.sizes.append(h.detach().abs().max().item())
    return out


def array(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h - torch.from_numpy(net.array.copy()))
    net.array *= 0.9
    net.array += 0.1 * h.detach().numpy().mean(0)
    return out


def text(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h * float(net.state or "1"))
    net.state = str(h.detach().abs().max().item())
    return out


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("use", [number, numbers, array, text])
def test_in_what_is_no_tensor(use: Any, mode: str) -> None:
    made = private(Net(use).double(), mode)
    for seed in range(3):
        with pytest.raises(IsolationError, match=r"keeps of samples in .* a later batch"):
            step(made, *batch(seed))


def filled(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h - net.mean)
    net.mean.fill_(h.detach().mean().item())
    return out


def listed(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h - net.mean)
    net.mean = torch.tensor(h.detach().mean(0).tolist()).to(h)
    return out


def past_torch(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    out = net.b(h - net.mean)
    net.mean.numpy()[:] = h.detach().numpy().mean(0)
    return out


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("use", [filled, listed, past_torch])
def test_in_a_tensor_whose_writing_is_not_followed(use: Any, mode: str) -> None:
    made = private(Net(use).double(), mode)
    step(made, *batch(0))
    for seed in range(1, 4):
        with pytest.raises(ValueError, match="holds what was computed from samples of an earlier"):
            step(made, *batch(seed))


def drawn(net: Any, x: Tensor) -> Tensor:
    """Random numbers are of no sample."""
    out = net.b(net.a(x) - net.mean)
    net.mean.copy_(torch.rand(D))
    return out


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_random_numbers_may_be_kept(mode: str) -> None:
    made = private(Net(drawn).double(), mode)
    for seed in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(made, *batch(seed))


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("use", [number, numbers, array, text])
def test_of_one_sample_in_what_is_no_tensor(use: Any, mode: str) -> None:
    """It is compared with what a made-up one would leave."""
    made = private(Net(use).double(), mode)
    for seed in range(3):
        x, y = batch(seed)
        with pytest.raises(IsolationError, match=r"keeps of samples in .* a later batch"):
            step(made, x[:1], y[:1])


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("use", [filled, listed, past_torch])
def test_of_one_sample_in_a_tensor_whose_writing_is_not_followed(use: Any, mode: str) -> None:
    made = private(Net(use).double(), mode)
    for seed in range(3):
        x, y = batch(seed)
        if seed == 0:
            step(made, x[:1], y[:1])
            continue
        with pytest.raises(ValueError, match="holds what was computed from samples of an earlier"):
            step(made, x[:1], y[:1])


def ranks(rank: int, world_size: int, mode: str, rows: list[int]) -> list[str]:
    """Only the first rank's samples differ in what is kept of them, if there are several."""
    made = private(fully_shard(Net(number).double()), mode)
    x, y = batch(rank)
    x, y = (x, y) if rank == 0 else (x[:1].expand(B, D), y)
    said = []
    for _ in range(2):
        try:
            step(made, x[: rows[rank]], y[: rows[rank]])
        except IsolationError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("rows", [[4, 4], [1, 2], [1, 0], [1, 1]])
@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk"])
def test_on_one_of_two_ranks(mode: str, rows: list[int]) -> None:
    one, two = run_distributed(ranks, 2, mode, rows)
    assert len(one) == len(two) == 2
    assert all("what the model keeps of samples in 'size'" in text for text in one)
    other = "another rank found" if rows[1] in (0, 4) else "'size'"  # beside a made-up sample
    assert all(other in text for text in two)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_numbers_that_may_be_kept(mode: str) -> None:
    made = private(Net(written_numbers).double(), mode)
    for seed in range(3):
        step(made, *batch(seed))


class OfThisFile(IntEnum):
    """A number of a class that another one of the same name hides, so that it is not pickled."""

    ONE = 1


ONE = OfThisFile.ONE
del OfThisFile


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("kind", ["function", "class", "module"])
def test_attributes_that_cannot_be_pickled(kind: str, mode: str) -> None:
    net = Net(number if kind == "function" else plain).double()
    if kind == "function":
        net.sizes = defaultdict(lambda: 0.0, a=1.0)
    else:
        net.sizes = {net.a: 0.0} if kind == "module" else ONE
    made = private(net, mode)
    if kind == "function":
        with pytest.raises(IsolationError, match=r"keeps of samples in 'size'"):
            step(made, *batch(0))
    else:
        step(made, *batch(0))


class Centred(nn.Module):
    """Takes a slow average of all outputs off each, as self-distillation does."""

    reduction = "sum"
    average: Any

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.calls, self.number = kept, 0, 0.0
        self.register_buffer("average", torch.zeros(3).double())

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scale = 1 + self.number + self.calls / 10000
        losses = nn.functional.cross_entropy(
            (outputs - self.average) * scale, targets, reduction=self.reduction
        )
        mean = outputs.detach().mean(0)
        if self.kept == "buffer":
            self.average.lerp_(mean, 0.01)
        elif self.kept == "number":
            self.number = 0.99 * self.number + 0.01 * float(mean.abs().max())
        else:
            self.calls += 1
        return losses


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
@pytest.mark.parametrize("kept", ["buffer", "number"])
def test_in_the_criterion(kept: str, mode: str) -> None:
    made = private(Net(plain).double(), mode, criterion=Centred(kept))
    for seed in range(3):
        with pytest.raises(IsolationError, match="it keeps something of samples"):
            step(made, *batch(seed))


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_a_criterion_that_counts_its_calls(mode: str) -> None:
    """The check's own calls do not count."""
    criterion = Centred("calls")
    made = private(Net(plain).double(), mode, criterion=criterion)
    for seed in range(3):
        step(made, *batch(seed))
    assert criterion.calls == 3


def on_first_call(net: Any, x: Tensor) -> Tensor:
    """What depends on shapes alone may be kept."""
    if net.state is None:
        net.state = torch.arange(D).to(x) / D
    return net.b(net.a(x) * net.state)


def of_a_type(net: Any, x: Tensor) -> Tensor:
    """It has the type and the shape of samples, and no values of theirs."""
    if net.state is None:
        net.state = x.new_ones(D).cumsum(0) / D + torch.ones_like(x[0])
    return net.b(net.a(x) * net.state)


def written_alone(net: Any, x: Tensor) -> Tensor:
    """It is for looking at, and not read."""
    net.state = net.a(x).detach()
    net.mean.copy_(net.state.mean(0))
    return net.b(net.a(x))


def written_in_part(net: Any, x: Tensor) -> Tensor:
    """Memory of a fixed size, of which each batch writes to as much as it reads."""
    if net.state is None:
        net.state = torch.zeros(2 * B, 2 * D).double()
    net.state[: len(x), :D] = x > 0
    return net.b(net.a(x) * net.state[: len(x), :D])


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("use", [on_first_call, of_a_type, written_alone, written_in_part])
@pytest.mark.parametrize("rows", [1, B])
def test_what_may_be_kept(use: Any, mode: str, rows: int) -> None:
    made = private(Net(use).double(), mode)

    def loss(model: Any, one: Any) -> Tensor:
        return nn.functional.cross_entropy(model(one[0]), one[1])

    for seed in range(4):
        x, y = (whole[:rows] for whole in batch(seed))
        want = oracle.per_sample_gradients(Net(use).double(), loss, (x, y))
        step(made, x, y)
        for name, one in oracle.clipped_sum(want, CLIP).items():
            torch.testing.assert_close(made[0].get_parameter(f"_module.{name}").grad, one)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_of_another_call_on_the_same_batch(mode: str) -> None:
    """The second call reads what the first has computed of the same samples."""

    def twice(net: Any, x: Tensor) -> Tensor:
        net.state = None if net.state is not None else net.a(x).detach()
        return net.b(x if net.state is None else net.state)

    model, optimizer, criterion, *_ = private(Net(twice).double(), mode)
    model.isolation.on = False  # it runs one call
    for seed in range(3):
        x, y = batch(seed)
        optimizer.zero_grad()
        criterion(model(x) + model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_states_that_a_program_resets_for_each_batch(mode: str) -> None:
    """They are compared from what each sample starts from, not from what the batch has left."""

    def recurrent(net: Any, x: Tensor) -> Tensor:
        h = (net.a(x) + net.b(net.state)).tanh()
        net.state = h.detach()
        return (net.a(h) + net.b(h)).tanh()

    net = Net(recurrent).double()
    made = private(net, mode)
    for seed in range(4):
        x, y = batch(seed)
        net.state = torch.zeros(B, D).double()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(made, x, y)

        def loss(model: Any, one: Any) -> Tensor:
            model.state = torch.zeros(1, D).double()
            return nn.functional.cross_entropy(model(one[0]), one[1])

        want = oracle.per_sample_gradients(Net(recurrent).double(), loss, (x, y))
        for name, one in oracle.clipped_sum(want, CLIP).items():
            torch.testing.assert_close(made[0].get_parameter(f"_module.{name}").grad, one)
