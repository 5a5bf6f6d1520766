"""Documents packed in rows on two ranks: what one rank refuses, and a rank that has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.sharded import full
from tests.helpers.units import CLIP, D, assert_right, private


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(9, D), nn.Linear(D, 5)

    def forward(self, ids: Tensor, position_ids: Any = None, cu_seqlens: Any = None) -> Tensor:
        return self.head(self.words(ids).tanh())


class Summed(nn.Module):
    reduction = "sum"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.mT, targets, reduction=self.reduction)


# Of seven tokens, by the argument that says where documents start.
BAD_DOCUMENTS = {
    "position_ids": {
        "has to be called with position_ids=": {},
        "got (1, 7) torch.float32": {"position_ids": torch.zeros(1, 7)},
        "got (0,) torch.float32": {"position_ids": torch.zeros(0)},
        "starts a row with another number than 0": {"position_ids": torch.arange(2, 9)[None]},
        "position_ids has shape (1, 6)": {"position_ids": torch.arange(6)[None]},
    },
    "cu_seqlens": {
        "cu_seqlens has shape (0,)": {"cu_seqlens": torch.zeros(0, dtype=torch.long)},
        "got [3, 7]": {"cu_seqlens": torch.tensor([3, 7])},
        "got [0, 5, 3, 7]": {"cu_seqlens": torch.tensor([0, 5, 3, 7])},
        "got [[0, 3, 7]]": {"cu_seqlens": torch.tensor([[0, 3, 7]])},
    },
}
DOCUMENTS = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), "cu_seqlens": [0, 3, 7]}


def refused_documents(rank: int, _: int, mode: str) -> dict[str, tuple[str, Tensor]]:
    """What is said of documents that rank 1 refuses, and the largest element of a sum after it."""
    said = {}
    ids = torch.randint(9, (1, 7), generator=torch.Generator().manual_seed(rank))
    for key, cases in BAD_DOCUMENTS.items():
        right = {key: torch.as_tensor(DOCUMENTS[key])}
        model = FSDP2Wrapper(Packed()) if "fsdp" in mode else DistributedDataParallel(Packed())
        made = private(model, mode, 4, privacy_unit=key)
        for wanted, wrong in cases.items():
            progress(wanted)
            with pytest.raises((RuntimeError, ValueError)) as caught:
                made[0](ids, **(wrong if rank else right))
            said[wanted] = f"{caught.type.__name__}: {caught.value}"
        made[0](ids, **right)
    return said


@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk", "ghost_bk"])
def test_documents_that_one_rank_refuses(mode: str) -> None:
    """All ranks say so: the others do not wait for it in the model."""
    others, own = run_distributed(refused_documents, 2, mode)
    assert len(own) == sum(map(len, BAD_DOCUMENTS.values()))
    for wanted, here in own.items():
        assert here.startswith("ValueError: ") and wanted in here
        assert others[wanted].startswith("RuntimeError: ") and wanted in others[wanted]


def documents_on_one_rank(rank: int, _: int, mode: str) -> dict[str, list[Tensor]]:
    """The sums where rank 1 has drawn nothing, or a row without tokens."""
    sums = {}
    for key, where in DOCUMENTS.items():
        for rows in (0, 1):
            progress((key, rows))
            model = FSDP2Wrapper(Packed()) if "fsdp" in mode else DistributedDataParallel(Packed())
            made = private(model, mode, 2, criterion=Summed(), privacy_unit=key)
            ids, places = torch.arange(7)[None], torch.as_tensor(where)
            if rank:
                ids = ids[:, :0] if rows else ids[:0]
                places = places[:, :0] if places.dim() == 2 and rows else places[:rows]
            made[2](made[0](ids, **{key: places}), ids % 5).backward()
            made[1].step()
            sums[f"{key} {rows}"] = [full(p.grad) for p in made[1].params]
    return sums


@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk", "ghost_bk"])
def test_a_rank_without_documents_goes_along(mode: str) -> None:
    exact, total = Packed().double(), None
    parameters = list(exact.parameters())
    for part in (torch.arange(3), torch.arange(3, 7)):
        loss = nn.functional.cross_entropy(exact(part), part % 5, reduction="sum")
        found = torch.autograd.grad(loss, parameters)
        norm = float(torch.stack([g.norm() for g in found]).norm())
        assert norm > 2 * CLIP
        clipped = [g * CLIP / (norm + oracle.CLIPPING_EPS) for g in found]
        total = clipped if total is None else [t + g for t, g in zip(total, clipped, strict=True)]
    for sums in run_distributed(documents_on_one_rank, 2, mode):
        assert len(sums) == 4
        for got in sums.values():
            assert_right(got, total)


class Mixed(Packed):
    """Documents that see those before them in a row, or do not."""

    def forward(self, ids: Tensor, position_ids: Any = None, seen: bool = False) -> Tensor:
        h = self.words(ids).tanh()
        before = (position_ids == 0).cumsum(1)
        own = (before[:, :, None] == before[:, None]) | seen
        return self.head(own.to(h) @ h)


# Of each rank: of other lengths, none, or with other numbers of documents.
ROWS = [[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


def mixed(rank: int, _: int, mode: str) -> list[str]:
    """What is said of a model whose documents see each other, with other rows on each rank."""
    said = []
    for rows in ((0, 1), (1, 2), (0, None)):
        for seen in (False, True):
            progress((rows, seen))
            made = private(
                FSDP2Wrapper(Mixed()), mode, 3, criterion=Summed(), privacy_unit="position_ids"
            )
            own = rows[rank]
            places = torch.tensor(ROWS[0 if own is None else own])[None][: own is not None]
            ids = torch.arange(rank, rank + places.shape[1])[None][: len(places)] % 9
            made[2](made[0](ids, position_ids=places, seen=seen), ids % 5).backward()
            try:
                made[1].step()
                said.append("")
            except RuntimeError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_fsdp_bk"])
def test_documents_that_see_each_other_are_refused_on_all_ranks(mode: str) -> None:
    both = run_distributed(mixed, 2, mode)
    for own in both:
        assert len(own) == 6 and not any(own[::2]), own
        assert all(text.startswith("IsolationError") for text in own[1::2]), own
    assert any("see each other" in text for own in both for text in own)
