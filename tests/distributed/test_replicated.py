"""The same samples on all ranks: one process' numbers, with a share of the work each."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from opacus import PrivacyEngine
from opacus.core.sums.strategy import Phase
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers import oracle
from tests.helpers.distributed import attempt, run_distributed
from tests.helpers.sharded import full

B, CLIP, STEPS = 6, 1.0, 2
# Of Poisson batches of 2, whose key is the operating system's: all nine of three passes are equal
# in one of 3e9 runs, the three of one pass in one of 729.
PASSES = 3
WAYS = [("ghost_fsdp", False), ("ghost_fsdp", True), ("ghost_fsdp_bk", True)]


class Net(nn.Module):
    """Layers with and without a rule of their own, one used twice, two that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.twice = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.PReLU(7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.twice.weight
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twice(self.stem(x)))
        x = self.tied(self.norm(self.twice(x)))
        return self.head(self.scale(x.transpose(1, 2)).mean(2))


class Data(Dataset[Any]):
    """Samples with their index."""

    def __init__(self) -> None:
        with torch.device("cpu"):
            torch.manual_seed(2)
            self.inputs = torch.randn(B, 4, 5) * torch.linspace(0.3, 2, B).view(B, 1, 1)
            self.targets = torch.randint(0, 3, (B,))

    def __len__(self) -> int:
        return B

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], int(index)


def build() -> Net:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return Net()


def sharded(mesh: Any = None) -> nn.Module:
    net = build().to(torch.get_default_device())
    return FSDP2Wrapper(net) if mesh is None else FSDP2Wrapper(net, mesh=mesh)


def make_private(net: nn.Module, mode: str, **kwargs: Any) -> Any:
    engine = kwargs.pop("engine", None) or PrivacyEngine()
    arguments = {
        "module": net,
        "optimizer": torch.optim.AdamW(net.parameters(), lr=0.02),
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": DataLoader(Data(), batch_size=B),
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "poisson_sampling": False,
        "grad_sample_mode": mode,
        "data_layout": "replicated",
    }
    return engine.make_private(**{**arguments, **kwargs})


def run_all(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for mode, deferred in WAYS:
        results["train", mode, deferred] = attempt(train, mode, deferred, None)
        results["poisson", mode, deferred] = attempt(poisson, rank, mode, deferred)
    if world_size == 4:
        mesh = init_device_mesh(_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
        results["hsdp"] = attempt(train, "ghost_fsdp", True, mesh)
        results["hsdp_bk"] = attempt(train, "ghost_fsdp_bk", False, mesh)
        results["tensor_parallel"] = attempt(tensor_parallel, rank)
    results["noise"] = attempt(noise)
    for data_layout in ("replicated", "auto"):
        results["shuffled", data_layout] = attempt(shuffled, rank, data_layout)
    for name, contradiction in CONTRADICTIONS.items():
        results[name] = attempt(message_of, contradiction, rank)
    results["order"] = attempt(dataset_order, rank, world_size)
    return results


def _type() -> str:
    return torch.get_default_device().type


def train(mode: str, deferred: bool, mesh: Any) -> dict[str, Any]:
    """A few steps on the same batch; which layers this rank worked on, and what came out."""
    net = sharded(mesh)
    module, optimizer, criterion, loader = make_private(net, mode, deferred_norm=deferred)
    worked = _watch(module)
    result: dict[str, Any] = {}
    for _ in range(STEPS):
        for x, y, index in loader:
            optimizer.zero_grad()
            criterion(module(_here(x)), _here(y)).backward()
            result.setdefault("norms", module.per_sample_gradient_norms)
            backwards = module.gather_norm_samples("dataset", index.flip(0))
            assert torch.equal(backwards, module.per_sample_gradient_norms.flip(0))
            assert torch.equal(module.gather_norm_samples(), module.per_sample_gradient_norms)
            result.setdefault("each", module.stem.weight._norm_sample)
            optimizer.step()
            result.setdefault("grads", _grads(net))
    result["parameters"] = {n: full(p.detach()) for n, p in net.named_parameters()}
    return {**result, "worked": worked}


def _watch(module: Any) -> set[str]:
    """The layers whose records reach the strategy."""
    worked: set[str] = set()
    receive = module._strategy.receive

    def watching(record: Any) -> None:
        if module._strategy.phase is not Phase.IDLE:
            worked.add(record.spec.name)
        receive(record)

    module._strategy.receive = watching
    return worked


def poisson(rank: int, mode: str, deferred: bool) -> dict[str, Any]:
    """Poisson batches drawn alike on all ranks whatever their seeds, in physical ones of 2."""
    torch.manual_seed(rank + 3)
    engine = PrivacyEngine(accountant="rdp")
    net = sharded()
    module, optimizer, criterion, loader = make_private(
        net, mode, deferred_norm=deferred, poisson_sampling=True,
        data_loader=DataLoader(Data(), batch_size=2), noise_multiplier=1e-9, engine=engine,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
    )  # fmt: skip
    steps, drawn = [], []
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as physical:
        for x, y, index in (batch for _ in range(PASSES) for batch in physical):
            drawn += index.tolist()
            criterion(module(_here(x)), _here(y)).backward()
            optimizer.step()
            if not optimizer._is_last_step_skipped:
                steps.append((drawn, _grads(net)))
                drawn = []
            optimizer.zero_grad()
    return {"steps": steps, "history": [tuple(e) for e in engine.accountant.history]}


def noise() -> Tensor:
    """Gradient of a step that is all noise."""
    torch.manual_seed(0)
    net = FSDP2Wrapper(nn.Linear(64, 64, bias=False).to(torch.get_default_device()))
    data = TensorDataset(torch.zeros(4, 64), torch.zeros(4, 64))
    module, optimizer, criterion, loader = make_private(
        net, "ghost_fsdp", noise_multiplier=2.0, criterion=nn.MSELoss(), max_grad_norm=1e-3,
        data_loader=DataLoader(data, batch_size=4),
    )  # fmt: skip
    for x, y in loader:
        criterion(module(_here(x)), _here(y)).backward()
        optimizer.step()
    return _grads(net)["weight"]


def shuffled(rank: int, data_layout: str) -> list[int]:
    """The order in which ranks with different seeds see a loader that shuffles."""
    torch.manual_seed(rank)
    loader = DataLoader(Data(), batch_size=2, shuffle=True)
    *_, private = make_private(sharded(), "ghost_fsdp", data_loader=loader, data_layout=data_layout)
    return [i for _ in range(2) for *_, index in private for i in index.tolist()]


def tensor_parallel(rank: int) -> dict[str, Any]:
    """On a (data, tensor) mesh: layers are dealt over the first axis, Poisson draws follow it."""
    mesh = init_device_mesh(_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(_type())
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    plain = {n: p.detach().clone() for n, p in net.named_parameters()}
    parallelize_module(net, mesh["tp"], {"2": ColwiseParallel(output_layouts=_replicate())})
    net = FSDP2Wrapper(net, mesh=mesh["dp"])
    inputs, targets = _here(Data().inputs[:, 0]), _here(Data().targets)
    result: dict[str, Any] = {"plain": plain}
    module, optimizer, criterion, _ = make_private(net, "ghost_fsdp")
    criterion(module(inputs), targets).backward()
    optimizer.step()
    result["norms"] = module.per_sample_gradient_norms
    result["grads"] = _grads(net)
    result["gathered"] = len(module.gather_norm_samples())
    module.cleanup()
    torch.manual_seed(rank)
    module, optimizer, criterion, loader = make_private(
        net, "ghost_fsdp", poisson_sampling=True, data_layout="auto"
    )
    result["drawn"] = [list(batch) for batch in loader.batch_sampler]
    for rows in (range(2), range(2, 5)):  # different on the two data ranks
        own = list(rows)[mesh.get_local_rank(0) :: 2]
        optimizer.zero_grad()
        criterion(module(inputs[own]), targets[own]).backward()
        optimizer.step()
    result["sharded"] = module.gather_norm_samples()
    return result


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


# --- contradictions: name -> what is tried, returning nothing ---


def same_batch_declared_sharded(rank: int) -> None:
    module, _, criterion, _ = make_private(sharded(), "ghost_fsdp", data_layout="sharded")
    criterion(module(_here(Data().inputs)), _here(Data().targets)).backward()


def other_batch_declared_replicated(rank: int) -> None:
    module, _, criterion, _ = make_private(sharded(), "ghost_fsdp")
    inputs, targets = _here(Data().inputs), _here(Data().targets)
    criterion(module(inputs), targets).backward()  # the same, to begin with
    criterion(module(inputs[rank:]), targets[rank:]).backward()


def dealing_sampler_declared_replicated(rank: int) -> None:
    loader = DataLoader(Data(), batch_size=2, sampler=DistributedSampler(Data()))
    make_private(sharded(), "ghost_fsdp", data_loader=loader)


def unknown_layout(rank: int) -> None:
    make_private(sharded(), "ghost_fsdp", data_layout="both")


CONTRADICTIONS = {
    "same_batch_declared_sharded": same_batch_declared_sharded,
    "other_batch_declared_replicated": other_batch_declared_replicated,
    "dealing_sampler_declared_replicated": dealing_sampler_declared_replicated,
    "unknown_layout": unknown_layout,
}
MESSAGES = {
    "same_batch_declared_sharded": "data_layout='sharded', but .* ranks got the same batch",
    "other_batch_declared_replicated": "data_layout='replicated', but ranks got different",
    "dealing_sampler_declared_replicated": "gives each rank its own samples",
    "unknown_layout": "data_layout must be one of",
}


def message_of(function: Callable[[int], None], rank: int) -> tuple[str, str]:
    try:
        function(rank)
    except ValueError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def dataset_order(rank: int, world_size: int) -> dict[str, Tensor]:
    """Sharded data, dealt out unevenly, one rank empty: norms in both orders."""
    module, _, criterion, _ = make_private(sharded(), "ghost_fsdp", data_layout="sharded")
    rows = [] if rank == 1 else [5 - i for i in range(rank, B, world_size)]
    inputs, targets = _here(Data().inputs[rows]), _here(Data().targets[rows])
    criterion(module(inputs), targets).backward()
    return {
        "rows": torch.tensor(rows),
        "rank": module.gather_norm_samples(),
        "dataset": module.gather_norm_samples(order="dataset", indices=rows),
    }


def _here(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_device())


def _grads(net: nn.Module) -> dict[str, Tensor]:
    return {n: full(p.grad).clone() for n, p in net.named_parameters()}


# --- what is right ---


@functools.cache
def results_of(world_size: int, backend: str = "gloo") -> list[dict[Any, Any]]:
    return run_distributed(run_all, world_size, backend=backend)


def of(world_size: int, key: Any) -> list[Any]:
    found = [results[key] for results in results_of(world_size)]
    for result in found:
        assert not (isinstance(result, str) and "Traceback" in result), result
    return found


def _loss(net: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(net(one[0]), one[1])


@functools.cache
def gradients() -> dict[str, Tensor]:
    return oracle.per_sample_gradients(build(), _loss, (Data().inputs, Data().targets))


@functools.cache
def expected_parameters() -> dict[str, Tensor]:
    net = build().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for _ in range(STEPS):
        grads = oracle.per_sample_gradients(net, _loss, (Data().inputs, Data().targets))
        total = oracle.clipped_sum(grads, CLIP)
        for name, parameter in net.named_parameters():
            parameter.grad = total[name] / B
        optimizer.step()
    return {n: p.detach() for n, p in net.named_parameters()}


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    scale = max(w.abs().max().item() for w in want.values())
    for name, tensor in got.items():
        assert (tensor.double() - want[name]).abs().max() <= tolerance * scale + 1e-8, name


def test_some_samples_are_clipped() -> None:
    norms = oracle.norms(gradients())
    assert (norms > 1.01 * CLIP).any() and (norms < 0.99 * CLIP).any()


KEYS = [(2, ("train", *way)) for way in WAYS] + [(4, ("train", *way)) for way in WAYS]


@pytest.mark.parametrize("world_size,key", [*KEYS, (4, "hsdp"), (4, "hsdp_bk")])
def test_equals_one_process_with_a_share_of_the_work(world_size: int, key: Any) -> None:
    norms = oracle.norms(gradients())
    mean = {n: t / B for n, t in oracle.clipped_sum(gradients(), CLIP).items()}
    worked: list[str] = []
    for got in of(world_size, key):
        assert oracle.relative_error(got["norms"], norms) <= 1e-5
        each = gradients()["stem.weight"].flatten(1).norm(dim=1)
        assert oracle.relative_error(got["each"], each) <= 1e-5
        close(got["grads"], mean)
        close(got["parameters"], expected_parameters(), 2e-4)
        worked += got["worked"]
    layers = {"stem", "twice", "norm", "scale", "tied", "head"}
    assert set(worked) == layers and len(worked) == len(layers)  # each on one rank


@pytest.mark.parametrize("mode,deferred", WAYS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_poisson_sampling_of_one_copy(world_size: int, mode: str, deferred: bool) -> None:
    results = of(world_size, ("poisson", mode, deferred))
    drawn = [[rows for rows, _ in result["steps"]] for result in results]
    assert all(rows == drawn[0] for rows in drawn) and len({tuple(r) for r in drawn[0]}) > 1
    for result in results:
        for rows, grads in result["steps"]:
            total = oracle.clipped_sum({n: g[rows] for n, g in gradients().items()}, CLIP)
            close(grads, {n: t / 2 for n, t in total.items()})
        assert result["history"] == [(1e-9, pytest.approx(2 / B), 3 * PASSES)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_noise_has_the_scale_of_one_copy(world_size: int) -> None:
    results = of(world_size, "noise")
    for grad in results:
        torch.testing.assert_close(grad, results[0])
        # 4096 draws: seven standard errors.
        assert grad.std().item() == pytest.approx(2.0 * 1e-3 / 4, rel=0.08)
    parts = results[0].chunk(world_size)
    # Two of so many numbers in fp32 are equal by chance in one of ten runs.
    assert torch.isin(parts[0], parts[1]).double().mean() < 0.01


def test_a_loader_that_shuffles_gives_all_ranks_the_same_order() -> None:
    orders = of(2, ("shuffled", "replicated"))
    assert orders[0] == orders[1] and sorted(orders[0][:B]) == list(range(B))
    assert orders[0][:B] != orders[0][B:]


def test_an_ordinary_loader_is_dealt_out_by_default() -> None:
    one, other = of(2, ("shuffled", "auto"))
    assert sorted(one[: B // 2] + other[: B // 2]) == list(range(B))


def test_norms_in_dataset_order() -> None:
    norms = oracle.norms(gradients())
    results = of(4, "order")
    rows = torch.cat([result["rows"] for result in results]).long()
    assert rows.tolist() == [5, 1, 3, 2]  # rank 1 is empty
    for result in results:
        torch.testing.assert_close(result["rank"].double(), norms[rows], rtol=1e-5, atol=0)
        torch.testing.assert_close(
            result["dataset"].double(), norms[[1, 2, 3, 5]], rtol=1e-5, atol=0
        )


def test_tensor_parallel_ranks_share_samples() -> None:
    results = of(4, "tensor_parallel")  # mesh [[0, 1], [2, 3]]
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    net.load_state_dict(results[0]["plain"])
    grads = oracle.per_sample_gradients(net, _loss, (Data().inputs[:, 0], Data().targets))
    norms = oracle.norms(grads)
    for result in results:
        assert oracle.relative_error(result["norms"], norms) <= 1e-5
        close(result["grads"], {n: t / B for n, t in oracle.clipped_sum(grads, CLIP).items()})
        assert result["gathered"] == B
        assert len(result["sharded"]) == 3  # of two data ranks, not of four ranks
    drawn = [result["drawn"] for result in results]
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3]
    assert not {i for b in drawn[0] for i in b} & {i for b in drawn[2] for i in b}


@pytest.mark.parametrize("name", CONTRADICTIONS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_contradiction_is_an_error_on_all_ranks(world_size: int, name: str) -> None:
    for kind, message in of(world_size, name):
        assert kind == "ValueError" and re.search(MESSAGES[name], message), message


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode,deferred", WAYS)
def test_two_gpus(mode: str, deferred: bool) -> None:
    mean = {n: t / B for n, t in oracle.clipped_sum(gradients(), CLIP).items()}
    for results in results_of(2, "nccl"):
        got = results["train", mode, deferred]
        assert not isinstance(got, str), got
        assert oracle.relative_error(got["norms"], oracle.norms(gradients())) <= 1e-5
        close(got["grads"], mean)


def test_the_worked_example_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "fsdp.md").read_text()
    rank_0 = torch.tensor([[1, 2, 3, 4, 5, 6], [0.5, 1, 1.5, 2, 2.5, 3]])
    rank_1 = torch.tensor([[2, 1, 4, 2, 3, 1], [1, 0.5, 2, 1, 1.5, 0.5]])
    parts = [part.square().sum(1) for part in (rank_0, rank_1)]
    norms = torch.cat([rank_0, rank_1], dim=1).norm(dim=1)
    torch.testing.assert_close((parts[0] + parts[1]).sqrt(), norms)
    quoted = [*parts[0], *parts[1], *(parts[0] + parts[1]), *norms]
    for value in quoted:
        assert f"**{round(value.item(), 3):g}**" in text, value
    alone = torch.cat(parts).sqrt().tolist()
    assert "{:.3f}, {:.3f}, {:.3f} and {:.3f}".format(*alone) in text
    assert f"{6 / norms[0]:.4f}" in text and f"= {alone[0] + alone[2]:.3f} is" in text
