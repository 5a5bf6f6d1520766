"""A sample that is not finite contributes nothing, on no rank, however it is clipped.

The same for an empty batch, on one rank or on all. With per-layer clipping an infinite input
gives the first layer a NaN norm and the last one a finite norm: the sample is left out of both.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.core.ranks.parallelism import Single
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed

B, BAD = 6, 1
C, LIMITS = 1.55, [0.3, 0.2, 0.4, 0.25]
ADAPTIVE = {
    "target_unclipped_quantile": 0.3,
    "clipbound_learning_rate": 0.5,
    "min_clipbound": 1e-3,
    "max_clipbound": 1e3,
}
KINDS = ("nan", "inf", "empty rank", "empty")
UNUSABLE = {("nan", BAD), ("inf", BAD)}


def data(kind: str = "") -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    x, y = torch.randn(B, 5), torch.randint(0, 4, (B,))
    if kind in ("nan", "inf"):
        x[BAD, 2] = float(kind)
    return x, y


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def rows(kind: str, rank: int, world_size: int) -> slice:
    """Which samples a rank has."""
    if kind == "empty":
        return slice(0, 0)
    if world_size == 1 or kind == "empty rank":
        return slice(0, B) if rank == 0 else slice(0, 0)
    return slice(3 * rank, 3 * rank + 3)


def settings(clipping: str, mode: str) -> dict[str, Any]:
    if clipping == "per_layer":
        return {"max_grad_norm": LIMITS, "clipping": clipping}
    if clipping == "adaptive" and mode == "hooks":
        # Hardly any noise on the count.
        return {"max_grad_norm": C, "clipping": clipping, "unclipped_num_std": 1e-6, **ADAPTIVE}
    return {"max_grad_norm": C, **(ADAPTIVE if clipping == "adaptive" else {})}


def wrapped(mode: str) -> nn.Module:
    if "fsdp" in mode:
        return FSDP2Wrapper(build())
    if mode != "ghost_tp":
        return build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(build(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def released(
    rank: int, world_size: int, mode: str, clipping: str, kind: str, same: bool = False, **more: Any
) -> dict[str, Any]:
    """The sum that a step releases, without noise, and the clipping norm after it.

    Args:
        same: All ranks have the same samples.
    """
    progress((mode, clipping, kind, more))
    adaptively = clipping == "adaptive" and mode != "hooks"
    model = wrapped(mode)
    x, y = data(kind)
    made: Any = (PrivacyEngineAdaptiveClipping if adaptively else PrivacyEngine)().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=B),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        loss_reduction="sum",
        noise_multiplier=0.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **settings(clipping, mode),
        **more,
    )
    loss_fn = made[2] if mode != "hooks" else nn.CrossEntropyLoss(reduction="sum")
    mine = rows(kind, 0, 1) if same else rows(kind, rank, world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Single, "noised_count", lambda self, std, count: count)
        loss_fn(made[0](x[mine]), y[mine]).backward()
        made[1].step()
    grads = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in made[1].params
    ]
    return {"grads": grads, "C": made[1].max_grad_norm}


def expected(clipping: str, kind: str, moves_first: bool) -> dict[str, Any]:
    """The same from one backward pass a sample in float64, samples that are not finite left out.

    Args:
        moves_first: An adaptive C moves before it clips.
    """
    model, (x, y) = build().double(), data()
    samples = [] if kind == "empty" else [i for i in range(B) if (kind, i) not in UNUSABLE]
    parameters = list(model.parameters())
    each = []
    for i in samples:
        loss = nn.functional.cross_entropy(model(x[i : i + 1].double()), y[i : i + 1])
        each.append(torch.autograd.grad(loss, parameters))
    norms = [torch.stack([g.norm() for g in grads]).norm().item() for grads in each]
    assert not each or min(norms) < C < max(norms) or clipping == "per_layer"
    before = after = C
    if clipping == "adaptive":
        size = 0 if kind == "empty" else B  # a sample that is not finite counts as clipped
        fraction = (sum(norm <= C for norm in norms) - size / 2) / B + 0.5
        step = ADAPTIVE["clipbound_learning_rate"]
        after = C * math.exp(-step * (fraction - ADAPTIVE["target_unclipped_quantile"]))
    limit = after if moves_first else before
    total = [torch.zeros_like(p) for p in parameters]
    for grads, norm in zip(each, norms, strict=True):
        for j, grad in enumerate(grads):
            bound, size = (
                (LIMITS[j], grad.norm().item()) if clipping == "per_layer" else (limit, norm)
            )
            total[j] += grad * min(1.0, bound / (size + 1e-6))
    return {"grads": total, "C": math.hypot(*LIMITS) if clipping == "per_layer" else after}


def assert_released(got: dict[str, Any], want: dict[str, Any]) -> None:
    for grad, total in zip(got["grads"], want["grads"], strict=True):
        torch.testing.assert_close(grad.detach().double(), total, rtol=1e-5, atol=1e-6)
    assert got["C"] == pytest.approx(want["C"], rel=1e-5)


def test_the_bad_sample_would_have_counted() -> None:
    """Otherwise nothing here could fail."""
    whole, without = (expected("flat", kind, False)["grads"] for kind in ("", "nan"))
    assert max((a - b).abs().max() for a, b in zip(whole, without, strict=True)) > 0.1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "empty rank"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "adaptive"])
@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk"])
def test_one_process(mode: str, clipping: str, kind: str) -> None:
    got = released(0, 1, mode, clipping, kind)
    assert_released(got, expected(clipping, kind, moves_first=mode != "hooks"))


def every_kind(
    rank: int, world_size: int, modes: list[str], options: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        released(rank, world_size, mode, kind=kind, **option)
        for mode in modes
        for option in options
        for kind in KINDS
    ]


def check_ranks(modes: list[str], options: list[dict[str, Any]]) -> None:
    want = [
        expected(option["clipping"], kind, moves_first=True)
        for _ in modes
        for option in options
        for kind in KINDS
    ]
    for of_rank in run_distributed(every_kind, 2, modes, options):
        for got, one in zip(of_rank, want, strict=True):
            assert_released(got, one)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "adaptive"])
def test_sharded_data(clipping: str) -> None:
    options = [{"clipping": clipping, "deferred_norm": deferred} for deferred in (False, True)]
    check_ranks(["ghost_fsdp", "ghost_fsdp_bk"], options)


def test_replicated_data() -> None:
    """Each rank has measured some of the layers only: a norm of one rank spoils the sample."""
    option = {"data_layout": "replicated", "same": True}
    options: list[dict[str, Any]] = [
        {"clipping": "flat", **option},
        {"clipping": "per_layer", **option},
        {"clipping": "flat", "deferred_norm": True, **option},
    ]
    check_ranks(["ghost_fsdp", "ghost_fsdp_bk"], options)


def test_tensor_parallel() -> None:
    options: list[dict[str, Any]] = [
        {"clipping": "flat", "same": True},
        {"clipping": "per_layer", "same": True},
        {"clipping": "flat", "deferred_norm": True, "same": True},
    ]
    check_ranks(["ghost_tp"], options)
