"""Which dimension holds the samples: time-major models, and tables indexed by positions."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opacus.core.record import whose
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers.batch_dimension import CLIP, B, private, step, token_batch
from tests.helpers.distributed import run_distributed
from tests.helpers.modes import assert_close

MODES = ["hooks", "functorch", "ghost", "ghost-deferred", "ghost_bk", "flash", "flash_bk"]


class TimeMajor(nn.Module):
    """``[T, B]`` tokens; a convolution and a head that know no time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 8)
        self.pooled_norm = nn.LayerNorm(8)
        self.convolution = nn.Conv1d(2, 3, 3)
        self.group_norm = nn.GroupNorm(1, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.norm(self.tokens(ids))))
        pooled = self.pooled_norm(x.mean(0))  # [B, 8]
        maps = self.group_norm(self.convolution(pooled.view(-1, 2, 4)))  # [B, 3, 2]
        return self.head(maps.flatten(1))


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def want(model: nn.Module, inputs: Tensor, targets: Tensor, dim: int) -> list[Tensor]:
    """Clipped sum, one sample at a time in float64; ``dim`` of the inputs is the batch."""

    def loss(one: nn.Module, row: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(one(row[0].movedim(0, dim)), row[1])

    gradients = oracle.per_sample_gradients(model, loss, (inputs, targets))
    norms = oracle.norms(gradients)
    assert (norms > CLIP).any()
    return list(oracle.clipped_sum(gradients, CLIP).values())


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("rows", [B, 3, 8, 1, 6])  # also as many as features or channels
@pytest.mark.parametrize("mode", MODES)
def test_time_major_model_with_a_head(mode: str, rows: int) -> None:
    ids, targets = token_batch(rows)
    expected = want(seeded(TimeMajor), ids, targets, 1)
    model = seeded(TimeMajor)
    step(private(model, mode, batch_first=False), ids.T, targets)
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("mode", MODES)
def test_time_major_model_taken_for_batch_first(mode: str) -> None:
    ids, targets = token_batch()
    model = seeded(TimeMajor)
    with pytest.raises(ValueError, match="batch_first=False"):
        step(private(model, mode), ids.T, targets)


def time_major_rank(rank: int, _: int) -> list[Any]:
    results = []
    for deferred in ("0", "1"):
        os.environ["OPACUS_USE_DEFERRED_NORM"] = deferred
        model = FSDP2Wrapper(seeded(TimeMajor))
        ids, targets = (t.split([3, B - 3])[rank] for t in token_batch())
        step(private(model, "ghost_fsdp", batch_first=False), ids.T, targets)
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients(model)]
        results.append(full)
    return results


def test_time_major_model_on_two_ranks() -> None:
    expected = want(seeded(TimeMajor), *token_batch(), 1)
    for rank in run_distributed(time_major_rank, 2):
        for grads in rank:
            assert_close(grads, expected)


# --- tables whose indices have no row for each sample ---


class PositionTable(nn.Module):
    """A bias for each pair of positions, the same for all samples, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.positions = nn.Embedding(3, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        distance = (place[:, None] - place[None]).abs().clamp(max=2)
        weights = self.positions(distance).squeeze(-1).softmax(-1)  # [T, T]
        return self.head((weights @ self.tokens(ids)).tanh().mean(1))


class FlatPositionTable(PositionTable):
    """Positions ``[T]``."""

    def forward(self, ids: Tensor) -> Tensor:
        weights = self.positions(torch.arange(ids.shape[1]).clamp(max=2)).softmax(0)  # [T, 1]
        return self.head((weights * self.tokens(ids)).tanh().mean(1))


TABLES = [PositionTable, FlatPositionTable]


@pytest.mark.parametrize("length", [B - 1, B, B + 1])
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("mode", MODES)
def test_a_table_of_positions_is_exact(mode: str, kind: type[nn.Module], length: int) -> None:
    """Whatever the batch size: with as many samples as positions the shapes would fit."""
    ids, targets = token_batch(B, length)
    model = seeded(kind)
    run = private(model, mode)
    for _ in range(2):  # the second one from what is remembered, if anything is
        step(run, ids, targets)
        assert_close(gradients(model), want(seeded(kind), ids, targets, 0))


@pytest.mark.parametrize("length", [B - 1, B])
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_positions_is_refused_where_nothing_is_followed(
    kind: type[nn.Module], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whose, "can_follow", lambda *args: False)
    model = seeded(kind)
    with pytest.raises(ValueError, match=r"positions' \(Embedding\)"):
        step(private(model, "ghost"), *token_batch(B, length))


@pytest.mark.parametrize("length", [B, B + 1])
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_table_of_positions_is_fine(mode: str, kind: type[nn.Module], length: int) -> None:
    ids, targets = token_batch(B, length)

    def frozen() -> nn.Module:
        model = seeded(kind)
        model.positions.requires_grad_(False)
        return model

    expected = want(frozen(), ids, targets, 0)
    model = frozen()
    step(private(model, mode), ids, targets)
    assert_close(gradients(model), expected)


class ShiftedTokens(nn.Module):
    """Tokens of a decoder, computed in the model: rows are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        shifted = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
        return self.head(self.tokens(shifted).tanh().mean(1))


class ReversedTokens(ShiftedTokens):
    """By an operation that nobody follows."""

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(1, B + 1)  # what was before is at another place now
        return self.head((self.tokens(torch.flip(ids, [1])) * places[:, None]).tanh().mean(1))


@pytest.mark.parametrize("mode", MODES)
def test_indices_computed_in_the_model(mode: str) -> None:
    """Accepted if they come from an input row by row, also where the batch size cannot tell."""
    for ids, targets in (token_batch(B, B), token_batch(B - 1, B), token_batch(B, B)):
        run = private(seeded(ShiftedTokens), mode)
        step(run, ids, targets)
        assert_close(gradients(run[0]), want(seeded(ShiftedTokens), ids, targets, 0))


@pytest.mark.parametrize("mode", MODES)
def test_indices_whose_origin_is_unknown(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is followed: a batch of another size shows that their rows are samples."""
    square, other = token_batch(B, B), token_batch(B - 1, B)
    model = seeded(ReversedTokens)
    run = private(model, mode)
    step(run, *square)
    assert_close(gradients(model), want(seeded(ReversedTokens), *square, 0))
    monkeypatch.setattr(whose, "can_follow", lambda *args: False)
    model = seeded(ReversedTokens)
    run = private(model, mode)
    with pytest.raises(ValueError, match=r"'tokens' \(Embedding\).*batch of another size"):
        step(run, *square)
    for ids, targets in (other, square):
        step(run, ids, targets)
        assert_close(gradients(model), want(seeded(ReversedTokens), ids, targets, 0))


def tables_of_rank(rank: int, _: int) -> list[Any]:
    results = []
    for mode in ("ghost_fsdp", "ghost_fsdp_bk"):
        for length in (2, 3):
            model = FSDP2Wrapper(seeded(PositionTable))
            ids, targets = (t.split([2, B - 2])[rank] for t in token_batch(B, length))
            step(private(model, mode), ids, targets)
            results.append([g.full_tensor() for g in gradients(model)])
    return results


def test_a_table_of_positions_is_exact_on_two_ranks() -> None:
    expected = [want(seeded(PositionTable), *token_batch(B, length), 0) for length in (2, 3)]
    for results in run_distributed(tables_of_rank, 2):
        for grads, right in zip(results, expected * 2, strict=True):
            assert_close(grads, right)
