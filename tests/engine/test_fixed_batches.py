"""Batches of one size: filled up by rows of nobody, truncated above, counted as truncated."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.accountants.sampling import TruncatedPoisson
from opacus.data.users import UserCollate, UserDataset
from opacus.engine_sampling import truncation_room
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed

ROWS, BATCHES, CLIP = 48, 4, 0.05


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x / x.norm(dim=1, keepdim=True)).tanh())  # NaN for zeros


def rows() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.arange(ROWS) % 3, torch.arange(ROWS))


def private(module: nn.Module, mode: str, most: int | None, data: Any = None, **kw: Any) -> Any:
    loader = DataLoader(
        rows() if data is None else data,
        batch_size=ROWS // BATCHES if data is None else len(data) // BATCHES,
        generator=torch.Generator().manual_seed(3),
        collate_fn=None if data is None else UserCollate(),
    )
    made: Any = PrivacyEngine(accountant=kw.pop("accountant", "pld")).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5), data_loader=loader,
        max_grad_norm=CLIP, grad_sample_mode=mode, max_batch_size=most,
        **{"privacy_unit": "unit_ids", "noise_multiplier": 0.0, **kw},
    )  # fmt: skip
    return made if len(made) == 4 else (*made[:2], nn.CrossEntropyLoss(), made[2])


def train(made: Any, size: int | None = None) -> list[set[int]]:
    """Items of each batch that are somebody's; all batches have so many rows."""
    drawn = []
    for x, y, items, ids in made[3]:
        made[1].zero_grad()
        made[2](made[0](x, unit_ids=ids), y).backward()
        made[1].step()
        assert (x[ids < 0] == 0).all() and len(ids) == len(x) == (size or len(x))
        drawn.append(set(items[ids >= 0].tolist()))
    return drawn


def reference(drawn: list[set[int]]) -> list[Tensor]:
    """The weights after steps with these items, one at a time by plain autograd."""
    model = Net()
    x, y, _ = rows().tensors
    parameters = list(model.parameters())
    for batch in drawn:
        total = [torch.zeros_like(p) for p in parameters]
        for i in batch:
            loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            grads = torch.autograd.grad(loss, parameters)
            norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
            assert norm > CLIP
            total = [t + g * CLIP / (norm + 1e-6) for t, g in zip(total, grads, strict=True)]
        for p, t in zip(parameters, total, strict=True):
            p.data -= 0.5 * t * BATCHES / ROWS
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("most", [13, 30])
@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_rows_of_nobody_add_nothing(mode: str, most: int) -> None:
    made = private(Net(), mode, most)
    drawn = train(made, most)
    sizes = [len(items) for items in drawn]
    assert len(set(sizes)) > 1 and (max(sizes) == most) == (most == 13)
    got = [p.detach() for p in made[1].params]
    torch.testing.assert_close(got, reference(drawn), rtol=1e-9, atol=1e-11)


def test_parts_of_a_batch_are_filled_up_too() -> None:
    made, drawn = private(Net(), "ghost_bk", 30), []
    with BatchMemoryManager(
        data_loader=made[3], max_physical_batch_size=4, optimizer=made[1]
    ) as parts:
        for x, y, items, ids in parts:
            made[1].zero_grad()
            made[2](made[0](x, unit_ids=ids), y).backward()
            if not made[1]._is_last_step_skipped:
                drawn.append(set())
            drawn[-1] |= set(items[ids >= 0].tolist())
            made[1].step()
            assert len(x) == 4
    assert len(drawn) == BATCHES and max(map(len, drawn)) > 4
    got = [p.detach() for p in made[1].params]
    torch.testing.assert_close(got, reference(drawn), rtol=1e-9, atol=1e-11)


def test_truncation_takes_from_what_poisson_draws() -> None:
    plain, cut = (private(Net(), "ghost", most) for most in (ROWS, 12))
    full, kept = train(plain), train(cut)
    assert any(len(items) > 12 for items in full) and any(len(items) < 12 for items in full)
    for items, some in zip(full, kept, strict=True):
        assert some <= items and len(some) == min(12, len(items))
    dropped = {i for items, some in zip(full, kept, strict=True) for i in items - some}
    assert dropped and not all(i > ROWS // 2 for i in dropped)


def test_what_stays_is_uniform() -> None:
    """200 batches of 20 cut to 5: each item stays with probability 1/4, to 5 standard errors."""
    from opacus.core.privacy.key import RunKey
    from opacus.utils.uniform_sampler import Coins

    key, chosen = RunKey(torch.Generator().manual_seed(0)), torch.arange(20)
    stays = torch.zeros(20)
    for number in range(200):
        for rank in (0, 1):
            stays[Coins.of(key, number).kept(chosen, 5, rank)] += 1
    assert stays.sum() == 2000
    assert ((stays / 400 - 0.25).abs() < 5 * math.sqrt(0.25 * 0.75 / 400)).all()
    one, two = (Coins.of(key, 3).kept(chosen, 5, rank) for rank in (0, 1))
    assert not torch.equal(one, two)


def test_the_accountant_counts_truncation() -> None:
    made = private(Net(), "ghost", 15, noise_multiplier=1.0)
    train(made)
    accountant = made[1]._counters[0].accountant
    assert accountant.history == [(1.0, 0.25, 4, TruncatedPoisson(ROWS, 15).to_dict())]
    roomy = private(Net(), "ghost", truncation_room(ROWS, 0.25), noise_multiplier=1.0)
    train(roomy)
    plain = private(Net(), "ghost", None, accountant="pld", privacy_unit=None, noise_multiplier=1.0)
    for x, y, _ in plain[3]:
        plain[1].zero_grad()
        plain[2](plain[0](x), y).backward()
        plain[1].step()
    spent = [m[1]._counters[0].accountant.get_epsilon(1e-5) for m in (made, roomy, plain)]
    assert spent[0] > 1.05 * spent[2]
    assert spent[1] == pytest.approx(spent[2], rel=1e-4)  # eight standard deviations of room


def test_noise_for_a_budget() -> None:
    engine, module = PrivacyEngine(accountant="pld"), Net()
    made = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(rows(), batch_size=12), target_epsilon=3.0, target_delta=1e-5,
        epochs=1, max_grad_norm=1.0, grad_sample_mode="ghost", max_batch_size=20,
        privacy_unit="unit_ids",
    )  # fmt: skip
    train(made)
    assert 2.8 < engine.get_epsilon(1e-5) <= 3.0


def test_users_and_physical_batches() -> None:
    users = UserDataset(rows(), [row // 3 for row in range(ROWS)], most_rows=3)
    weights = []
    for physical in (None, 2):
        made = private(Net(), "ghost", 8, users)
        if physical is None:
            train(made, 24)
        else:
            with BatchMemoryManager(
                data_loader=made[3], max_physical_batch_size=physical, optimizer=made[1]
            ) as loader:
                train((*made[:3], loader), 6)
        weights.append([p.detach() for p in made[1].params])
    torch.testing.assert_close(weights[0], weights[1])
    assert (weights[0][0] - Net().body.weight).abs().max() > 1e-3


def test_mappings_get_a_key() -> None:
    from opacus.data.collate import wrap_collate_with_empty
    from opacus.data.fixed import PaddedCollate

    def collate(found: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([row[0] for row in found]), "scale": torch.ones(2)}

    fill = PaddedCollate(wrap_collate_with_empty(collate_fn=collate, dataset=rows()), 5, rank=1)
    for count in (2, 0, 5):
        batch = fill([rows()[i] for i in range(count)])
        assert batch["x"].shape == (5, 6) and batch["scale"].shape == (2,)
        ids = batch["unit_ids"]
        assert (ids[count:] == -1).all() and (ids[:count] >> 52 == 1).all()
        assert (ids[:count].diff() == 1).all()
    with pytest.raises(ValueError, match="room for 5"):
        fill([rows()[0]] * 6)


@pytest.mark.parametrize(
    "kw,message",
    [
        ({"most": 11}, "below the expected batch size"),
        ({"most": 0}, "whole number"),
        ({"most": 20, "privacy_unit": None}, "pass privacy_unit='unit_ids'"),
        ({"most": 20, "accountant": "prv"}, "accountant='pld'"),
        ({"most": 20, "poisson_sampling": False}, "poisson_sampling must be"),
    ],
)
def test_what_does_not_fit_is_refused(kw: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private(Net(), "ghost", **kw)


def of_rank(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("ghost_fsdp", "ghost_fsdp_bk")[: 3 - world_size // 2]:
        progress(mode)
        made = private(FSDP2Wrapper(Net()), mode, 16)
        drawn = train(made, 16 // world_size)
        weights = [p.detach().full_tensor() for p in made[1].params]
        found[mode] = weights, drawn, made[1]._counters[0].sampling
    train(private(FSDP2Wrapper(Net()), mode, 16, data_layout="replicated"), 16)  # named by each
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_have_equally_many_rows(world_size: int) -> None:
    found = run_distributed(of_rank, world_size)
    for mode in found[0]:
        of_ranks = [result[mode] for result in found]
        together = [set().union(*parts) for parts in zip(*(r[1] for r in of_ranks), strict=True)]
        want = reference(together)
        for weights, _, sampling in of_ranks:
            assert sampling == TruncatedPoisson(ROWS // world_size, 16 // world_size)
            torch.testing.assert_close(weights, want, rtol=1e-9, atol=1e-11)
