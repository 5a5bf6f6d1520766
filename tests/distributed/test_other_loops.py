"""Lightning's FSDP2 strategy, accelerate and torch.distributed.checkpoint on two ranks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import preload, progress, run_distributed
from tests.helpers.oracle import clipped_sum, norms, per_sample_gradients
from tests.integrations.on_ranks import become_rank, whole

preload("pytorch_lightning", "accelerate")

SAMPLES, BATCH, C, LR = 12, 6, 0.05, 0.5
LOSS = nn.CrossEntropyLoss()


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (SAMPLES,), generator=draw))


def make_private(model: nn.Module, optimizer: Any, mode: str, **changes: Any) -> Any:
    """Engine, model, optimizer, criterion and loader, without noise and with all samples clipped."""
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=optimizer, criterion=LOSS, max_grad_norm=C, noise_multiplier=0.0,
        data_loader=DataLoader(data(), batch_size=BATCH), grad_sample_mode=mode,
        poisson_sampling=False, **changes,
    )  # fmt: skip
    return engine, *made[:2], made[2] if len(made) == 4 else LOSS, made[-1]


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=LR)


def error(batches: list[tuple[Tensor, Tensor]], after: dict[str, Tensor]) -> tuple[float, float]:
    """Largest difference between the first step and the oracle's; smallest norm.

    Args:
        batches: What this rank has seen, one batch a step.
        after: The parameters after that step.
    """
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, batches[0])
    assert not torch.equal(of_ranks[0][0], of_ranks[1][0])  # each its own samples
    x, y = (torch.cat(part) for part in zip(*of_ranks, strict=True))
    rows = per_sample_gradients(model_of(), lambda m, one: LOSS(m(one[0]), one[1]), (x, y))
    before = dict(model_of().named_parameters())
    wrong = 0.0
    for name, total in clipped_sum(rows, C).items():
        moved = (before[name].detach() - after[name.split("_module.")[-1]]) / LR
        wrong = max(wrong, float((moved - total / BATCH).abs().max()))
    return wrong, float(norms(rows).min())


# --- Lightning ---


def lightning_fsdp2(order: str) -> dict[str, Any]:
    """Shards in ``configure_model``; makes private there too, or in ``configure_optimizers``."""
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import ModelParallelStrategy

    class Private(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module = model_of()
            self.seen: list[Any] = []

        def configure_model(self) -> None:
            FSDP2Wrapper(self.net, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            made = make_private(self.net, sgd(self.net), "ghost_fsdp_bk")
            self.engine, self.private, self.optimizer, self.criterion, self.loader = made
            return self.optimizer

        def training_step(self, batch: Any, index: int) -> Tensor:
            self.seen.append(batch)
            return self.criterion(self.private(batch[0]), batch[1])

        def train_dataloader(self) -> Any:
            return self.loader

    class Late(Private):
        """Sharded after it was made private."""

        def __init__(self) -> None:
            super().__init__()
            super().configure_optimizers()

        def configure_optimizers(self) -> Any:
            return self.optimizer

    module = (Private if order == "right" else Late)()
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module)
    wrong, norm = error(module.seen, whole(module.net))
    kind = type(module.optimizer).__name__
    return {"wrong": wrong, "norm": norm, "steps": len(module.engine.accountant), "kind": kind}


# --- accelerate ---


def accelerate_ranks(first: bool, after: str, mode: str) -> dict[str, Any]:
    """Prepares the model before ``make_private``, or one of its results ``after`` it, or both."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any = accelerator.prepare(model_of()) if first else model_of()
    engine, private, optimizer, criterion, loader = make_private(model, sgd(model), mode)
    if "model" in after:
        private = accelerator.prepare(private)
    if "optimizer" in after:
        optimizer = accelerator.prepare(optimizer)
    if "loader" in after:
        loader = accelerator.prepare(loader)
    batch = next(iter(loader))
    optimizer.zero_grad()
    accelerator.backward(criterion(private(batch[0]), batch[1]))
    optimizer.step()
    now = {n.split("module.")[-1]: p for n, p in whole(model).items()}
    wrong, norm = error([batch], now)
    return {"wrong": wrong, "norm": norm, "steps": len(engine.accountant)}


def accelerate_fsdp2(mode: str) -> dict[str, Any]:
    """Sharded by accelerate, as ``prepare`` does on GPUs, then made private."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    own = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", is_main_process=True,
        device=accelerator.device,
    )  # fmt: skip
    model = fsdp2_prepare_model(own, model_of())
    engine, private, optimizer, criterion, loader = make_private(model, sgd(model), mode)
    batch = next(iter(loader))
    accelerator.backward(criterion(private(batch[0]), batch[1]))
    optimizer.step()
    wrong, norm = error([batch], whole(model))
    return {"wrong": wrong, "norm": norm, "steps": len(engine.accountant)}


# --- torch.distributed.checkpoint ---


def state_dicts(mode: str, whose: str) -> dict[str, Any]:
    """Two steps, saved, loaded into a fresh run, two more; and four without a stop."""
    from torch.distributed.checkpoint import state_dict as dcp

    rank = dist.get_rank()
    x, y = (t[rank::2] for t in data().tensors)

    def fresh(steps: int) -> Any:
        model = FSDP2Wrapper(model_of())
        adamw = torch.optim.AdamW(model.parameters(), lr=0.05)
        engine, private, optimizer, criterion, _ = make_private(
            model, adamw, mode, expected_batch_size=SAMPLES
        )
        train(private, optimizer, criterion, steps)
        return engine, model, private, optimizer, criterion

    def train(private: Any, optimizer: Any, criterion: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            criterion(private(x), y).backward()
            optimizer.step()

    _, straight, *_ = fresh(4)
    _, saved, private, optimizer, _ = fresh(2)
    states = dcp.get_state_dict(private if whose == "wrapper" else saved, optimizer)
    states = copy.deepcopy(states)
    engine, model, private, optimizer, criterion = fresh(0)
    dcp.set_state_dict(
        private if whose == "wrapper" else model, optimizer,
        model_state_dict=states[0], optim_state_dict=states[1],
    )  # fmt: skip
    counted = len(engine.accountant)  # loading is no step
    start, stop = whole(model), whole(saved)
    train(private, optimizer, criterion, 2)
    full = dcp.get_model_state_dict(
        private if whose == "wrapper" else model, options=dcp.StateDictOptions(full_state_dict=True)
    )
    plain = model_of()
    plain.load_state_dict({n.removeprefix("_module."): t for n, t in full.items()})
    plain.requires_grad_(False)
    own, want = whole(model), whole(straight)
    return {
        "counted": counted, "loaded": all(torch.equal(start[n], stop[n]) for n in stop),
        "wrong": max(float((own[n] - want[n]).abs().max()) for n in want),
        "exported": max(float((p - own[n]).abs().max()) for n, p in plain.named_parameters()),
        "moved": max(float((own[n] - p).abs().max()) for n, p in model_of().state_dict().items()),
    }  # fmt: skip


# --- all in one group of processes ---

CASES: dict[str, Any] = {
    **{f"lightning, {order}": (lightning_fsdp2, order) for order in ("right", "late")},
    **{
        f"accelerate, {first}, {after}, {mode}": (accelerate_ranks, first, after, mode)
        for mode in ("hooks", "ghost_bk")
        for first, after in ((True, ""), (True, "optimizer"), (True, "loader"), (True, "model"),
                             (False, "model, optimizer"))
    },
    "accelerate's FSDP2, ghost_fsdp_bk": (accelerate_fsdp2, "ghost_fsdp_bk"),
    **{
        f"state dicts, {mode}, {whose}": (state_dicts, mode, whose)
        for mode, whose in (("ghost_fsdp", "inner"), ("ghost_fsdp_bk", "wrapper"))
    },
}  # fmt: skip
# Why a combination is refused; all others are right.
SHARDED_LATE = "not sharded by FSDP2: shard the whole model first"
WRAPPED_LATE = "put no wrapper around the private model"


def job(rank: int, world_size: int) -> dict[str, Any]:
    become_rank(rank, world_size)
    found: dict[str, Any] = {}
    for name, (function, *arguments) in CASES.items():
        progress(name)
        try:
            found[name] = function(*arguments)
        except (RuntimeError, ValueError) as refused:
            found[name] = str(refused)
        dist.barrier()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs, not ours
def test_orders_of_two_ranks_are_right_or_refused() -> None:
    for module in ("pytorch_lightning", "accelerate"):
        pytest.importorskip(module)
    for found in run_distributed(job, 2):
        assert found.keys() == CASES.keys()
        for name, got in found.items():
            refused = {"lightning, late": SHARDED_LATE}.get(name)
            if name.startswith("accelerate, False"):
                refused = WRAPPED_LATE
            if refused is not None:
                assert refused in str(got), name
            elif name.startswith("state dicts"):
                assert isinstance(got, dict), (name, got)
                assert got["counted"] == got["wrong"] == got["exported"] == 0, name
                assert got["loaded"] and got["moved"] > 0.1, name
            else:
                assert isinstance(got, dict), (name, got)
                assert got["norm"] > C and got["steps"] == 1, name
                assert got["wrong"] < 1e-12, name
        assert "FSDP" in found["lightning, right"]["kind"]
