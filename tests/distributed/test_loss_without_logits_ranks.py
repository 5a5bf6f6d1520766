"""The loss without logits under FSDP2: the head's weight is whole only for a while."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.kernels.loss import head as head_kernels
from opacus.core.rules import linear
from opacus.core.sums.planner import Planner
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers import without_logits as one
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.sharded import full

B = one.B
# mode, tied, loss inside of the model, deferred norms, what one pass keeps, rows of each rank,
# whether the head is a unit of its own
CASES = [
    ("ghost_fsdp", True, True, True, "", (1, 3), False),
    ("ghost_fsdp", False, False, True, "", (0, 4), True),
    ("ghost_fsdp_bk", False, True, False, "store", (2, 2), False),
    ("ghost_fsdp_bk", False, True, True, "keep", (0, 4), True),
    ("ghost_fsdp_bk", False, False, False, "keep", (1, 3), False),
    ("ghost_fsdp_bk", True, True, False, "keep", (3, 1), False),
]


def job(rank: int, world: int, clips: dict[bool, float]) -> list[dict[str, Tensor]]:
    head_kernels.PART_ELEMENTS = one.PART
    linear.RANK_ROWS = 1  # kept layers' sums are written where they are reduced
    return [train(rank, case, clips[case[1]]) for case in CASES]


def train(rank: int, case: Any, clip: float) -> dict[str, Tensor]:
    mode, tied, inside, deferred, what, sizes, alone = case
    progress(case)
    os.environ["OPACUS_USE_DEFERRED_NORM"] = "1" if deferred else "0"
    Planner.stores = lambda self, record: what == "store"  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = one.Net(tied).double()
    if alone:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.head)
    model = FSDP2Wrapper(model)
    data = one.batch()
    wrapped, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.Identity() if inside else one.outside,
        data_loader=DataLoader(TensorDataset(*data), batch_size=B),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    start = sum(sizes[:rank])
    tokens, labels = (t[start : start + sizes[rank]] for t in data)
    if inside:
        criterion(wrapped(tokens, labels)).backward()
    else:
        criterion(wrapped(tokens), model.head, labels).backward()
    optimizer.step()
    return {n: full(p.grad) for n, p in model.named_parameters()}


def test_every_case_is_what_plain_autograd_gives() -> None:
    wants, clips = {}, {}
    for tied in (False, True):
        torch.manual_seed(0)
        model = one.Net(tied).double()
        grads = oracle.per_sample_gradients(model, one.with_logits, one.batch())
        norms = oracle.norms(grads)
        clips[tied] = float(norms.max()) / 2
        assert int((norms > clips[tied]).sum()) >= 1
        wants[tied] = oracle.clipped_sum(grads, clips[tied])
    results = run_distributed(job, 2, clips)
    for result in results:
        for case, grads in zip(CASES, result, strict=True):
            for name, want in wants[case[1]].items():
                assert oracle.relative_error(grads[name] * B, want) < 1e-10, (case, name)
