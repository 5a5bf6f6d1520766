"""Whether the rows of a table's indices are samples, where the batch size cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.record import whose
from tests.helpers.modes import assert_close

# It is said once a process, so any of these tests may be the first to hear it.
pytestmark = pytest.mark.filterwarnings("ignore:OPACUS_ISOLATION_CHECK=0")

T = 4  # tokens, and samples of the ambiguous batch
C = 0.5

Rule = Callable[[Tensor, Tensor], Tensor]


def padded_positions(ids: Tensor, mask: Tensor) -> Tensor:
    return ((torch.cumsum(mask, dim=1).type_as(mask) - 1) * mask).long()


def positions_after_padding(ids: Tensor, mask: Tensor) -> Tensor:
    kept = ids.ne(0).int()
    return (kept.cumsum(1) * kept).long() + 1


def shifted_right(ids: Tensor, mask: Tensor) -> Tensor:
    shifted = ids.new_zeros(ids.shape)
    shifted[:, 1:] = ids[:, :-1].clone()
    shifted[:, 0] = 3
    return shifted.masked_fill_(shifted == 5, 0)


def shifted_by_cat(ids: Tensor, mask: Tensor) -> Tensor:
    start = torch.full_like(ids[:, :1], 2)
    return torch.cat([start, ids[:, :-1]], dim=1).view(-1, T)


def shifted_by_pad(ids: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask > 0, F.pad(ids, (1, 0))[:, :-1], 1)


def segments(ids: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros_like(ids)


def relative(ids: Tensor, mask: Tensor) -> Tensor:
    places = torch.arange(ids.shape[1]).type_as(ids)
    return (places[:, None] - places[None, :]).abs()


def one_row(ids: Tensor, mask: Tensor) -> Tensor:
    return ids[0] * 0 + torch.arange(T)


def along_samples(ids: Tensor, mask: Tensor) -> Tensor:
    return mask.long().t().contiguous()


PER_SAMPLE = [
    padded_positions, positions_after_padding, shifted_right, shifted_by_cat, shifted_by_pad,
    segments,
]  # fmt: skip
SHARED = [relative, one_row, along_samples]


class Model(nn.Module):
    """Tokens, and a second table whose indices the model computes."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 6)
        self.table = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 3)
        self.rule = rule

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        found = self.table(self.rule(ids, mask))
        if self.rule in SHARED:  # [T, d] or [T, T, d], for all samples
            found = found.mean(0)
        return self.head(torch.tanh(self.tokens(ids) + found)).mean(1)


def batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(size, T, dtype=torch.long)
    mask[::2, -1] = 0
    return torch.randint(1, 9, (size, T)), mask, torch.randint(0, 3, (size,))


def build(rule: Rule) -> nn.Module:
    torch.manual_seed(0)
    return Model(rule)


def private(rule: Rule, mode: str) -> Any:
    return made_private(build(rule), mode)


def made_private(model: nn.Module, mode: str) -> Any:
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        data_loader=DataLoader(TensorDataset(*batch(12)), batch_size=6),
        loss_reduction="sum",
        noise_multiplier=0.0,
        max_grad_norm=C,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )


def clipped_sum(rule: Rule, size: int) -> list[Tensor]:
    model = build(rule).double()
    ids, mask, y = batch(size)
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(size):
        rows = slice(i, i + 1)
        loss = F.cross_entropy(model(ids[rows], mask[rows]), y[rows])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        assert norm > C
        for part, grad in zip(total, grads, strict=True):
            part += grad * (C / (norm + 1e-6))
    return total


def released(made: Any, size: int) -> list[Tensor]:
    ids, mask, y = batch(size)
    loss_fn = made[2] if len(made) == 4 else nn.CrossEntropyLoss(reduction="sum")
    made[1].zero_grad()
    loss_fn(made[0](ids, mask), y).backward()
    made[1].step()
    return [p.grad for p in made[1].params]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("rule", PER_SAMPLE)
def test_indices_computed_row_by_row_are_taken(rule: Rule, mode: str) -> None:
    made = private(rule, mode)
    for _ in range(2):
        assert_close(released(made, T), clipped_sum(rule, T))
    assert torch.overrides._len_torch_function_stack() == 0


@pytest.mark.parametrize("rule", SHARED)
def test_indices_that_samples_share(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    if rule is relative:  # has a gradient for each sample
        assert_close(released(private(rule, "ghost"), T), clipped_sum(rule, T))
    else:
        with pytest.raises(ValueError, match=r"'(table|head)'.*(no samples|of no single sample)"):
            released(private(rule, "ghost"), T)
    monkeypatch.setattr(whose, "can_follow", lambda *args: False)
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    made = private(rule, "ghost")
    with pytest.raises(ValueError, match=r"table.*positions that all samples share"):
        released(made, T)
    assert torch.overrides._len_torch_function_stack() == 0


def inputs_of_one_sample(table: nn.Embedding, ids: Tensor) -> Tensor:
    return table(ids[0])


def inputs_turned(table: nn.Embedding, ids: Tensor) -> Tensor:
    return table(ids.t()).mean(0)


def turned_in_place(table: nn.Embedding, ids: Tensor) -> Tensor:
    turned = ids.clone()
    turned.t_()
    return table(turned).mean(0)


def by_keyword(table: nn.Embedding, ids: Tensor) -> Tensor:
    return table(input=torch.arange(T))


def samples_first(table: nn.Embedding, ids: Tensor) -> Tensor:
    return table(ids) + table(torch.arange(T))


def recomputed(table: nn.Embedding, ids: Tensor) -> Tensor:
    scale = torch.ones((), requires_grad=True)  # without it nothing is recomputed
    return checkpoint(lambda s: table(torch.arange(T)) * s, scale, use_reentrant=True)


SHARING = [
    inputs_of_one_sample, inputs_turned, turned_in_place, by_keyword, samples_first, recomputed,
]  # fmt: skip


def first_column(table: nn.Embedding, ids: Tensor) -> Tensor:
    return table(ids[:, 1:]).mean(1, True) + table(ids[:, 0])[:, None]


def one_row_for_all(table: nn.Embedding, ids: Tensor) -> Tensor:
    return table(ids) + table(ids.new_ones(1, 1).expand(*ids.shape).clone() * ids)


def recomputed_rows(table: nn.Embedding, ids: Tensor) -> Tensor:
    scale = torch.ones((), requires_grad=True)
    return checkpoint(lambda i, s: table(i) * s, ids, scale, use_reentrant=True)


def recomputed_shifted_rows(table: nn.Embedding, ids: Tensor) -> Tensor:
    return checkpoint(table, ids % 4 + 1, use_reentrant=False)


OWN_ROWS = [first_column, one_row_for_all, recomputed_rows, recomputed_shifted_rows]


class LookUps(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.use = nn.Embedding(9, 6), nn.Linear(6, 3), use

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.use(self.table, ids).expand(len(ids), -1, -1)).mean(1)


def step(use: Any, mode: str) -> Any:
    model = LookUps(use)
    made = made_private(model, mode)
    loss_fn = made[2] if len(made) == 4 else nn.CrossEntropyLoss(reduction="sum")
    ids, _, y = batch(T)
    for _ in range(2):
        made[1].zero_grad()
        loss_fn(made[0](ids), y).backward()
        made[1].step()
    return [p.grad for p in made[1].params]


# The last: an output that depends on no input, of which the loss takes a row for each sample.
REASONS = "no samples|no single sample|by their place|used after the forward pass"


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
@pytest.mark.parametrize("use", SHARING)
def test_positions_in_disguise(use: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if use is samples_first:
        assert_close(step(use, mode), right(use))
    else:
        with pytest.raises((ValueError, RuntimeError), match=REASONS):
            step(use, mode)
    monkeypatch.setattr(whose, "can_follow", lambda *args: False)
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")
    with pytest.raises(ValueError, match=r"table.*positions that all samples share"):
        step(use, mode)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("use", OWN_ROWS)
def test_rows_of_samples_in_other_forms_are_taken(use: Any, mode: str) -> None:
    assert_close(step(use, mode), right(use))


def right(use: Any) -> list[Tensor]:
    model = LookUps(use).double()
    ids, _, y = batch(T)
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(T):
        model.zero_grad()
        F.cross_entropy(model(ids[i : i + 1]), y[i : i + 1]).backward()
        grads = [p.grad for p in model.parameters()]
        factor = min(1.0, C / float(torch.stack([g.norm() for g in grads]).norm() + 1e-6))
        for part, grad in zip(total, grads, strict=True):
            part += grad * factor
    return total


def test_the_trail_is_followed_only_as_long_as_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import opacus.core.record.provenance as provenance

    monkeypatch.setattr(whose, "can_follow", lambda *args: False)
    monkeypatch.setenv("OPACUS_ISOLATION_CHECK", "0")

    made, followed = private(padded_positions, "ghost"), []
    original = provenance.SampleRows

    def counted(*args: Any) -> Any:
        followed.append(args)
        return original(*args)

    monkeypatch.setattr(provenance, "SampleRows", counted)
    made[0].eval()
    made[0](*batch(T)[:2])
    assert not followed  # nothing is clipped there
    made[0].train()
    for _ in range(3):
        released(made, T)
    assert len(followed) == 1
    other = private(padded_positions, "ghost")
    released(other, T + 1)  # here the batch size tells
    released(other, T)
    assert len(followed) == 2


def test_a_forward_pass_that_fails_leaves_nothing() -> None:
    def fails(ids: Tensor, mask: Tensor) -> Tensor:
        raise LookupError("no table")

    made = private(fails, "ghost")
    with pytest.raises(LookupError, match="no table"):
        released(made, T)
    assert torch.overrides._len_torch_function_stack() == 0
