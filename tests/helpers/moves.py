"""Random models made of moves: of rows, of tokens, between layers; some of them mix samples.

An *example* is a list of moves, a batch and the units of its rows. What is right for it is
computed one unit at a time, by plain autograd in float64.
"""

from __future__ import annotations

import copy
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import opacus
from opacus import PrivacyEngine

B, T, D, CLIP = 6, 3, 4, 0.05
PACKAGE = str(Path(opacus.__file__).parent)


class Net(nn.Module):
    """Layers of several kinds, which the moves use as they like."""

    def __init__(self, moves: Sequence[Callable[[Any, Tensor], Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moves = moves
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.norm, self.conv = nn.LayerNorm(D), nn.Conv1d(D, D, 3, padding=1)
        self.scale, self.head = nn.Parameter(torch.ones(D)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for move in self.moves:
            x = move(self, x)
        return self.head((x * self.scale).mean(1))


# --- moves [B, T, D] -> [B, T, D] after which each row is its sample's alone ---


def in_one_line(net: Any, h: Tensor) -> Tensor:
    return net.a(h.flatten(0, 1)).tanh().unflatten(0, (-1, T))


def time_first(net: Any, h: Tensor) -> Tensor:
    return net.b(h.transpose(0, 1)).tanh().transpose(0, 1)


def joined(net: Any, h: Tensor) -> Tensor:
    return torch.cat(net.a(torch.cat([h, h.flip(1)])).tanh().chunk(2), 1)[:, ::2]


def repeated(net: Any, h: Tensor) -> Tensor:
    return net.norm(h.repeat_interleave(2, 0)).view(-1, 2, T, D).sum(1)


def convolved(net: Any, h: Tensor) -> Tensor:
    return net.conv(h.transpose(1, 2)).transpose(1, 2).tanh()


def rolled_and_back(net: Any, h: Tensor) -> Tensor:
    return net.a(h.roll(1, 0)).roll(-1, 0) + net.b(h[:, :1])


def sorted_by_size(net: Any, h: Tensor) -> Tensor:
    order = h.detach().flatten(1).norm(dim=1).argsort()
    return net.b(h[order]).tanh()[order.argsort()]


def sorted_by_a_list(net: Any, h: Tensor) -> Tensor:
    sizes = h.detach().flatten(1).norm(dim=1).tolist()
    order = torch.tensor(sorted(range(len(sizes)), key=sizes.__getitem__), dtype=torch.long)
    return net.a(h[order]).tanh()[order.argsort()]


def shuffled(net: Any, h: Tensor) -> Tensor:
    order = torch.randperm(len(h))
    return net.a(h[order]).tanh()[order.argsort()]


def routed(net: Any, h: Tensor) -> Tensor:
    flat = h.reshape(-1, D)
    out = flat.clone()
    some = flat.detach()[:, 1] > 0
    out[some] = net.a(flat[some]).tanh()
    return out.view(h.shape)


def experts(net: Any, h: Tensor) -> Tensor:
    flat = h.reshape(-1, D)
    weight, chosen = flat[:, :2].softmax(-1).max(-1)
    masks = F.one_hot(chosen, 2).T
    out = torch.zeros_like(flat)
    for expert, mask in zip((net.a, net.b), masks, strict=True):
        (token,) = torch.where(mask)
        out = out.index_add(0, token, expert(flat[token]).tanh() * weight[token, None])
    return out.view(h.shape) + h


def some_tokens(net: Any, h: Tensor) -> Tensor:
    kept = h.detach()[:, :, 0] > 0.5
    out = torch.zeros_like(h)
    out[kept] = net.b(h[kept]).tanh()
    return net.a(out)


def gathered(net: Any, h: Tensor) -> Tensor:
    order = h.detach().norm(dim=-1).argsort(1)
    return net.a(h.gather(1, order[..., None].expand_as(h))).tanh()


def windows(net: Any, h: Tensor) -> Tensor:
    rows = F.pad(h, (0, 0, 1, 1)).unfold(1, 3, 1).permute(0, 1, 3, 2).reshape(-1, 3, D)
    return net.norm(net.b(rows)).sum(1).view(h.shape).tanh()


def attention(net: Any, h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(net.a(h), h, net.b(h)) + h


def padded(net: Any, h: Tensor) -> Tensor:
    return net.a(torch.cat([h, h.new_zeros(len(h), 2, D)], 1)).tanh()[:, :T]


APART = (
    in_one_line, time_first, joined, repeated, convolved, rolled_and_back, sorted_by_size,
    sorted_by_a_list, shuffled, routed, experts, some_tokens, gathered, windows, attention, padded,
)  # fmt: skip


# --- moves that mix samples ---


def less_the_mean(net: Any, h: Tensor) -> Tensor:
    return net.a(h - h.mean(0))


def next_to(net: Any, h: Tensor) -> Tensor:
    return net.a(h) + h.roll(1, 0)


def added_up(net: Any, h: Tensor) -> Tensor:
    return net.b(h).cumsum(0)


def left_sorted(net: Any, h: Tensor) -> Tensor:
    return net.a(h[h.detach().flatten(1).norm(dim=1).argsort(descending=True)])


MIXING = (less_the_mean, next_to, added_up, left_sorted)


# --- examples ---


@dataclass(frozen=True)
class Example:
    """A model, a batch and whose each row is."""

    moves: tuple[Callable[[Any, Tensor], Tensor], ...]
    seed: int
    units: tuple[int, ...]  # of the rows
    named: bool = False  # whether the user names the units

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs ``[B, T, D]``, targets and units ``[B]``."""
        g, rows = torch.Generator().manual_seed(self.seed), len(self.units)
        scales = torch.logspace(-0.5, 0.7, rows).view(rows, 1, 1)[torch.randperm(rows, generator=g)]
        x = torch.randn(rows, T, D, generator=g) * scales
        return x, torch.arange(rows) % 3, torch.tensor(self.units)

    @property
    def mixes(self) -> bool:
        return any(move in MIXING for move in self.moves)


def drawn(number: int, rows: int = B, most: int = 3) -> Example:
    """An example from a number: a quarter has a move that mixes samples, half have users."""
    chance = random.Random(number)
    moves = [chance.choice(APART) for _ in range(chance.randint(1, most))]
    if chance.random() < 0.25:
        moves[chance.randrange(len(moves))] = chance.choice(MIXING)
    named = chance.random() < 0.5
    units = [chance.randrange(rows // 2) for _ in range(rows)] if named else range(rows)
    return Example(tuple(moves), number, tuple(units), named)


# --- what is right, and what a private step gives ---


def clipped_sum(example: Example, leave_out: int | None = None) -> list[Tensor]:
    """One unit at a time, without one of them."""
    model, (x, y, units) = Net(example.moves).double(), example.batch()
    parameters = list(model.parameters())
    total, norms = [torch.zeros_like(p) for p in parameters], []
    for unit in units.unique().tolist():
        loss = sum(
            F.cross_entropy(model(x[i : i + 1].double()), y[i : i + 1])
            for i in torch.where(units == unit)[0].tolist()
        )
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))
        factor = min(1.0, CLIP / (norms[-1] + 1e-6)) if unit != leave_out else 0.0
        total = [t + g * factor for t, g in zip(total, grads, strict=True)]
    assert max(norms) > 2 * CLIP
    return total


def private(example: Example, mode: str, wrap: Callable[[nn.Module], nn.Module], units: int) -> Any:
    """Model, optimizer, criterion; ``units`` is the expected batch size of a rank."""
    mode, _, how = mode.partition("-")
    further = {"deferred_norm": True} if how == "deferred" else {}
    further |= {"use_ghost_clipping": False} if how == "formed" else {}
    further |= {"privacy_unit": "units"} if example.named else {}
    net = wrap(copy.deepcopy(Net(example.moves)))
    made = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        data_loader=DataLoader(TensorDataset(torch.zeros(units, 1)), batch_size=units),
        loss_reduction="sum",
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **further,
    )
    return (*made[:2], made[2] if len(made) == 4 else nn.CrossEntropyLoss(reduction="sum"))


def step(made: Any, example: Example, rows: Tensor) -> list[Tensor]:
    """The released sum of some rows of the batch."""
    model, optimizer, criterion = made
    x, y, units = (t[rows] for t in example.batch())
    named = {"units": units} if example.named else {}
    with warnings.catch_warnings():  # of models that draw random numbers, or are not checked
        warnings.simplefilter("ignore")
        optimizer.zero_grad()
        criterion(model(x, **named), y).backward()
        optimizer.step()
    grads: list[Any] = [p.grad for p in optimizer.params]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]


def distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Norm of the difference of two sums."""
    parts = [(a.double() - b.double()).flatten() for a, b in zip(some, others, strict=True)]
    return float(torch.cat(parts).norm())


def is_refusal(error: Exception) -> bool:
    """Whether the package raised an error itself, with words of its own."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(PACKAGE) and len(str(error)) > 30
