"""Layers that are given rows which are no samples, as many as there are samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.record import whose
from opacus.core.record.provenance import IndexCheck, RepeatCheck
from opacus.core.record.row_trail import SampleRows
from opacus.core.rules.spec import make_spec

B, D, CLIP = 5, 6, 0.5  # no dimension of an input is B

pytestmark = pytest.mark.filterwarnings("ignore:OPACUS_ISOLATION_CHECK=0")


class Net(nn.Module):
    """Patches ``[B, T - 1, D]``, a token before them, and what a test adds."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Linear(3, D)
        self.table, self.shared = nn.Embedding(B + 4, D), nn.Linear(D, D)
        self.head = nn.Linear(D, 3)
        self.frozen = nn.Embedding(B + 4, D).requires_grad_(False)
        self.register_buffer("places", torch.arange(B))
        self.register_buffer("waves", torch.linspace(-1, 1, B * D).view(B, D))
        self.register_buffer("queries", torch.linspace(-1, 1, 2 * D).view(1, 2, D))
        self.plain = torch.arange(B)  # no buffer
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.use(self, x))).mean(1)

    def tokens(self, x: Tensor) -> Tensor:
        """``[B, T, D]``, where T = B in the batches below."""
        return self.patch(F.pad(x, (0, 0, 1, 0)))


# --- rows that are no samples ---


def positions(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.table(torch.arange(x.shape[1] + 1))


def positions_in_a_buffer(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.table(net.places)


def positions_behind_a_frozen_layer(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.shared(net.frozen(torch.arange(B)).tanh())


def shared_buffer(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.shared(net.waves)


def shared_buffer_in_half(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.shared(net.waves.double().to(x)[None].squeeze(0)).unsqueeze(0)


def computed_waves(net: Any, x: Tensor) -> Tensor:
    steps = torch.arange(B).float()[:, None] * torch.linspace(0.1, 1, D)
    return net.tokens(x) + net.shared(torch.sin(steps))


def weights_of_a_layer(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.shared(net.frozen.weight[:B])


def attention(net: Any, x: Tensor) -> Tensor:
    keys = net.shared(net.waves)  # [T, D], for all samples
    return torch.softmax(net.tokens(x) @ keys.t(), -1) @ keys


COMPUTED_FROM_NO_INPUT = [
    positions, positions_in_a_buffer, positions_behind_a_frozen_layer, shared_buffer,
    shared_buffer_in_half, computed_waves, weights_of_a_layer, attention,
]  # fmt: skip


def broadcast(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.table(net.plain)


def broadcast_with_a_dimension_in_front(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) * net.table(net.plain)[None]


def broadcast_later(net: Any, x: Tensor) -> Tensor:
    found = F.gelu(net.shared(net.table(net.plain))).unsqueeze(0) * 2
    return net.tokens(x) + found


def broadcast_and_copied(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.table(net.plain).expand(len(x), -1, -1)


def constant_rows(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.shared(torch.ones(B, D))


BROADCAST = [
    broadcast, broadcast_with_a_dimension_in_front, broadcast_later, broadcast_and_copied,
    constant_rows,
]  # fmt: skip

# --- one row for all samples, of which the first is used for all ---


def first_row(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.table(torch.arange(B)[None])[0]


def rows_in_a_list(net: Any, x: Tensor) -> Tensor:
    """A table of biases by position, computed from ``[1, n, D]`` coordinates."""
    table = net.shared(net.queries).reshape(-1, D)
    return net.tokens(x) + table[torch.arange(B) % 2]


# --- rows that are samples ---


def one_row_for_all(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.table(net.places[None])


def expanded_positions(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x) + net.table(torch.arange(B).expand(x.shape[0], -1))


def learned_queries(net: Any, x: Tensor) -> Tensor:
    return net.shared(net.queries.expand(x.shape[0], -1, -1)) + net.tokens(x).mean(1, True)


def repeated_queries(net: Any, x: Tensor) -> Tensor:
    queries = torch.cat([net.queries] * len(x)) if len(x) > 2 else net.queries
    return net.shared(queries.repeat(len(x) // len(queries), 1, 1)) + net.tokens(x).mean(1, True)


def start_of_sequence(net: Any, x: Tensor) -> Tensor:
    start = net.shared(torch.zeros(len(x), D)).unsqueeze(1)
    return net.tokens(x) + start


def conditions(net: Any, x: Tensor) -> Tensor:
    scale = net.shared(net.tokens(x).mean(1))  # [B, D]
    return net.tokens(x) * scale[:, None] + scale.unsqueeze(1) * scale.view(-1, 1, D)


def list_of_lengths(net: Any, x: Tensor) -> Tensor:
    lengths = torch.tensor([1 + i % 1 for i in range(len(x))])
    return net.tokens(x) + net.table(lengths)[:, None]


def positions_by_sample(net: Any, x: Tensor) -> Tensor:
    places = torch.arange(B)[None] + torch.zeros(len(x), 1, dtype=torch.long)
    return net.tokens(x) + net.table(places)


def written_buffer(net: Any, x: Tensor) -> Tensor:
    memory = net.waves.clone()
    memory[:] = x.mean(1).repeat(B // len(x), 2)
    return net.tokens(x) + net.shared(memory[: len(x)])[:, None]


SAMPLES = [
    one_row_for_all, expanded_positions, learned_queries, repeated_queries, start_of_sequence,
    conditions, list_of_lengths, positions_by_sample, written_buffer,
]  # fmt: skip


# --- what is released, and what is right ---


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    scales = torch.tensor([0.1, 1.0, 4.0, 0.5, 2.0]).view(B, 1, 1)
    return torch.randn(B, B - 1, 3) * scales, torch.arange(B) % 3


def released(use: Any, mode: str, batches: int = 1) -> list[Tensor]:
    model = Net(use)
    made: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        data_loader=DataLoader(TensorDataset(*batch()), batch_size=B),
        loss_reduction="sum",
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    x, y = batch()
    loss_fn = made[2] if len(made) == 4 else nn.CrossEntropyLoss(reduction="sum")
    for _ in range(batches):
        made[1].zero_grad()
        loss_fn(made[0](x), y).backward()
        made[1].step()
    return [p.grad for p in made[1].params]


def clipped_sum(use: Any) -> list[Tensor]:
    model, (x, y) = Net(use), batch()
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(B):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        grads = [
            torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)
        ]
        factor = min(1.0, CLIP / float(torch.stack([g.norm() for g in grads]).norm() + 1e-6))
        for part, grad in zip(total, grads, strict=True):
            part += grad * factor
    return total


def off_by(use: Any, got: list[Tensor]) -> float:
    want = clipped_sum(use)
    error = [(w if g is None else w - g).flatten() for g, w in zip(got, want, strict=True)]
    return float(torch.cat(error).norm() / torch.cat([w.flatten() for w in want]).norm())


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("use", [*COMPUTED_FROM_NO_INPUT, *BROADCAST, first_row, rows_in_a_list])
def test_rows_that_all_samples_share_are_exact(use: Any, mode: str) -> None:
    assert off_by(use, released(use, mode, batches=2)) < 1e-5


@pytest.mark.parametrize("use", [*COMPUTED_FROM_NO_INPUT, *BROADCAST])
def test_they_are_refused_where_nothing_is_followed(
    use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whose, "can_follow", lambda *args: False)
    with pytest.raises(ValueError, match=r"'(table|shared)'"):
        released(use, "ghost")
    assert torch.overrides._len_torch_function_stack() == 0


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("use", [*COMPUTED_FROM_NO_INPUT, *BROADCAST])
def test_they_would_be_clipped_by_row(use: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whose, "can_follow", lambda *args: False)
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    monkeypatch.setattr(IndexCheck, "PASSES", 0)
    assert off_by(use, released(use, mode)) > 1e-3


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("use", SAMPLES)
def test_rows_of_samples_are_taken(use: Any, mode: str) -> None:
    assert off_by(use, released(use, mode, batches=2)) < 1e-5


def test_one_dimension_as_input() -> None:
    """Positions ``[T]`` that the caller gives: their use shows that they are no samples."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(9, D), nn.Embedding(9, D)
            self.head = nn.Linear(D, 3)

        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            return self.head(torch.tanh(self.tokens(ids) + self.places(positions))).mean(1)

    model = Given()
    made: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    with pytest.raises(ValueError, match=r"'head'.*add makes one element of"):
        made[0](torch.ones(B, B, dtype=torch.long), torch.arange(B))


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("use", [first_row, rows_in_a_list])
def test_where_nothing_is_followed_a_repeated_output_must_be_used_row_by_row(
    use: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whose, "can_follow", lambda *args: False)
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    with pytest.raises(ValueError, match="ran once for all 5 samples"):
        released(use, mode)
    monkeypatch.setattr(RepeatCheck, "received", lambda *args: None)
    assert off_by(use, released(use, mode)) > 0.01  # all gradients are the first sample's


def test_one_sample_with_a_gradient_proves_nothing() -> None:
    """Masked samples are no reason to refuse; the question stays open until two rows tell."""
    check, table, head = RepeatCheck(), *_specs()
    check.repeated(table)
    rows = torch.zeros(3, 2, 4)
    rows[0] = 1
    check.received(head, rows, False)
    check.received(table, rows, True)
    assert check.open == {"table"}
    check._backward = -2  # another backward pass
    check.received(head, torch.ones(3, 4), False)
    with pytest.raises(ValueError, match="'table'"):
        check.received(table, rows, True)
    check.received(table, torch.ones(3, 2, 4), True)
    assert not check.open
    check.repeated(table)
    assert not check.open


def _specs() -> tuple[Any, Any]:
    return make_spec("table", nn.Embedding(3, 4), {}), make_spec("head", nn.Linear(4, 4), {})


# --- the cost ---


def test_nothing_is_followed_once_each_layer_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whose, "can_follow", lambda *args: False)
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    entered: list[int] = []
    enter = SampleRows.__enter__
    monkeypatch.setattr(SampleRows, "__enter__", lambda self: entered.append(1) or enter(self))
    released(conditions, "ghost", batches=12)
    assert len(entered) == IndexCheck.PASSES  # the table never runs
    entered.clear()
    released(positions_by_sample_and_shared, "ghost", batches=12)
    assert len(entered) == 1


def positions_by_sample_and_shared(net: Any, x: Tensor) -> Tensor:
    return net.shared(positions_by_sample(net, x))


def test_tensors_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SampleRows([], B)
    with rows:
        for _ in range(3):
            torch.arange(B).float() + torch.arange(B)
    assert len(rows._fixed) == 0
