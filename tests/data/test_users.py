"""Privacy of users: users are drawn, and each one's rows are clipped together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.accountants.sampling import FixedSize, UserRows
from opacus.data.users import UserCollate, UserDataset
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import run_distributed

ROWS, USERS, BATCHES, CLIP = 60, 16, 4, 0.05
NAMES = [f"user {(row * row) % 17 % USERS}" for row in range(ROWS)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def rows() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.arange(ROWS) % 3)


def private(module: nn.Module, mode: str, **kw: Any) -> Any:
    users = UserDataset(rows(), NAMES)
    made: Any = PrivacyEngine(accountant="pld").make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(
            users,
            batch_size=math.ceil(len(users) / BATCHES),
            collate_fn=UserCollate(),
            generator=torch.Generator().manual_seed(3),
        ),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        privacy_unit="unit_ids",
        grad_sample_mode=mode,
        **kw,
    )
    return made if len(made) == 4 else (*made[:2], nn.CrossEntropyLoss(), made[2])


def train(made: Any) -> list[set[int]]:
    """Users of each batch."""
    drawn = []
    for x, y, ids in made[3]:
        made[1].zero_grad()
        made[2](made[0](x, unit_ids=ids), y).backward()
        made[1].step()
        drawn.append(set(ids.tolist()))
    return drawn


def reference(drawn: list[set[int]]) -> list[Tensor]:
    """The weights after steps with these users, one user at a time by plain autograd."""
    model, users = Net(), UserDataset(rows(), NAMES)
    x, y = rows().tensors
    parameters = list(model.parameters())
    norms = []
    for batch in drawn:
        total = [torch.zeros_like(p) for p in parameters]
        for user in batch:
            own = users.rows_of(user)
            loss = nn.functional.cross_entropy(model(x[own]), y[own], reduction="sum")
            grads = torch.autograd.grad(loss, parameters)
            norms.append(math.sqrt(sum(float(g.square().sum()) for g in grads)))
            factor = min(1.0, CLIP / (norms[-1] + 1e-6))
            total = [t + g * factor for t, g in zip(total, grads, strict=True)]
        for p, t in zip(parameters, total, strict=True):
            p.data -= 0.5 * t * BATCHES / len(users)
    assert min(norms) > 2 * CLIP
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_users_are_drawn_and_clipped_whole(mode: str) -> None:
    made = private(Net(), mode)
    drawn = train(made)
    assert len({len(users) for users in drawn}) > 1 and max(map(len, drawn)) > 2
    got = [p.detach() for p in made[1].params]
    torch.testing.assert_close(got, reference(drawn), rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        assert made[0].eval()(rows().tensors[0]).shape == (ROWS, 3)  # nobody's units matter
    assert made[1]._counters[0].sample_rate == pytest.approx(1 / BATCHES)
    size = len(UserDataset(rows(), NAMES))
    assert made[1].expected_batch_size == pytest.approx(size / BATCHES)


def weights_of_rank(rank: int, world_size: int) -> tuple[list[Tensor], list[set[int]]]:
    made = private(FSDP2Wrapper(Net()), "ghost_fsdp_bk")
    drawn = train(made)
    return [p.detach().full_tensor() for p in made[1].params], drawn


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_draw_users_and_end_like_the_reference(world_size: int) -> None:
    found = run_distributed(weights_of_rank, world_size)
    of_ranks = [drawn for _, drawn in found]
    together = [set().union(*parts) for parts in zip(*of_ranks, strict=True)]
    assert [sum(map(len, parts)) for parts in zip(*of_ranks, strict=True)] == [*map(len, together)]
    assert together == train(private(Net(), "ghost"))  # whatever the number of ranks
    want = reference(together)
    for weights, _ in found:
        torch.testing.assert_close(weights, want, rtol=1e-9, atol=1e-11)


# --- the data set and its batches ---


def test_contributions_are_bounded_and_drawn_afresh() -> None:
    users = UserDataset(rows(), NAMES, most_rows=2)
    assert len(users) == len(set(NAMES)) and users.names[0] == NAMES[0]
    seen = [tuple(float(row[0][0]) for _, row in users[0]) for _ in range(30)]
    assert {len(chosen) for chosen in seen} == {2} and len(users.rows_of(0)) > 3
    assert len(set(seen)) > 3
    for user in range(len(users)):
        assert {number for number, _ in users[user]} == {user}


def test_batches_say_whose_rows_they_have() -> None:
    users = UserDataset(rows(), torch.tensor([row // 20 for row in range(ROWS)]))
    x, y, ids = UserCollate()([users[2], users[0]])
    assert ids.tolist() == [2] * 20 + [0] * 20 and len(x) == len(y) == 40
    torch.testing.assert_close(x, rows().tensors[0][[*range(40, 60), *range(20)]])
    as_mapping = UserCollate(lambda found: {"x": torch.stack([row[0] for row in found])}, "who")
    batch = as_mapping([users[1]])
    assert batch["who"].tolist() == [1] * 20 and batch["x"].shape == (20, 6)
    alone = UserCollate(lambda found: torch.stack([row[0] for row in found]))([users[1]])
    assert len(alone) == 2


def test_an_empty_draw_is_a_step() -> None:
    made = private(Net(), "ghost", sample_rate=0.01)
    drawn = train(made)
    assert len(drawn) == 100 and set() in drawn and len(set(map(frozenset, drawn))) > 1


def test_values_out_of_range() -> None:
    with pytest.raises(ValueError, match="60 rows"):
        UserDataset(rows(), NAMES[:-1])
    with pytest.raises(ValueError, match="most_rows"):
        UserDataset(rows(), NAMES, most_rows=0)


# --- rows that are drawn one by one ---


def by_rows(accountant: str = "pld", **kw: Any) -> tuple[PrivacyEngine, Any]:
    engine, module = PrivacyEngine(accountant=accountant), Net()
    return engine, engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(rows(), batch_size=15), noise_multiplier=2.0, max_grad_norm=1.0,
        **kw,
    )  # fmt: skip


def test_rows_of_users_are_counted_as_such() -> None:
    spent = []
    for sampling in (None, UserRows(4)):
        engine, made = by_rows(sampling=sampling)
        for x, y in made[2]:
            made[1].zero_grad()
            nn.functional.cross_entropy(made[0](x), y).backward()
            made[1].step()
        spent.append(engine.get_epsilon(1e-5))
        assert len(engine.accountant) == 4
    assert spent[1] > 2 * spent[0]
    with pytest.raises(ValueError, match="counts the optimizer's steps already"):
        made[1].attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=0.25))


@pytest.mark.parametrize(
    "kw,message",
    [
        ({"sampling": UserRows(2), "accountant": "prv"}, "accountant='pld'"),
        ({"sampling": UserRows(2), "poisson_sampling": False}, "poisson_sampling must be"),
        ({"sampling": FixedSize(60, 15)}, "is not what the private data loader does"),
    ],
)
def test_sampling_that_is_not_done_or_not_counted_is_refused(kw: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        by_rows(**kw)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_a_user_in_two_physical_batches_of_a_step_is_refused(mode: str) -> None:
    """Rows are drawn, but users are named; in physical batches of one row none comes twice."""
    x, y = rows().tensors
    engine, module = PrivacyEngine(), Net()
    made: Any = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=0.0, max_grad_norm=CLIP,
        data_loader=DataLoader(TensorDataset(x, y, torch.arange(ROWS) // 2), batch_size=ROWS),
        privacy_unit="unit_ids", grad_sample_mode=mode,
    )  # fmt: skip
    model, optimizer = made[0], made[1]
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    before = [p.detach().clone() for p in module.parameters()]
    memory = BatchMemoryManager(
        data_loader=made[-1], max_physical_batch_size=1, optimizer=optimizer
    )
    with memory as loader, pytest.raises(RuntimeError, match=r"rows of the units \[0\]"):
        for one, label, whose in loader:
            optimizer.zero_grad()
            criterion(model(one, unit_ids=whose), label).backward()
            optimizer.step()
    for p, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, old)
