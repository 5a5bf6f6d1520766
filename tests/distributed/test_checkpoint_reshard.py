"""Sharded checkpoints: the same trajectory on as many ranks, the same epsilon on any number."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.checkpoints import sharded
from opacus.core.kernels.noise.draw import Draw
from opacus.core.privacy import noise as noise_module
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.distributed_checkpoint import Checkpointer, latest_checkpoint, read_extra
from opacus.schedulers import StepNoise
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import DistributedTestError, run_distributed

SAMPLES, BATCH, EPOCHS = 40, 8, 2
STEPS = SAMPLES // BATCH
DELTA = 1e-3


pytestmark = pytest.mark.usefixtures("reproducible")


class Run:
    """A small private run: dropout, AdamW with weight decay, Poisson sampling, noise."""

    def __init__(
        self,
        folder: str | Path,
        *,
        seed: int = 1,
        mode: str = "ghost_fsdp",
        poisson: bool = True,
        layout: str = "auto",
        workers: int = 0,
        physical: int | None = None,
        width: int = 9,
        noise_seed: int | None = None,
        keep: int = 99,
    ) -> None:
        torch.manual_seed(seed)
        self.physical = physical
        self.device = torch.get_default_device()
        model: nn.Module = nn.Sequential(
            nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 3)
        )
        if "fsdp" in mode:
            model = FSDP2Wrapper(model)
        elif dist.is_initialized() and dist.get_world_size() > 1:
            model = DifferentiallyPrivateDistributedDataParallel(model)
        self.engine = PrivacyEngine(accountant="rdp")
        generator = None if noise_seed is None else torch.Generator().manual_seed(noise_seed)
        data = torch.Generator("cpu").manual_seed(9)
        samples = torch.randn(SAMPLES, 6, generator=data, device="cpu")
        made = self.engine.make_private(
            module=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1),
            data_loader=DataLoader(
                TensorDataset(samples, (samples[:, 0] > 0).long()),
                BATCH,
                shuffle=not poisson,
                num_workers=workers,
            ),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            poisson_sampling=poisson,
            grad_sample_mode=mode,
            data_layout=layout,
            noise_generator=generator,
        )
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
        self.rate = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.noise_rate = StepNoise(self.optimizer, step_size=1, gamma=0.9)
        self.checkpoints = Checkpointer(
            folder,
            engine=self.engine,
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self.loader,
            schedulers={"rate": self.rate, "noise": self.noise_rate},
            keep=keep,
        )
        self.seen: list[list[float]] = []

    def train(self, start: int = 0, stop: int | None = None, every: int | None = 1) -> None:
        for _ in range(start, EPOCHS):
            if self._epoch(stop, every):
                return
            self.rate.step()
            self.noise_rate.step()
            if every:
                self.checkpoints.save(epoch_ended=True, extra={"note": "end"})

    def _epoch(self, stop: int | None, every: int | None) -> bool:
        if self.physical is None:
            return self._pass(self.loader, stop, every)
        with BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=self.physical, optimizer=self.optimizer
        ) as loader:
            return self._pass(loader, stop, every)

    def _pass(self, loader: Any, stop: int | None, every: int | None) -> bool:
        for inputs, targets in loader:
            self.seen.append(sorted(inputs[:, 0].tolist()))
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            self.optimizer.zero_grad()
            self.criterion(self.model(inputs), targets).backward()
            self.optimizer.step()
            if every:
                self.checkpoints.save_every(every, extra={"step": self.checkpoints.step})
            if self.checkpoints.step == stop:
                return True
        return False

    def weights(self) -> list[Tensor]:
        return [
            (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for p in self.model.parameters()
        ]

    def end(self) -> dict[str, Any]:
        return {
            "weights": self.weights(),
            "history": list(self.engine.accountant.history),
            "epsilon": self.engine.get_epsilon(DELTA),
            "rate": self.optimizer.param_groups[0]["lr"],
            "seen": self.seen,
        }


def assert_same_end(first: dict[str, Any], second: dict[str, Any]) -> None:
    for a, b in zip(first["weights"], second["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for name in ("history", "epsilon", "rate"):
        assert first[name] == second[name], name
    assert first["seen"][-len(second["seen"]) :] == second["seen"] or not second["seen"]


# --- as many ranks: the same trajectory ---

VARIANTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "physical batches": {"physical": 2},
    "workers": {"workers": 1, "noise_seed": 3},
    "shuffled": {"poisson": False},
    "replicated": {"layout": "replicated"},
    "DDP": {"mode": "ghost"},
    "DDP, per-sample gradients": {"mode": "hooks", "physical": 3},
}
# In the middle of an epoch, after its last step, after it, and in the next one.
KILLED_AFTER = ("step-00000003", "step-00000005", "step-00000005-end", "step-00000007")


def uninterrupted_and_resumed(
    rank: int, world_size: int, folder: str, names: list[str]
) -> dict[str, list[dict[str, Any]]]:
    ends: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        whole = Run(f"{folder}/{name}", **VARIANTS[name])
        assert whole.checkpoints.load().path is None
        whole.train()
        ends[name] = [whole.end()]
        for at in KILLED_AFTER if name in ("sharded", "one") else KILLED_AFTER[:1]:
            # Nothing that the new process starts with is like what it had before.
            other = {"seed": 77, **({"noise_seed": 5} if "noise_seed" in VARIANTS[name] else {})}
            run = Run(f"{folder}/{name}-{at}", **{**VARIANTS[name], **other})
            progress = run.checkpoints.load(f"{folder}/{name}/{at}")
            run.train(progress.epoch, every=None)
            ends[name].append(run.end())
    return ends


def check_ends(ends: dict[str, list[dict[str, Any]]]) -> None:
    for whole, *resumed in ends.values():
        assert len(whole["seen"]) > len(resumed[0]["seen"])
        for end in resumed:
            assert_same_end(whole, end)


@pytest.mark.parametrize(
    "names",
    [
        ["sharded", "physical batches", "replicated"],
        pytest.param(list(VARIANTS)[2:4], marks=pytest.mark.slow),
        pytest.param(list(VARIANTS)[5:], marks=pytest.mark.slow),
    ],
    ids=["FSDP2", "loaders", "DDP"],
)
def test_a_killed_run_ends_like_an_uninterrupted_one(names: list[str], tmp_path: Path) -> None:
    ends = run_distributed(uninterrupted_and_resumed, 2, str(tmp_path), names)
    for of_rank in ends:
        check_ends(of_rank)
    assert ends[0][names[0]][0]["seen"] != ends[1][names[0]][0]["seen"]


@pytest.mark.parametrize(
    "options",
    [{"mode": "hooks"}, {"mode": "ghost", "physical": 3}, {"mode": "ghost", "workers": 2}],
    ids=["hooks", "ghost", "workers"],
)
def test_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    VARIANTS["one"] = options
    check_ends(uninterrupted_and_resumed(0, 1, str(tmp_path), ["one"]))


def test_what_is_restored_matters(tmp_path: Path) -> None:
    """Without the position, or without the random state, the end is another one."""
    whole = Run(tmp_path / "a", mode="ghost")
    whole.train()
    for part in ("_position", "_random"):
        run = Run(tmp_path / "b", mode="ghost", seed=77)
        if part == "_position":
            run.checkpoints._position = None
        else:
            run.checkpoints._random.restore = lambda *args: None  # type: ignore[method-assign]
        run.checkpoints.load(tmp_path / "a" / "step-00000003")
        run.train(every=None, stop=2 * STEPS)
        with pytest.raises(AssertionError):
            assert_same_end(whole.end(), run.end())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_two_gpus(tmp_path: Path) -> None:
    names = ["sharded", "physical batches", "shuffled", "DDP"]
    for of_rank in run_distributed(
        uninterrupted_and_resumed, 2, str(tmp_path), names, backend="nccl"
    ):
        check_ends(of_rank)


def test_a_clipping_norm_that_training_moves_is_restored(tmp_path: Path) -> None:
    def adaptive(folder: str, start: float) -> tuple[Any, ...]:
        torch.manual_seed(1)
        model = nn.Linear(6, 3)
        engine = PrivacyEngineAdaptiveClipping(accountant="rdp")
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(
                TensorDataset(torch.randn(SAMPLES, 6), torch.arange(SAMPLES) % 3), BATCH
            ),
            noise_multiplier=0.3,
            max_grad_norm=start,
            grad_sample_mode="ghost",
            target_unclipped_quantile=0.9,
            min_clipbound=0.01,
            max_clipbound=10.0,
            clipbound_learning_rate=0.5,
        )
        model, optimizer, _, loader = made
        checkpoints = Checkpointer(
            tmp_path / folder, engine=engine, module=model, optimizer=optimizer, data_loader=loader
        )
        return (*made, checkpoints)

    model, optimizer, criterion, loader, checkpoints = adaptive("a", 0.1)
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
    checkpoints.save(epoch_ended=True)
    assert optimizer.max_grad_norm != 0.1
    _, other, _, _, again = adaptive("b", 0.1)
    assert again.load(tmp_path / "a" / "step-00000005-end").epoch == 1
    assert other.max_grad_norm == optimizer.max_grad_norm


# --- another number of ranks: the same epsilon, and nothing drawn twice ---


ADD_GAUSSIAN = noise_module.add_gaussian


def spy_on_noise() -> list[float]:
    """Some of the standard normal variates that this rank draws from now on."""
    seen: list[float] = []

    def spy(std: float, draws: list[Draw], step: int, *how: Any) -> None:
        for draw in draws[:2]:
            alone = torch.zeros(draw.region.size)
            ADD_GAUSSIAN(1.0, [draw._replace(source=alone, target=alone)], step, *how)
            seen.extend(alone[:8].tolist())
        ADD_GAUSSIAN(std, draws, step, *how)

    noise_module.add_gaussian = spy
    return seen


def leg(
    rank: int, world_size: int, folder: str, stop: int | None, copies: int
) -> list[dict[str, Any]]:
    """Go on in the folder until a step; the last time for real, before in copies of it."""
    ends = []
    for copy in range(copies):
        place = folder if copy == copies - 1 else f"{folder}-{world_size}-{copy}"
        if rank == 0 and place != folder and Path(folder).exists():
            shutil.copytree(folder, place)
        dist.barrier()
        noise = spy_on_noise()
        run = Run(place, noise_seed=3)
        progress = run.checkpoints.load()
        loaded = {
            "at": run.weights(),
            "moments": moments(run),
            "loaded": list(run.engine.accountant.history),
        }
        run.train(progress.epoch, stop)
        ends.append({**run.end(), **loaded, "noise": noise, "moments after": moments(run)})
    return ends


def moments(run: Run) -> list[Tensor]:
    states = run.optimizer.original_optimizer.state
    return [s["exp_avg"].full_tensor().clone() for s in states.values() if "exp_avg" in s]


@pytest.mark.slow
def test_resharded_runs_keep_epsilon_and_repeat_nothing(tmp_path: Path) -> None:
    """2 -> 4 -> 2 -> 1 ranks, always in the middle of an epoch."""
    folder = str(tmp_path / "run")
    whole = run_distributed(leg, 2, str(tmp_path / "whole"), None, 1)[0][0]
    legs = [
        run_distributed(leg, world, folder, stop, copies)
        for world, stop, copies in ((2, 3, 1), (4, 6, 2), (2, 8, 1), (1, None, 1))
    ]
    for before, after in itertools.pairwise(legs):
        first, second = before[0][-1], after[0][-1]
        assert second["loaded"] == first["history"]
        for name, known in (("at", "weights"), ("moments", "moments after")):
            for a, b in zip(first[known], second[name], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
    # As many steps, so the same epsilon as without interruption.
    assert legs[-1][0][-1]["history"] == whole["history"]
    assert legs[-1][0][-1]["epsilon"] == whole["epsilon"]
    # Two attempts to go on from one checkpoint draw the same.
    for once, again in legs[1]:
        assert once["noise"] == again["noise"] and once["seen"] == again["seen"]
    # All other noise differs, on all ranks, and from that of every leg.
    drawn = [value for of_leg in legs for of_rank in of_leg for value in of_rank[-1]["noise"]]
    assert len(set(drawn)) == len(drawn) > 100
    # The ranks draw their own samples: no person comes twice in a step.
    for of_leg in legs:
        for step in zip(*(of_rank[-1]["seen"] for of_rank in of_leg), strict=True):
            together = [sample for of_rank in step for sample in of_rank]
            assert len(set(together)) == len(together)


def reload_twice(rank: int, world_size: int, folder: str) -> list[list[list[float]]]:
    """What is seen of an epoch without repetition, before and after a change of ranks."""
    run = Run(folder, poisson=False)
    progress = run.checkpoints.load()
    run.train(progress.epoch, STEPS if progress.step else 2)
    return run.seen


def test_an_epoch_without_repetition_goes_on_where_it_was(tmp_path: Path) -> None:
    seen: list[float] = []
    for world in (2, 3):
        for of_rank in run_distributed(reload_twice, world, str(tmp_path)):
            seen += [sample for batch in of_rank for sample in batch]
    assert len(seen) == len(set(seen)) == SAMPLES


# --- what is refused, and what a kill leaves behind ---


def refusals(rank: int, world_size: int, folder: str) -> list[str]:
    base = Path(folder, "run")
    run = Run(base)
    run.train(stop=2)
    messages = []

    def refused(name: str, harm: Any, **options: Any) -> None:
        broken = Path(folder, name)
        if rank == 0:
            shutil.copytree(base / "step-00000002", broken / "step-00000002")
            harm(broken / "step-00000002")
        dist.barrier()
        other = Run(broken, seed=4, **options)
        before = other.weights()
        try:
            other.checkpoints.load(broken / "step-00000002")
        except ValueError as error:
            messages.append(str(error))
        for a, b in zip(before, other.weights(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert len(other.engine.accountant) == 0

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    def other_format(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))

    refused("flipped", lambda path: flip(path / "__1_0.distcp"))
    refused("flipped random state", lambda path: flip(path / "rank-1.pt"))
    refused("gone", lambda path: (path / "__0_0.distcp").unlink())
    refused("cut", lambda path: (path / "manifest.json").write_text("{"))
    refused("unsealed", lambda path: (path / "manifest.json").unlink())
    refused("format", other_format)
    refused("model", lambda path: None, width=8)
    refused("nothing", shutil.rmtree)
    try:  # A second run does not mix its checkpoints into the folder.
        Run(base).train(stop=1)
    except ValueError as error:
        messages.append(str(error))
    return messages


REFUSALS = (
    "__1_0.distcp is not what was written",
    "rank-1.pt is not what was written",
    "__0_0.distcp is missing",
    "manifest.json cannot be read",
    "not a complete checkpoint",
    "format 99",
    "another model",
    "not a complete checkpoint",
    "call load() first",
)


def test_damaged_and_foreign_checkpoints_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for messages in run_distributed(refusals, 2, str(tmp_path)):
        assert len(messages) == len(REFUSALS)
        for message, expected in zip(messages, REFUSALS, strict=True):
            assert expected in message


def killed_while_saving(rank: int, world_size: int, folder: str) -> None:
    run = Run(folder)
    run.checkpoints.load()
    run.train(stop=2)
    if rank == 1:

        def kill(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        sharded.save_tensors = kill
    run.train(stop=3)


def complete(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    run = Run(folder, seed=8, keep=3)
    progress = run.checkpoints.load()
    assert progress.step in (0, 2)
    run.train(progress.epoch)
    return run.end()


def test_a_kill_while_saving_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(DistributedTestError, match="rank 1 died with exit code -9"):
        run_distributed(killed_while_saving, 2, str(folder))
    assert list(folder.glob(".unfinished-step-00000003-*"))
    latest = latest_checkpoint(folder)
    assert latest is not None and latest.name == "step-00000002"
    assert read_extra(folder) == {"step": 2}
    ends = run_distributed(complete, 2, str(folder))
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000009",
        "step-00000010",
        "step-00000010-end",
    ]
    assert ends[0]["history"][-1][2] + ends[0]["history"][0][2] == 2 * STEPS


def test_saving_within_a_logical_batch(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", mode="ghost", physical=1)
    inputs, targets = next(iter(DataLoader(run.loader.dataset, 4)))
    run.optimizer.signal_skip_step()
    run.criterion(run.model(inputs), targets).backward()
    run.optimizer.step()
    assert run.checkpoints.step == 0
    assert run.checkpoints.save_every(1) is None
    with pytest.raises(RuntimeError, match="logical batch is under way"):
        run.checkpoints.save()
    assert latest_checkpoint(tmp_path / "run") is None


def test_arguments(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", mode="ghost")
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        run.checkpoints.save_every(0)
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Run(tmp_path / "run", mode="ghost", keep=0)
    first = run.checkpoints.save()
    assert run.checkpoints.save() == first  # not written again
    other = Checkpointer(
        tmp_path / "run", engine=run.engine, module=run.model, optimizer=run.optimizer
    )
    with pytest.raises(ValueError, match=r"schedulers named \['noise', 'rate'\]"):
        other.load()
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        read_extra(tmp_path)
