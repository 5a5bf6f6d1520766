"""Rows that are not samples, and norms that begin to mix them, are refused by name."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from opacus.grad_sample import GradSampleModule
from opacus.layers import DPLSTM
from tests.helpers import oracle
from tests.helpers.batch_dimension import CLIP, private, step

B, T, D = 4, 6, 5
ROWS = ["hooks", "functorch", "ew", "ghost", "ghost-deferred", "ghost_bk"]


class Merged(nn.Module):
    """``[B, T, D]``, of which all layers see ``[B * T, D]``; ``prepare`` picks it from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(D, 8), nn.Linear(8, 3)

    def prepare(self, inputs: Any) -> Tensor:
        return inputs

    def run(self, rows: Tensor) -> Tensor:
        return self.head(self.mix(rows).tanh())

    def forward(self, inputs: Any) -> Tensor:
        x = self.prepare(inputs)
        return self.run(x.reshape(-1, D)).view(*x.shape[:2], 3).mean(1)


class Reentrant(Merged):
    """Whose layers are recorded in the backward pass only."""

    def run(self, rows: Tensor) -> Tensor:
        return checkpoint(super().run, rows.detach().requires_grad_(), use_reentrant=True)


class Positions(Merged):
    """Beside a tensor that has nothing to do with the batch."""

    def prepare(self, inputs: Any) -> Tensor:
        return inputs["x"] + inputs["positions"][:, None]


class Windows(Merged):
    """Fewer rows than samples: every other sample is left out."""

    def forward(self, inputs: Any) -> Tensor:
        return self.run(inputs[::2].mean(1)).repeat_interleave(2, 0)


class Joined(Merged):
    """Two branches, joined along the batch."""

    def forward(self, inputs: Any) -> Tensor:
        first, second = self.run(torch.cat([inputs[:, 0], inputs[:, 1]])).chunk(2)
        return first - second


class NoPrefix(Merged):
    """Whose layers also run on no tokens of each sample."""

    def forward(self, inputs: Any) -> Tensor:
        prefix = self.run(inputs[:, :0]).sum(1)
        return self.run(inputs).mean(1) + prefix


class Listed(Merged):
    def prepare(self, inputs: Any) -> Tensor:
        return torch.stack(inputs)


@dataclass
class Batch:
    x: Tensor


class Field(Merged):
    def prepare(self, inputs: Any) -> Tensor:
        return inputs.x


class Packed(Merged):
    def forward(self, inputs: Any) -> Tensor:
        per_sample = torch.zeros(B, 3)
        rows, sizes = self.run(inputs.data), inputs.batch_sizes.tolist()
        for part in rows.split(sizes):
            per_sample = per_sample + nn.functional.pad(part, (0, 0, 0, B - len(part)))
        return per_sample


X = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0)) * 3
Y = torch.tensor([0, 1, 2, 0])
PLACES = torch.arange(T) / T
WRONG = {
    "in a dictionary": (Positions, {"x": X, "positions": PLACES}),
    "in another mapping": (Positions, UserDict(x=X, positions=PLACES)),
    "in a list": (Listed, list(X)),
    "left out": (Windows, X),
    "packed": (Packed, pack_padded_sequence(X, torch.tensor([6, 4, 3, 1]), batch_first=True)),
}

# Of a list of samples the ghost modes cannot tell the batch: they take T for it.
LISTS = [("in a list", "hooks"), ("in a list", "functorch")]


def each(kinds: dict[str, Any]) -> list[tuple[str, str]]:
    return [(k, mode) for k in kinds if k != "in a list" for mode in ROWS] + LISTS


@pytest.mark.parametrize(("kind", "mode"), each(WRONG))
def test_rows_that_are_not_samples_are_refused(kind: str, mode: str) -> None:
    model, inputs = WRONG[kind]
    run = private(model(), mode)
    with pytest.raises(ValueError, match=r"layer '(mix|head)' \(Linear\).*(in a|in the) batch"):
        step(run, inputs, Y)
    for parameter in run[0].parameters():
        assert getattr(parameter, "grad_sample", None) is None
        assert getattr(parameter, "summed_grad", None) is None
        assert parameter.grad is None or not parameter.grad.any()


def test_a_refused_batch_is_not_in_the_next_one() -> None:
    class Sometimes(Windows):
        windows = True

        def forward(self, inputs: Any) -> Tensor:
            return super().forward(inputs) if self.windows else self.run(inputs).mean(1)

    run = private(Sometimes(), "hooks")
    with pytest.raises(ValueError, match="more often on some samples"):
        step(run, X, Y)
    run[0]._module.windows = False
    step(run, X, Y)
    assert_right(run[0], Y, lambda model, x: model(x), X)


# --- rows that are followed to their samples ---


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("kind", [Merged, Joined, Reentrant, Field, NoPrefix])
@pytest.mark.parametrize("mode", ROWS)
def test_rows_that_can_be_followed_are_grouped(mode: str, kind: Any, rows: int) -> None:
    if kind is Reentrant and rows == 1:
        pytest.skip("a recomputation does not know of how many samples it is")
    run, given = private(kind(), mode), Batch if kind is Field else torch.clone
    for _ in range(2):  # followed, and remembered
        step(run, given(X[:rows]), Y[:rows])

    def alone(model: Any, x: Tensor) -> Tensor:
        if kind is not Reentrant:
            return model(given(x))
        return Merged.run(model, x.reshape(-1, D)).view(-1, T, 3).mean(1)

    assert_right(run[0], Y[:rows], alone, X[:rows])


# --- what goes on working ---


class Plain(Merged):
    def forward(self, inputs: Any) -> Tensor:
        return self.run(self.prepare(inputs)).mean(1)


class PlainPositions(Plain, Positions):
    pass


class PlainList(Plain, Listed):
    pass


class PlainField(Plain, Field):
    pass


class Opaque(Plain):
    """Of whose input nothing is known."""

    def prepare(self, inputs: Any) -> Tensor:
        return inputs()


RIGHT = {
    "plain": (Plain, lambda x: x),
    "in a dictionary": (PlainPositions, lambda x: {"x": x, "positions": PLACES}),
    "in another mapping": (PlainPositions, lambda x: UserDict(x=x, positions=PLACES)),
    "in a list": (PlainList, list),
    "in a dataclass": (PlainField, Batch),
    "unknown": (Opaque, lambda x: lambda: x),
}


def assert_right(private_model: nn.Module, targets: Tensor, call: Any, inputs: Tensor) -> None:
    model = copy.deepcopy(private_model._module)
    model = getattr(private_model, "to_standard_module", lambda: model)()

    def loss(one: nn.Module, row: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(call(one, row[0]), row[1])

    got = [p.grad for p in model.parameters() if p.requires_grad]
    gradients = oracle.per_sample_gradients(model, loss, (inputs, targets))
    assert (oracle.norms(gradients) > CLIP).any()
    want = oracle.clipped_sum(gradients, CLIP).values()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "mode", "rows"),
    [(k, mode, n) for k, mode in each(RIGHT) for n in (1, B) if k != "in a list" or n == B],
)
@pytest.mark.filterwarnings("ignore:the model was called with no tensor:UserWarning")
def test_rows_of_samples_are_taken(kind: str, mode: str, rows: int) -> None:
    model, given = RIGHT[kind]
    run = private(model(), mode)
    step(run, given(X[:rows]), Y[:rows])
    assert_right(run[0], Y[:rows], lambda one, x: one(given(x)), X[:rows])


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_layers_called_outside_the_models_forward(mode: str) -> None:
    """Whose batch is not known, so that only their agreement can be checked."""
    run = private(Plain(), mode)
    run[1].zero_grad()
    run[2](run[0].run(X[:, 0]), Y).backward()
    run[1].step()
    assert_right(run[0], Y, lambda one, x: one.run(x[:, 0]), X)


def test_a_time_major_layer_by_itself() -> None:
    model = GradSampleModule(DPLSTM(D, 3))
    model(X.transpose(0, 1))[0].sum().backward()
    assert {len(p.grad_sample) for p in model.parameters()} == {B}


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_the_user_may_say_how_many_samples_there_are(mode: str) -> None:
    """Whose rows came in as ``[1, B, D]``."""

    class Unfolded(Plain):
        def forward(self, inputs: Any) -> Tensor:
            return self.run(inputs.reshape(-1, D))

    run = private(Unfolded(), mode)
    run[1].zero_grad()
    run[2](run[0](X[None, :, 0]), Y, shape=(B,)).backward()
    run[1].step()
    assert_right(run[0], Y, lambda one, x: one(x[None, :, 0]), X)


# --- norms ---


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.mix, self.norm, self.head = nn.Linear(D, 8), norm, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.mix(x)))


@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm1d(8, affine=False),
        lambda: nn.BatchNorm1d(8).requires_grad_(False),
        lambda: nn.BatchNorm1d(8, track_running_stats=False).requires_grad_(False).eval(),
    ],
)
def test_norms_that_mix_samples_are_refused(norm: Any, mode: str) -> None:
    with pytest.raises(ValueError, match=r"'norm' \(BatchNorm1d\)"):
        private(Normed(norm()), mode)


@pytest.mark.parametrize("mode", ROWS)
def test_a_frozen_norm_in_eval_mode_until_it_is_in_train_mode(mode: str) -> None:
    norm = nn.BatchNorm1d(8).requires_grad_(False).eval()
    norm.running_mean.normal_()
    run = private(Normed(norm), mode)
    step(run, X[:, 0], Y)
    run[0].train()
    before = copy.deepcopy(norm.state_dict())
    with pytest.raises(NotImplementedError, match=r"'norm' \(BatchNorm1d\)"):
        step(run, X[:, 0], Y)
    with pytest.raises(NotImplementedError), torch.no_grad():  # its statistics would be kept
        run[0](X[:, 0])
    assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())
    norm.eval()
    step(run, X[:, 0], Y)
    run[0].eval()
    run[0](X[:, 0])
    run[0].train()
    run[0].disable_hooks()
    run[0](X[:, 0])  # public data, say
    run[0].enable_hooks()
    norm.eval()
    step(run, X[:, 0], Y)
    assert_right(run[0], Y, lambda one, x: one.eval()(x), X[:, 0])
