"""Every way to shard a model gives what one process in float64 gives, one sample at a time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers.distributed import attempt, run_distributed
from tests.helpers.sharded import full

B, T, STEPS = 6, 4, 2
# Rows of the batch on each of the ranks that hold different samples.
SIZES = {2: (2, 4), 4: (1, 3, 0, 2)}
MODES = ("ghost_fsdp", "ghost_fsdp_bk")


class Block(nn.Module):
    """Normalisation and two linear layers around a non-linearity, with a residual.

    With ``dtype``, it casts its input; else it takes what comes.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.norm = nn.LayerNorm(7, dtype=dtype)
        self.up = nn.Linear(7, 6, dtype=dtype)
        self.down = nn.Linear(6, 7, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.dtype is None else x.to(self.dtype)
        return x + self.down(torch.tanh(self.up(self.norm(h)))).to(x.dtype)


class Adapted(nn.Module):
    """A frozen layer in half precision with a trainable low-rank adapter in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7, dtype=torch.bfloat16).requires_grad_(False)
        self.a = nn.Linear(7, 2, bias=False)
        self.b = nn.Linear(2, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.b(self.a(x))


class Net(nn.Module):
    """Rows of 7, 6, 3 and 1: no number of ranks divides them all."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(7, 3)
        self.gate = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.to(self.stem.weight.dtype))
        for block in self.blocks:
            x = block(x)
        x = self.head(x).mean(1)
        return x * torch.sigmoid(self.gate(x))


def plain() -> Net:
    return Net([Block(), Block()])


def frozen() -> Net:
    """A whole frozen unit, a frozen layer, and a layer with one frozen parameter."""
    net = plain()
    net.blocks[0].requires_grad_(False)
    net.stem.requires_grad_(False)
    net.blocks[1].up.weight.requires_grad_(False)
    return net


def dtypes() -> Net:
    return Net([Block(torch.float64), Block(), Adapted()])


def half() -> Net:
    return plain().to(torch.bfloat16)


Shardings = Callable[[nn.Module], nn.Module]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def mesh_2x2(*names: str) -> DeviceMesh:
    return init_device_mesh(_device_type(), (2, 2), mesh_dim_names=names)


def _device_type() -> str:
    return torch.get_default_device().type


def hsdp(net: nn.Module) -> nn.Module:
    return FSDP2Wrapper(net, mesh=mesh_2x2("replicate", "shard"))


def tensor_parallel(net: nn.Module) -> nn.Module:
    """Blocks split over the second axis, everything sharded over the first."""
    mesh = mesh_2x2("dp", "tp")
    for block in net.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return FSDP2Wrapper(net, mesh=mesh["dp"])


def own_blocks(net: nn.Module) -> nn.Module:
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(net)


def own_leaves(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            fully_shard(module)
    return fully_shard(net)


def own_units(net: nn.Module) -> nn.Module:
    """Units of mixed kinds: a list of modules, a leaf, and the rest."""
    fully_shard([net.head, net.gate], reshard_after_forward=False)
    fully_shard(net.blocks[0])  # type: ignore[index]
    return fully_shard(net, reshard_after_forward=False)


def from_meta(net: nn.Module) -> nn.Module:
    """Sharded without storage, then filled in place."""
    state = net.state_dict()
    empty = own_blocks(copy.deepcopy(net).to("meta"))
    empty.to_empty(device=_device_type())
    with torch.no_grad():
        for name, parameter in empty.named_parameters():
            assert isinstance(parameter, DTensor)
            source = DTensor.from_local(
                state[name], parameter.device_mesh, [_replicate()], run_check=False
            )
            parameter.copy_(source.redistribute(placements=parameter.placements))
    return empty


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def by_columns(parameter: nn.Parameter) -> Shard | None:
    """Shards along dimension 1 what four ranks divide evenly, as FSDP2 demands."""
    even = parameter.dim() == 2 and parameter.shape[1] % 4 == 0
    return Shard(1) if even else None


def wide() -> Net:
    """Columns that four ranks divide."""
    net = plain()
    net.stem = nn.Linear(5, 7)
    net.head = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 3))
    return net


def ignoring(net: nn.Module) -> nn.Module:
    """A frozen layer that FSDP2 leaves alone."""
    return FSDP2Wrapper(net, ignored_params=set(net.stem.parameters()))  # type: ignore[union-attr]


@dataclass(frozen=True)
class Layout:
    """How a model is sharded over four ranks.

    Attributes:
        shard: Shards the model.
        net: Builds it.
        groups: Number of ranks that hold different samples.
        tolerance: Largest relative difference from float64.
    """

    shard: Shardings
    net: Callable[[], Net] = plain
    groups: int = 4
    tolerance: float = 1e-5


def wrapped(**kwargs: Any) -> Shardings:
    return functools.partial(FSDP2Wrapper, **kwargs)


LAYOUTS = {
    "blocks": Layout(wrapped()),
    "leaves": Layout(wrapped(use_block_wrapping=False, wrap_individual_layers=True)),
    "both": Layout(wrapped(wrap_individual_layers=True)),
    "root": Layout(wrapped(use_block_wrapping=False)),
    "kept_unsharded": Layout(wrapped(reshard_after_forward=False)),
    "resharded": Layout(wrapped(reshard_after_forward=True)),
    "part_resharded": Layout(wrapped(reshard_after_forward=2)),
    "columns": Layout(wrapped(shard_placement_fn=by_columns), wide),
    "ignored": Layout(ignoring, frozen),
    "offload": Layout(wrapped(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "own_blocks": Layout(own_blocks),
    "own_leaves": Layout(own_leaves),
    "own_root": Layout(fully_shard),
    "own_units": Layout(own_units),
    "meta": Layout(from_meta),
    "hsdp": Layout(hsdp),
    "tensor_parallel": Layout(tensor_parallel, groups=2),
    "frozen": Layout(wrapped(), frozen),
    "dtypes": Layout(wrapped(), dtypes, tolerance=1e-2),
    "bf16_parameters": Layout(
        wrapped(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)), half, tolerance=3e-2
    ),
    "bf16": Layout(wrapped(mp_policy=BF16), tolerance=3e-2),
    "bf16_but_norms": Layout(
        wrapped(mp_policy=BF16, opacus_high_precision_layers=nn.LayerNorm), tolerance=3e-2
    ),
    "bf16_but_some_blocks": Layout(
        wrapped(
            mp_policy=BF16,
            opacus_high_precision_layers=(Block, nn.LayerNorm),
            wrap_individual_layers=True,
        ),
        tolerance=3e-2,
    ),
    "bf16_but_norms_hsdp": Layout(
        lambda net: FSDP2Wrapper(
            net,
            mp_policy=BF16,
            mesh=mesh_2x2("replicate", "shard"),
            opacus_high_precision_layers=[nn.LayerNorm],
        ),
        tolerance=3e-2,
    ),
}


def ways(name: str) -> list[tuple[str, bool]]:
    """Modes of a layout; every other one defers norms, which changes nothing."""
    modes = MODES[:1] if name == "tensor_parallel" else MODES  # not offered there
    place = list(LAYOUTS).index(name)
    return [(mode, (place + i) % 2 == 0) for i, mode in enumerate(modes)]


CASES = [(name, *way) for name in LAYOUTS for way in ways(name)]


def build(layout: Layout) -> Net:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return layout.net()


def batch() -> tuple[Tensor, Tensor]:
    with torch.device("cpu"):
        torch.manual_seed(3)
        # Samples of different size, so that norms differ from rank to rank.
        scale = torch.linspace(0.5, 3, B).view(B, 1, 1)
        return torch.randn(B, T, 5) * scale, torch.randint(0, 3, (B,))


def reference(layout: Layout) -> dict[str, Any]:
    """Norms, clipping norm, clipped sum and parameters after some steps, in one process."""
    net = build(layout)
    net = net.double()
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([p for _, p in named], lr=0.02)
    result: dict[str, Any] = {}
    for _ in range(STEPS):
        gradients = oracle.per_sample_gradients(net, _loss, batch())
        if not result:
            result["norms"] = oracle.norms(gradients)
            result["clip"] = result["norms"].median().item()
        total = oracle.clipped_sum(gradients, result["clip"])
        result.setdefault("grads", {n: t / B for n, t in total.items()})
        for name, parameter in named:
            parameter.grad = total[name] / B
        optimizer.step()
    result["parameters"] = {n: p.detach() for n, p in net.named_parameters()}
    return result


def _loss(net: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(net(one[0]), one[1])


def run_layouts(rank: int, world_size: int, clips: dict[str, float]) -> dict[Any, Any]:
    results: dict[Any, Any] = {
        (name, mode, deferred): attempt(train, rank, LAYOUTS[name], mode, deferred, clip)
        for name, clip in clips.items()
        for mode, deferred in ways(name)
    }
    results["noise"] = attempt(noise_of, rank, "tensor_parallel")
    results["noise_hsdp"] = attempt(noise_of, rank, "hsdp")
    return results


def noise_of(rank: int, name: str) -> dict[str, Tensor]:
    """This rank's part of the noise on each parameter."""
    net = LAYOUTS[name].shard(build(LAYOUTS[name]).to(torch.get_default_device()))
    data = TensorDataset(*batch())
    module, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), noise_multiplier=1e6,
        criterion=nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum",
        data_loader=DataLoader(data, B, sampler=DistributedSampler(data)), max_grad_norm=1e-6,
        poisson_sampling=False, grad_sample_mode="ghost_fsdp",
    )  # fmt: skip
    place = rank // (4 // LAYOUTS[name].groups)
    inputs, targets = (t[place : place + 2].to(torch.get_default_device()) for t in batch())
    criterion(module(inputs), targets).backward()
    optimizer.step()
    return {n: p.grad.to_local().clone() for n, p in net.named_parameters()}


def train(rank: int, layout: Layout, mode: str, deferred: bool, clip: float) -> dict[str, Any]:
    """A few steps with noise off: norms, gradients of the first step, final parameters."""
    device = torch.get_default_device()
    net = layout.shard(build(layout).to(device))
    data = TensorDataset(*batch())
    sampler = DistributedSampler(data, shuffle=False)
    trainable = [p for p in net.parameters() if p.requires_grad]
    module, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=net, optimizer=torch.optim.AdamW(trainable, lr=0.02),
        criterion=nn.CrossEntropyLoss(), data_loader=DataLoader(data, B, sampler=sampler),
        noise_multiplier=0.0, max_grad_norm=clip, poisson_sampling=False, grad_sample_mode=mode,
        deferred_norm=deferred,
    )  # fmt: skip
    sizes = SIZES[layout.groups]
    place = rank // (4 // layout.groups)
    rows = slice(sum(sizes[:place]), sum(sizes[: place + 1]))
    inputs, targets = (t[rows].to(device) for t in batch())
    result: dict[str, Any] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        criterion(module(inputs), targets).backward()
        result.setdefault("norms", module.per_sample_gradient_norms)
        optimizer.step()
        named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        result.setdefault("grads", {n: full(p.grad).clone() for n, p in named})
    result["parameters"] = {n: full(p.detach()) for n, p in net.named_parameters()}
    return result


@functools.cache
def references() -> dict[str, dict[str, Any]]:
    return {name: reference(layout) for name, layout in LAYOUTS.items()}


@functools.cache
def results_of(backend: str = "gloo") -> list[dict[Any, Any]]:
    clips = {name: want["clip"] for name, want in references().items()}
    return run_distributed(run_layouts, 4, clips, backend=backend, fresh=True)


@pytest.mark.parametrize("name,mode,deferred", CASES)
def test_four_ranks(name: str, mode: str, deferred: bool) -> None:
    check(results_of(), name, mode, deferred)


def check(ranks: list[dict[Any, Any]], name: str, mode: str, deferred: bool) -> None:
    layout, want = LAYOUTS[name], references()[name]
    clipped = want["norms"] > want["clip"]
    assert clipped.any() and not clipped.all()
    sizes = SIZES[layout.groups]
    for rank, results in enumerate(ranks):
        got = results[name, mode, deferred]
        assert not isinstance(got, str), got
        place = rank // (4 // layout.groups)
        own = want["norms"][sum(sizes[:place]) : sum(sizes[: place + 1])]
        assert oracle.relative_error(got["norms"], own) <= layout.tolerance
        close(got["grads"], want["grads"], layout.tolerance)
        if layout.tolerance < 1e-3:
            close(got["parameters"], want["parameters"], 2e-4)


def test_noise_is_equal_on_ranks_that_hold_the_same_and_on_no_others() -> None:
    ranks = [results["noise"] for results in results_of()]  # mesh [[0, 1], [2, 3]] (dp, tp)
    assert not any(isinstance(rank, str) for rank in ranks), ranks[0]
    for name, noise in ranks[0].items():
        split = ".up." in name or name.endswith("down.weight")
        for one, other in ((0, 1), (2, 3)):
            same = torch.equal(ranks[one][name], ranks[other][name])
            assert same != (split and bool(noise.numel())), name
    parts = [rank["blocks.0.up.weight"] for rank in ranks]
    # 14 or 7 numbers on each rank, of a key of the operating system: all 42 say how large they are.
    assert 0.4 < torch.cat([part.flatten() for part in parts]).std() < 2
    assert all(0.01 < part.std() < 4 for part in parts)
    assert not any(alike(parts[a], parts[b]) for a in range(4) for b in range(a))
    ranks = [results["noise_hsdp"] for results in results_of()]  # replicas: 0 and 2, 1 and 3
    for name in ranks[0]:
        torch.testing.assert_close(ranks[0][name], ranks[2][name], rtol=0, atol=0)
        torch.testing.assert_close(ranks[1][name], ranks[3][name], rtol=0, atol=0)
    assert not alike(ranks[0]["stem.weight"], ranks[1]["stem.weight"])


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether one stream made both; a number or two of different ones may be equal by chance."""
    return bool(torch.isin(one, other).double().mean() > 0.3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("name,mode,deferred", CASES)
def test_four_gpus(name: str, mode: str, deferred: bool) -> None:
    check(results_of("nccl"), name, mode, deferred)


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    scale = max(w.abs().max().item() for w in want.values())
    for name, tensor in got.items():
        error = (tensor.double() - want[name]).abs().max().item()
        assert error <= tolerance * scale, f"{name}: {error:.3g} of {scale:.3g}"
