"""Shards of per-sample gradients that ranks exchange while the backward pass runs."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus import PrivacyEngine
from opacus.core import exchange as exchanges
from opacus.core import planner as planning
from opacus.core.exchange import Exchange, Part
from opacus.core.planner import Planner
from opacus.core.rates import Link, Rates
from opacus.core.reduction import Shards
from opacus.core.stored_shards import StoredShards, stored_shards_from_environment
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests import oracle, problems
from tests.core.test_planner import FAST_MEMORY, record
from tests.distributed import test_layouts_ranks_differ as ranks_differ
from tests.distributed.test_layouts_ranks_differ import Collectives
from tests.distributed_utils import progress, run_distributed

N, T, CLIP = 12, 4, 1.5
# Features and classes: of all sizes some cannot be divided by the number of ranks.
UNEVEN, EVEN = (5, 7, 3), (8, 8, 4)
# Rows of each rank's batch. A size is that of the largest batch.
SPLITS = {
    2: {
        "one": ([3], [0]),
        "several": ([0, 1, 2], [3, 4, 5]),
        "uneven": ([0, 1, 2, 3], [4]),
        "empty": ([], [0, 1, 2]),
        "nothing": ([], []),
    },
    4: {"one": ([3], [0], [1], [2]), "uneven": ([0], [1, 2], [], [3, 4, 5])},
}
PROBLEMS = ("frozen", "checkpoint", "reused", "own_parameters", "transposed", "channels")
PROBLEMS = (*PROBLEMS, "language", "language_tied")
# Whether FSDP2 can go on after an error in a backward pass: since torch 2.13.
GOES_ON = hasattr(FSDPModule, "reset_iter_state")


class Block(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, h)
        self.down = nn.Linear(h, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks, which are FSDP2 units, and a head."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        d, h, classes = sizes
        self.blocks = nn.ModuleList([Block(d, h), Block(d, h)])
        self.head = nn.Linear(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


def build(sizes: Sequence[int]) -> Net:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return Net(sizes)


def data(sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    with torch.device("cpu"):
        scales = torch.linspace(0.1, 2, N).view(-1, 1, 1)
        return torch.randn(N, T, sizes[0]) * scales, torch.randint(0, sizes[2], (N,))


def private(net: nn.Module, choice: str = "always", **kwargs: Any) -> Any:
    """``(module, optimizer, criterion)`` of a sharded model; losses are summed."""
    rows = TensorDataset(torch.zeros(N, 1), torch.zeros(N))
    arguments = {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.0),
        "criterion": nn.CrossEntropyLoss(reduction="sum"),
        "data_loader": DataLoader(rows, 4, sampler=DistributedSampler(rows, shuffle=False)),
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "poisson_sampling": False,
        "loss_reduction": "sum",
        "grad_sample_mode": "ghost_fsdp_bk",
    }
    module, optimizer, criterion, _ = PrivacyEngine().make_private(**{**arguments, **kwargs})
    module.stored_shards = choice
    return module, optimizer, criterion


@contextmanager
def watched() -> Iterator[tuple[list[frozenset[str]], set[torch.dtype]]]:
    """The names of what each backward pass exchanges, and the types in which it travels."""
    begin, seen, types = StoredShards.begin, [], set()

    def note(self: StoredShards, *args: Any) -> Exchange | None:
        exchange = begin(self, *args)
        seen.append(frozenset() if exchange is None else exchange.names)
        types.update([] if exchange is None else [b.parts[0].sent for b in exchange._buckets])
        return exchange

    with mock.patch.object(StoredShards, "begin", note):
        yield seen, types


def step(net: nn.Module, made: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """One logical batch of some physical ones."""
    module, optimizer, criterion = made
    device = torch.get_default_device()
    norms = []
    with watched() as (exchanged, types), Collectives() as seen:
        for place, (x, y) in enumerate(batches):
            optimizer.signal_skip_step(place < len(batches) - 1)
            criterion(module(x.to(device)), y.to(device)).backward()
            norms.append(module.per_sample_gradient_norms)
            optimizer.step()
            if place < len(batches) - 1:
                optimizer.zero_grad()
    grads = {n: p.grad.full_tensor() for n, p in net.named_parameters() if p.requires_grad}
    return {
        "grads": grads,
        "norms": torch.cat(norms),
        "from_parameters": module.get_norm_sample(),
        "exchanged": exchanged,
        "sent": types,
        "collectives": seen.names,
        "plan": module.explain(),
    }


def one_step(
    rank: int,
    rows: Sequence[Sequence[int]],
    sizes: Sequence[int] = EVEN,
    *,
    nan: int | None = None,
    parts: int = 1,
    mesh: tuple[int, ...] | None = None,
    policy: MixedPrecisionPolicy | None = None,
    choice: str = "always",
    **kwargs: Any,
) -> dict[str, Any]:
    """A step in which rank r has the samples ``rows[r]``, in ``parts`` physical batches."""
    inputs, targets = data(sizes)
    if nan is not None:
        inputs[nan, 1, 0] = float("nan")
    wrapping: dict[str, Any] = {"mp_policy": policy} if policy is not None else {}
    if mesh is not None:
        wrapping["mesh"] = init_device_mesh(
            torch.get_default_device().type, mesh, mesh_dim_names=("replicate", "shard")
        )
    net = FSDP2Wrapper(build(sizes).to(torch.get_default_device()), **wrapping)
    own = torch.tensor(rows[rank], dtype=torch.long, device="cpu").tensor_split(parts)
    made = private(net, choice, **kwargs)
    return step(net, made, [(inputs[part], targets[part]) for part in own])


def problem(rank: int, name: str, deferred: bool) -> dict[str, Any]:
    net = FSDP2Wrapper(problems.build(name).to(torch.get_default_device()))
    with torch.device("cpu"):
        inputs, targets = problems.PROBLEMS[name].batch(6)
    made = private(
        net, criterion=problems.criterion(name, "sum"), loss_reduction="sum", deferred_norm=deferred
    )
    rows = slice(0, 2) if rank == 0 else slice(2, 6)
    return step(net, made, [(inputs[rows], targets[rows])])


# --- what the ranks run: many cases in one set of processes ---


def two_ranks(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}

    def run(key: Any, function: Any, *args: Any, **kwargs: Any) -> None:
        progress(key)
        results[key] = function(rank, *args, **kwargs)

    for split, rows in SPLITS[2].items():
        for sizes in (UNEVEN, EVEN):
            run((split, sizes, False), one_step, rows, sizes)
    several = SPLITS[2]["several"]
    run(("several", UNEVEN, True), one_step, several, UNEVEN, deferred_norm=True)
    run("nan", one_step, several, nan=1)
    run("nan alone", one_step, SPLITS[2]["one"], nan=3)
    run("accumulated", one_step, SPLITS[2]["uneven"], parts=3)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run("bf16", one_step, several, policy=bf16)
    run("bf16, not exchanged", one_step, several, policy=bf16, choice="off")
    run("not exchanged", one_step, several, choice="off")
    run("per layer", one_step, several, clipping="per_layer", max_grad_norm=[0.1] * 12)
    for name in PROBLEMS:
        run(name, problem, name, False)
    run(("language", True), problem, "language", True)
    run("some", differing_wishes)
    run("budget", differing_budgets)
    run("small buckets", small_buckets, several, UNEVEN)
    run("one each", small_buckets, SPLITS[2]["one"], EVEN)
    run("poisoned", small_buckets, SPLITS[2]["uneven"], UNEVEN)
    run("failed", fails_once)
    run("replicated", replicated)
    run("poisson", poisson)
    for split in ranks_differ.SPLITS:
        run(("branch", split), branch, split)
    if torch.get_default_device().type == "cuda":
        run("unwatched", host_waits_for_nothing)
    return results


def four_ranks(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for split, rows in SPLITS[4].items():
        for sizes in (UNEVEN, EVEN):
            for mesh in (None, (2, 2)):
                progress((split, sizes, mesh))
                results[split, sizes, mesh] = one_step(rank, rows, sizes, mesh=mesh)
    results["nan"] = one_step(rank, SPLITS[4]["uneven"], nan=2, mesh=(2, 2))
    return results


def differing_wishes(rank: int) -> dict[str, Any]:
    """Rank 1 would rather not exchange the head, rank 0 nothing of the first block."""
    refused = ("blocks.0.up", "blocks.0.norm") if rank == 0 else ("head",)
    wish = mock.patch.object(Planner, "prefers_exchange", lambda self, name: name not in refused)
    with wish:
        return one_step(rank, SPLITS[2]["several"], choice="auto")


def differing_budgets(rank: int) -> dict[str, Any]:
    """Rank 1 has room for the head of 3 samples, and no more."""
    net = FSDP2Wrapper(build(EVEN).to(torch.get_default_device()))
    made = private(net)
    made[0].held_budget = 1 << 20 if rank == 0 else 3 * (8 * 4 + 4) * 4
    inputs, targets = data(EVEN)
    rows = SPLITS[2]["several"][rank]
    return step(net, made, [(inputs[rows], targets[rows])])


def small_buckets(rank: int, rows: Any, sizes: tuple[int, ...]) -> dict[str, Any]:
    """One layer a bucket; counts how many are on their way at once. New memory is NaN."""
    flying, start, new = [], Exchange._start, Exchange._new

    def note(self: Exchange, bucket: Any) -> None:
        start(self, bucket)
        flying.append(len(self._flying))

    with (
        mock.patch.object(exchanges, "BUCKET_ELEMENTS", 1),
        mock.patch.object(exchanges, "SMALL_ELEMENTS", 0),
        mock.patch.object(Exchange, "_start", note),
        mock.patch.object(Exchange, "_new", lambda *args: new(*args).fill_(float("nan"))),
    ):
        result = one_step(rank, rows, sizes)
    return {**result, "flying": flying}


def fails_once(rank: int) -> dict[str, Any] | str:
    """The third exchange of a step fails on all ranks; another step follows, or what refuses it."""
    net = FSDP2Wrapper(build(UNEVEN).to(torch.get_default_device()))
    made, start, calls = private(net), Exchange._start, []
    inputs, targets = data(UNEVEN)
    rows = SPLITS[2]["several"][rank]

    def fail(self: Exchange, bucket: Any) -> None:
        calls.append(bucket)
        if len(calls) == 3:
            raise MemoryError("no room")
        start(self, bucket)

    with (
        mock.patch.object(exchanges, "BUCKET_ELEMENTS", 1),
        mock.patch.object(exchanges, "SMALL_ELEMENTS", 0),
        mock.patch.object(Exchange, "_start", fail),
    ):
        with pytest.raises(MemoryError, match="no room"):
            step(net, made, [(inputs[rows], targets[rows])])
        assert all(p.grad is None for p in net.parameters())
        if GOES_ON:
            return step(net, made, [(inputs[rows], targets[rows])])
        with pytest.raises(RuntimeError) as refused:
            step(net, made, [(inputs[rows], targets[rows])])
        return str(refused.value)


def host_waits_for_nothing(rank: int) -> bool:
    """Steps after the first, in which kernels are chosen, do not wait for the GPU."""
    net = FSDP2Wrapper(build(EVEN).to("cuda"))
    module, optimizer, criterion = private(net)
    rows = SPLITS[2]["several"][rank]
    x, y = (t[rows].to("cuda") for t in data(EVEN))
    for asked in (False, False, True):
        loss = criterion(module(x), y)
        torch.cuda.set_sync_debug_mode("error" if asked else "default")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
        optimizer.zero_grad()
    return True


def replicated(rank: int) -> tuple[str, str]:
    net = FSDP2Wrapper(build(EVEN).to(torch.get_default_device()))
    module, _, _ = private(net, "off", data_layout="replicated", data_loader=DataLoader(
        TensorDataset(torch.zeros(N, 1)), batch_size=4))  # fmt: skip
    try:
        module.stored_shards = "always"
    except ValueError as error:
        return module.stored_shards, str(error)
    return module.stored_shards, ""


def poisson(rank: int) -> dict[str, Any]:
    """Physical batches of Poisson samples, some of whose forward passes differ."""
    with mock.patch.dict(os.environ, OPACUS_STORED_SHARDS="always"), watched() as (exchanged, _):
        return {**ranks_differ.poisson(rank, "ghost_fsdp_bk", False), "exchanged": exchanged}


def branch(rank: int, split: str) -> dict[str, Any]:
    with mock.patch.dict(os.environ, OPACUS_STORED_SHARDS="always"), watched() as (exchanged, _):
        result = ranks_differ.one_step(rank, split, "blocks", "ghost_fsdp_bk", False)
    return {**result, "exchanged": exchanged}


@functools.cache
def results_of(world: int, backend: str = "gloo") -> list[dict[Any, Any]]:
    job = two_ranks if world == 2 else four_ranks
    return run_distributed(job, world, timeout=150, backend=backend)


# --- what is right ---


@functools.cache
def gradients(sizes: tuple[int, ...]) -> dict[str, Tensor]:
    return oracle.per_sample_gradients(build(sizes), _loss, data(sizes))


def _loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def check(
    ranks: Sequence[dict[str, Any]],
    grads: dict[str, Tensor],
    rows: Sequence[Sequence[int]],
    *,
    bad: Sequence[int] = (),
    tolerance: float = 1e-5,
) -> None:
    """Every rank has the clipped sum over all ranks' samples, and the norms of its own."""
    good = [row for own in rows for row in own if row not in bad]
    want = oracle.clipped_sum({n: g[good] for n, g in grads.items()}, CLIP)
    norms = oracle.norms(grads)
    for own, result in zip(rows, ranks, strict=True):
        for name, grad in result["grads"].items():
            assert _error(grad, want[name]) < tolerance, name
        finite = [place for place, row in enumerate(own) if row not in bad]
        got = result["norms"]
        assert len(got) == len(own) and len(finite) == int(got.isfinite().sum())
        assert oracle.relative_error(got[finite], norms[own][finite]) < tolerance
    assert len({tuple(result["collectives"]) for result in ranks}) == 1
    assert len({tuple(result["exchanged"]) for result in ranks}) == 1


def _error(got: Tensor, want: Tensor) -> float:
    if not want.any():  # no samples
        return float(got.abs().max())
    return oracle.relative_error(got, want)


def of_all(world: int, key: Any) -> list[Any]:
    return [result[key] for result in results_of(world)]


NAMES = {n for n, _ in build(EVEN).named_parameters()}


# --- tests ---


def test_some_samples_are_clipped_and_some_are_not() -> None:
    for sizes in (EVEN, UNEVEN):
        norms = oracle.norms(gradients(sizes))[:6]
        assert (norms > 1.05 * CLIP).any() and (norms < 0.95 * CLIP).any()


@pytest.mark.parametrize("sizes", [UNEVEN, EVEN])
@pytest.mark.parametrize("split", SPLITS[2])
def test_two_ranks(split: str, sizes: tuple[int, ...]) -> None:
    ranks = of_all(2, (split, sizes, False))
    check(ranks, gradients(sizes), SPLITS[2][split])
    assert ranks[0]["exchanged"] == [frozenset() if split == "nothing" else NAMES]


@pytest.mark.parametrize("mesh", [None, (2, 2)])
@pytest.mark.parametrize("sizes", [UNEVEN, EVEN])
@pytest.mark.parametrize("split", SPLITS[4])
def test_four_ranks(split: str, sizes: tuple[int, ...], mesh: Any) -> None:
    ranks = of_all(4, (split, sizes, mesh))
    check(ranks, gradients(sizes), SPLITS[4][split])
    assert ranks[0]["exchanged"] == [NAMES]


def test_deferred_norms() -> None:
    ranks = of_all(2, ("several", UNEVEN, True))
    check(ranks, gradients(UNEVEN), SPLITS[2]["several"])
    assert ranks[0]["exchanged"] == [NAMES]


@pytest.mark.parametrize("key,rows,bad", [
    ("nan", SPLITS[2]["several"], 1), ("nan alone", SPLITS[2]["one"], 3)])  # fmt: skip
def test_a_nan_sample_contributes_nothing_to_any_shard(key: str, rows: Any, bad: int) -> None:
    ranks = of_all(2, key)
    check(ranks, gradients(EVEN), rows, bad=[bad])
    assert ranks[0]["norms"].isnan().any() and ranks[0]["exchanged"] == [NAMES]


def test_a_nan_sample_with_replicas() -> None:
    check(of_all(4, "nan"), gradients(EVEN), SPLITS[4]["uneven"], bad=[2])


def test_physical_batches_add_up() -> None:
    ranks = of_all(2, "accumulated")  # one rank runs out of samples
    check(ranks, gradients(EVEN), SPLITS[2]["uneven"])
    assert ranks[0]["exchanged"] == [NAMES] * 3


def test_norms_by_parameter_are_whole() -> None:
    for result in of_all(2, ("several", UNEVEN, False)):
        assert oracle.relative_error(result["from_parameters"], result["norms"]) < 1e-6


def test_nothing_is_reduced_after_the_pass_and_exchanges_run_during_it() -> None:
    for split in ("one", "several", "uneven", "empty"):
        names = of_all(2, (split, EVEN, False))[0]["collectives"]
        sent = [i for i, name in enumerate(names) if name.startswith("alltoall")]
        assert not [name for name in names if "reduce_scatter" in name]
        # All small parameters travel together: an exchange, and the sum of all norms beside
        # what ranks say before the pass.
        assert len(sent) == 1
        assert sum(name.startswith("allreduce") for name in names) == 2
    other = of_all(2, "not exchanged")[0]["collectives"]
    assert [name for name in other if "reduce_scatter" in name]
    assert not [name for name in other if name.startswith(("alltoall", "allreduce"))]


@pytest.mark.parametrize("key,sizes,split", [
    ("small buckets", UNEVEN, "several"), ("one each", EVEN, "one"),
    ("poisoned", UNEVEN, "uneven")])  # fmt: skip
def test_nothing_is_sent_that_was_not_written(key: str, sizes: Any, split: str) -> None:
    check(of_all(2, key), gradients(sizes), SPLITS[2][split])


def test_buckets_start_during_the_pass_and_few_at_once() -> None:
    ranks = of_all(2, "small buckets")
    names = ranks[0]["collectives"]
    sent = [i for i, name in enumerate(names) if name.startswith("alltoall")]
    assert len(sent) == 7  # one a layer
    summed = next(i for i, name in enumerate(names) if i > sent[0] and name.startswith("allreduce"))
    gathered = [i for i, name in enumerate(names) if "allgather" in name]
    assert sent[-1] < summed
    # FSDP2 gathers the first block's parameters when the last layers are on their way.
    assert any(sent[0] < i < sent[-1] for i in gathered)
    assert max(ranks[0]["flying"]) == exchanges.IN_FLIGHT


def test_the_step_after_an_error_is_as_usual() -> None:
    check_after_an_error(of_all(2, "failed"))


def check_after_an_error(ranks: Sequence[Any]) -> None:
    if not GOES_ON:
        said = "a backward pass failed (MemoryError: no room), and FSDP2 of torch"
        assert all(refusal.startswith(said) for refusal in ranks)
        return
    check(ranks, gradients(UNEVEN), SPLITS[2]["several"])
    assert ranks[0]["exchanged"] == [NAMES]


def test_as_many_collectives_whatever_the_ranks_hold() -> None:
    for sizes in (UNEVEN, EVEN):
        seen = [
            of_all(2, (split, sizes, False))[0]["collectives"]
            for split in ("one", "several", "uneven", "empty")
        ]
        assert all(names == seen[0] for names in seen)


@pytest.mark.parametrize("name", [*PROBLEMS, ("language", True)])
def test_layers_of_all_kinds(name: Any) -> None:
    ranks = of_all(2, name)
    name = name if isinstance(name, str) else name[0]
    net = problems.build(name)
    with torch.device("cpu"):
        batch = problems.PROBLEMS[name].batch(6)
    loss = problems.criterion(name)
    grads = oracle.per_sample_gradients(
        copy.deepcopy(net), lambda model, one: loss(model(one[0]), one[1]), batch
    )
    check(ranks, grads, [[0, 1], [2, 3, 4, 5]])
    left_out = {
        "reused": {"layer.", "norm."},  # used twice
        "own_parameters": {"scale", "shift"},  # run again by the generic rule
        "transposed": {"0."},  # a user's sampler, which gets the layer
        "language_tied": {"tokens."},
    }.get(name, set())
    trainable = {n for n, p in net.named_parameters() if p.requires_grad}
    expected = {n for n in trainable if not n.startswith(tuple(left_out) or "-")}
    assert ranks[0]["exchanged"] == [frozenset(expected)]


def test_half_precision() -> None:
    ranks, apart = of_all(2, "bf16"), of_all(2, "bf16, not exchanged")
    check(ranks, gradients(EVEN), SPLITS[2]["several"], tolerance=3e-2)
    # Gradients are rounded to bf16 when they are formed, in both ways, and summed in fp32.
    for one, other in zip(ranks, apart, strict=True):
        assert oracle.relative_error(one["norms"], other["norms"]) < 1e-2
        for name, grad in one["grads"].items():
            assert grad.dtype == torch.float32
            assert not torch.equal(grad, grad.bfloat16().float()), name
    assert {dtype for result in ranks for dtype in result["sent"]} == {torch.bfloat16}


def test_ranks_agree_where_their_wishes_differ() -> None:
    ranks = of_all(2, "some")
    check(ranks, gradients(EVEN), SPLITS[2]["several"])
    out = ("blocks.0.up.", "blocks.0.norm.", "head.")
    assert ranks[0]["exchanged"] == [{n for n in NAMES if not n.startswith(out)}]


def test_the_smallest_memory_decides() -> None:
    ranks = of_all(2, "budget")
    check(ranks, gradients(EVEN), SPLITS[2]["several"])
    assert ranks[0]["exchanged"] == [{"head.weight", "head.bias"}]


def test_the_plan_says_so() -> None:
    lines = of_all(2, "budget")[0]["plan"].splitlines()[1:]
    exchanged = [line.split()[0] for line in lines if " exchange " in line]
    assert exchanged == ["head"] and len(lines) == 7


def test_other_ways_do_without() -> None:
    per_layer = of_all(2, "per layer")
    assert per_layer[0]["exchanged"] == [frozenset()]
    assert not [n for n in per_layer[0]["collectives"] if n.startswith("alltoall")]
    for choice, error in of_all(2, "replicated"):
        assert choice == "off" and "data_layout='sharded'" in error


@pytest.mark.parametrize("split", ranks_differ.SPLITS)
def test_a_branch_that_some_ranks_skip(split: str) -> None:
    ranks = of_all(2, ("branch", split))
    rows = [row for own in ranks_differ.SPLITS[split] for row in own]
    for result in ranks:
        ranks_differ.close(result["grads"], ranks_differ.clipped_sum(rows))
    assert ranks[0]["collectives"] == ranks[1]["collectives"]
    assert ranks[0]["exchanged"] == ranks[1]["exchanged"]
    assert bool(ranks[0]["exchanged"][0]) == (split in ("both", "neither"))


def test_poisson_batches() -> None:
    one, other = of_all(2, "poisson")
    assert one["exchanged"] == other["exchanged"]
    assert any(one["exchanged"]) and not all(one["exchanged"])
    assert one["collectives"] == other["collectives"]
    for a, b in zip(one["steps"], other["steps"], strict=True):
        want = ranks_differ.clipped_sum([*a["drawn"], *b["drawn"]])
        ranks_differ.close(a["grads"], {n: t / 3 for n, t in want.items()})


def test_the_planner_weighs_what_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefers(batch: int, link: Link | None, rates: Rates = FAST_MEMORY) -> bool:
        monkeypatch.setattr(planning, "rates_of", lambda device, dtype: rates)
        planner = Planner()
        planner.link = link
        assert not planner.prefers_exchange("head")  # nothing is known yet
        planner.start(None)
        planner.stores(record(batch, 64, 32, 48))
        planner.start(None)
        return planner.prefers_exchange("head")

    slow, fast = Link(2, 1e3), Link(2, 1e18)
    assert prefers(1, slow)  # it moves what the reduction would, but in time
    assert not prefers(8, slow)  # it moves eight times as much
    assert not prefers(1, None)
    slow_memory = Rates(multiply_adds=1e18, bytes=1e3)
    assert not prefers(1, fast, slow_memory)  # received gradients are one pass more
    assert prefers(0, slow)  # a rank without samples goes along


def part(name: str, elements: int, dtype: torch.dtype = torch.float32) -> Part:
    shards = Shards(None, None, 2, 0, elements // 2, dtype)  # type: ignore[arg-type]
    return Part(name, "weight", name, shards, True, dtype, dtype)


def test_buckets() -> None:
    large = exchanges.BUCKET_ELEMENTS
    sizes = {"a": large, "n": 64, "b": large // 2, "c": large // 2, "d": large // 2, "m": 32}
    buckets = exchanges._buckets([part(*item) for item in sizes.items()])
    names = [[p.name for p in bucket.parts] for bucket in buckets]
    assert names == [["a"], ["b", "c"], ["d"], ["n", "m"]]  # small ones last, together
    assert buckets[1].starts == [0, large // 4] and buckets[1].size == large // 2
    mixed = [part("x", 64), part("y", 64, torch.bfloat16)]
    assert len(exchanges._buckets(mixed)) == 2


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPACUS_STORED_SHARDS", raising=False)
    assert stored_shards_from_environment() == "off"
    monkeypatch.setenv("OPACUS_STORED_SHARDS", "auto")
    assert stored_shards_from_environment() == "auto"
    monkeypatch.setenv("OPACUS_STORED_SHARDS", "1")
    with pytest.raises(ValueError, match="one of off, auto, always, got '1'"):
        stored_shards_from_environment()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("split", SPLITS[2])
def test_two_gpus(split: str) -> None:
    ranks = [result[split, UNEVEN, False] for result in results_of(2, "nccl")]
    check(ranks, gradients(UNEVEN), SPLITS[2][split])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_after_an_error_on_gpus() -> None:
    check_after_an_error([result["failed"] for result in results_of(2, "nccl")])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_no_host_waits_for_its_gpu() -> None:
    assert [result["unwatched"] for result in results_of(2, "nccl")] == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_four_gpus(mesh: Any) -> None:
    ranks = [result["uneven", UNEVEN, mesh] for result in results_of(4, "nccl")]
    check(ranks, gradients(UNEVEN), SPLITS[4]["uneven"])


def test_no_group_is_left_here() -> None:
    assert not dist.is_initialized()
