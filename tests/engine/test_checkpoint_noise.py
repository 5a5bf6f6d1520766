"""A run that resumes from a one-file checkpoint draws no noise a second time."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
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
from opacus.core.ranks.parallelism import DataParallel
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import progress, run_distributed

pytestmark = pytest.mark.usefixtures("reproducible")

SEED = 5
NEW_SEED = "has a new seed from the operating system"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,)))


class Run:
    """A private run whose noise is seeded, by a generator of its own or the global one."""

    def __init__(
        self, module: nn.Module, mode: str, own: bool = True, secure: bool = False
    ) -> None:
        torch.manual_seed(SEED)
        self.engine = PrivacyEngine(accountant="rdp", secure_mode=secure)
        made: Any = self.engine.make_private(
            module=module,
            optimizer=torch.optim.Adam(module.parameters(), lr=0.05),
            data_loader=DataLoader(data(), batch_size=16, shuffle=secure),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            poisson_sampling=False,
            grad_sample_mode=mode,
            noise_generator=torch.Generator().manual_seed(SEED) if own else None,
        )
        self.module, self.optimizer = made[0], made[1]
        self.loss = made[2] if len(made) == 4 else nn.CrossEntropyLoss()

    def train(self, steps: int) -> list[Tensor]:
        """All noise that the steps had."""
        drawn, layout = [], self.optimizer._parallelism
        rows = slice(None)
        if layout.world_size > 1:
            rows = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
        x, y = TENSORS[0][rows], TENSORS[1][rows]
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(self.module(x), y).backward()
            sums = [p.grad.clone() for p in self.optimizer.params] if self.ghost else None
            self.optimizer.step()
            sums = sums or [p.summed_grad for p in self.optimizer.params]
            size = self.optimizer.expected_batch_size * layout.world_size
            for p, total in zip(self.optimizer.params, sums, strict=True):
                if isinstance(layout, DataParallel) and self.ghost:  # else it is summed
                    dist.all_reduce(total)
                drawn.append(whole(p.grad * size - total).flatten())
        return [torch.cat(drawn)] if drawn else []

    @property
    def ghost(self) -> bool:
        return not isinstance(self.loss, nn.CrossEntropyLoss)

    def save(self, path: Path | str) -> None:
        self.engine.save_checkpoint(path=path, module=self.module, optimizer=self.optimizer)

    def load(self, path: Path | str) -> dict[str, Any]:
        return self.engine.load_checkpoint(path=path, module=self.module, optimizer=self.optimizer)

    def weights(self) -> Tensor:
        return torch.cat([whole(p).detach().flatten() for p in self.optimizer.params])


TENSORS = data().tensors


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def repeats(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether any step's noise comes again; a chance of zero for independent noise."""
    close = torch.isclose(first[0].unsqueeze(0), second[0].unsqueeze(1), rtol=1e-3, atol=1e-5)
    return int(close.sum()) > len(first[0]) // 4


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global generator"])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_resumed_run_ends_like_an_uninterrupted_one(mode: str, own: bool, tmp_path: Path) -> None:
    uninterrupted = Run(model(), mode, own)
    first = uninterrupted.train(2)
    uninterrupted.save(tmp_path / "run.pt")
    rest = uninterrupted.train(2)
    resumed = Run(model(), mode, own)
    resumed.load(tmp_path / "run.pt")
    again = resumed.train(2)
    torch.testing.assert_close(again, rest)
    torch.testing.assert_close(resumed.weights(), uninterrupted.weights())
    assert not repeats(first, again)
    # The check can fail: without the checkpoint the seed gives the first noise again.
    assert repeats(first, Run(model(), mode, own).train(2))


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global generator"])
def test_a_file_without_a_state(own: bool, tmp_path: Path) -> None:
    """As Opacus 1.6.0 writes it."""
    run = Run(model(), "hooks", own)
    first = run.train(2)
    run.save(tmp_path / "run.pt")
    checkpoint = torch.load(tmp_path / "run.pt")
    del checkpoint["noise_generator"]
    torch.save(checkpoint, tmp_path / "old.pt")
    resumed = Run(model(), "hooks", own)
    with pytest.warns(UserWarning, match=rf"no state of this run's noise generator.*{NEW_SEED}"):
        resumed.load(tmp_path / "old.pt")
    assert not repeats(first, resumed.train(2))


def test_a_run_with_another_seed_goes_on_with_the_saved_key(tmp_path: Path) -> None:
    run = Run(model(), "hooks", own=True)
    first = run.train(1)
    run.save(tmp_path / "run.pt")
    rest = run.train(2)
    resumed = Run(model(), "hooks", own=False)
    resumed.load(tmp_path / "run.pt")
    again = resumed.train(2)
    torch.testing.assert_close(again, rest)
    assert not repeats(first, again)


def test_runs_without_a_seed_never_share_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds no key; two runs that go on from it have their own."""
    monkeypatch.setenv("OPACUS_REPRODUCIBLE", "0")
    run = Run(model(), "hooks", own=False)
    first = run.train(2)
    run.save(tmp_path / "run.pt")
    assert "secret" not in torch.load(tmp_path / "run.pt")["noise_generator"]
    runs = [run, *(Run(model(), "hooks", own=False) for _ in range(2))]
    for one in runs[1:]:
        assert one.load(tmp_path / "run.pt") and one.optimizer._parallelism.key.step == 2
    rest = [one.train(2) for one in runs]
    for a, b in itertools.combinations([first, *rest], 2):
        assert not repeats(a, b)


@pytest.mark.parametrize("made_private_first", [True, False])
def test_loading_the_model_alone_does_not_start_the_noise_again(
    made_private_first: bool, tmp_path: Path
) -> None:
    run = Run(model(), "hooks")
    first = run.train(2)
    run.engine.save_checkpoint(path=tmp_path / "model.pt", module=run.module)
    resumed = Run(model(), "hooks")
    if made_private_first:
        resumed.engine.load_checkpoint(path=tmp_path / "model.pt", module=resumed.module)
    else:
        engine = resumed.engine
        engine.load_checkpoint(path=tmp_path / "model.pt", module=model())
        optimizer = resumed.optimizer
        engine._prepare_noise(optimizer, resumed.module)
    assert resumed.optimizer._parallelism.key.step == 2
    assert not repeats(first, resumed.train(2))


def test_going_back_to_a_checkpoint_in_the_same_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(model(), "hooks")
    run.train(1)
    run.save(tmp_path / "run.pt")
    run.load(tmp_path / "run.pt")  # nothing has happened since: no warning
    assert "not counted any more" not in caplog.text
    given_up = run.train(2)
    with pytest.warns(UserWarning, match=rf"more steps than the checkpoint.*{NEW_SEED}"):
        run.load(tmp_path / "run.pt")
    assert "3 steps have been taken or loaded before, and the checkpoint counts 1" in caplog.text
    assert not repeats(given_up, run.train(2))


@pytest.mark.parametrize("model_first", [False, True])
def test_going_back_to_a_checkpoint_again(
    model_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first load sets the accountant back, which then tells of no further step."""
    run = Run(model(), "hooks")
    run.train(1)
    run.save(tmp_path / "run.pt")
    given_up = run.train(2)
    if model_first:
        run.engine.load_checkpoint(path=tmp_path / "run.pt", module=run.module)
    else:
        with pytest.warns(UserWarning, match=NEW_SEED):
            run.load(tmp_path / "run.pt")
    with pytest.warns(UserWarning, match=rf"more steps than the checkpoint.*{NEW_SEED}"):
        run.load(tmp_path / "run.pt")
    assert not repeats(given_up, run.train(2))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_batch_that_loading_interrupts_is_dropped(mode: str, tmp_path: Path) -> None:
    run = Run(model(), mode)
    run.optimizer.noise_multiplier = 0.0
    run.train(1)
    run.save(tmp_path / "run.pt")
    run.train(1)
    want = [p.grad.clone() for p in run.optimizer.params]
    with pytest.warns(UserWarning, match=NEW_SEED):
        run.load(tmp_path / "run.pt")
    run.optimizer.signal_skip_step(True)
    run.optimizer.zero_grad()
    run.loss(run.module(TENSORS[0]), TENSORS[1]).backward()
    run.optimizer.step()
    with pytest.warns(UserWarning, match=NEW_SEED):
        run.load(tmp_path / "run.pt")
    run.train(1)
    torch.testing.assert_close([p.grad for p in run.optimizer.params], want)


def test_nothing_is_said_where_no_noise_was_drawn(tmp_path: Path) -> None:
    run = Run(model(), "hooks")
    run.engine.save_checkpoint(path=tmp_path / "model.pt", module=run.module)
    run.load(tmp_path / "model.pt")
    secure = Run(model(), "hooks", own=False, secure=True)
    secure.train(1)
    secure.save(tmp_path / "secure.pt")
    assert "noise_generator" not in secure.load(tmp_path / "secure.pt")
    Run(model(), "hooks", own=False, secure=True).load(tmp_path / "secure.pt")


# --- several ranks ---


def distributed_run(mode: str) -> Run:
    if mode == "ghost_fsdp":
        return Run(FSDP2Wrapper(model()), mode)
    if mode == "hooks":  # DDP: noise is drawn on rank 0
        return Run(DPDDP(model()), mode)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return Run(parallelize_module(model(), mesh, plan), mode)


def resumed(rank: int, world_size: int, folder: str) -> dict[str, list[Tensor]]:
    """Noise before a checkpoint, after it, and after it when resumed; both ends."""
    results = {}
    for mode in ("hooks", "ghost_fsdp", "ghost_tp"):
        progress(mode)
        whole, again = distributed_run(mode), distributed_run(mode)
        # Tensor-parallel ranks hold different parts, so each has its own file.
        path = f"{folder}/{mode}{rank if mode == 'ghost_tp' else ''}.pt"
        first = whole.train(2)
        if mode != "hooks" or rank == 0:
            whole.save(path)
        dist.barrier()
        rest = whole.train(2)
        again.load(path)
        results[mode] = [*first, *rest, *again.train(2), whole.weights(), again.weights()]
    return results


def test_ranks_resume(tmp_path: Path) -> None:
    for of_rank in run_distributed(resumed, 2, str(tmp_path)):
        for first, rest, again, end, same_end in of_rank.values():
            torch.testing.assert_close(again, rest)
            torch.testing.assert_close(same_end, end)
            assert not repeats([first], [again])


def go_back(rank: int, world_size: int, folder: str) -> bool:
    run = distributed_run("ghost_fsdp")
    run.train(1)
    run.save(f"{folder}/run.pt")
    given_up = run.optimizer._parallelism.noise(1.0, run.optimizer.params[0]).full_tensor()
    run.train(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.load(f"{folder}/run.pt")
    assert [NEW_SEED in str(w.message) for w in said] == [True] * (rank == 0)
    again = run.optimizer._parallelism.noise(1.0, run.optimizer.params[0]).full_tensor()
    return bool(torch.isclose(given_up, again).any())


def test_sharded_ranks_that_go_back(tmp_path: Path) -> None:
    assert run_distributed(go_back, 2, str(tmp_path)) == [False, False]
