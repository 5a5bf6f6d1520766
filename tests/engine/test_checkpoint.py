"""Checkpoints: what they hold, where they load, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.schedulers import StepNoise
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import run_distributed


def model(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))


def private(mode: str, module: nn.Module, seed: int = 5) -> tuple[PrivacyEngine, Any, Any, Any]:
    engine = PrivacyEngine(accountant="rdp")
    out = engine.make_private(
        module=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=0.05),
        data_loader=DataLoader(data(), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
        grad_sample_mode=mode,
        noise_generator=torch.Generator().manual_seed(seed),
    )
    return engine, out[0], out[1], out[2] if len(out) == 4 else nn.CrossEntropyLoss()


def steps(run: tuple[PrivacyEngine, Any, Any, Any], number: int, first: int = 0) -> None:
    """So many steps on eight samples, ``first`` and those after it."""
    _, module, optimizer, loss_fn = run
    inputs, targets = data()[first : first + 8]
    for _ in range(number):
        optimizer.zero_grad()
        loss_fn(module(inputs), targets).backward()
        optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_round_trip(mode: str, tmp_path: Path) -> None:
    first = private(mode, model())
    steps(first, 3)
    path = tmp_path / "run.pt"
    first[0].save_checkpoint(path=path, module=first[1], optimizer=first[2])
    second = private(mode, model())
    second[0].load_checkpoint(path=path, module=second[1], optimizer=second[2])
    assert second[0].get_epsilon(1e-5) == first[0].get_epsilon(1e-5)
    for a, b in zip(first[1].parameters(), second[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert second[2].state_dict()["state"].keys() == first[2].state_dict()["state"].keys()
    assert list(tmp_path.iterdir()) == [path]  # nothing unfinished is left


def test_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    first = private("hooks", model())
    steps(first, 2)
    first[0].save_checkpoint(path=tmp_path / "run.pt", module=first[1], optimizer=first[2])
    other = private("hooks", model(width=5))
    before = [p.clone() for p in other[1].parameters()]
    with pytest.raises(ValueError, match=r"run\.pt is a checkpoint of another model.*0\.weight"):
        other[0].load_checkpoint(path=tmp_path / "run.pt", module=other[1], optimizer=other[2])
    for a, b in zip(before, other[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert len(other[0].accountant) == 0


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(1)}, tmp_path / "x.pt")
    run = private("hooks", model())
    with pytest.raises(ValueError, match="not a checkpoint"):
        run[0].load_checkpoint(path=tmp_path / "x.pt", module=run[1])
    with pytest.raises(ValueError, match="the buffer cannot be read as a checkpoint"):
        run[0].load_checkpoint(path=io.BytesIO(b"hello"), module=run[1])


def test_another_optimizer_is_refused() -> None:
    run, buffer, other = private("hooks", model()), io.BytesIO(), model()
    steps(run, 1)
    run[0].save_checkpoint(path=buffer, module=run[1], optimizer=run[2])
    buffer.seek(0)
    engine = PrivacyEngine(accountant="rdp")
    wrapped, optimizer, _ = engine.make_private(
        module=other,
        optimizer=torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(data(), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
    )
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(ValueError, match=r"another optimizer, with .*'betas'.*'momentum'.* of SGD"):
        engine.load_checkpoint(path=buffer, module=wrapped, optimizer=optimizer)
    assert len(engine.accountant) == 0 and not optimizer.state
    assert all(map(torch.equal, other.parameters(), before))


def test_a_plain_optimizer_is_refused() -> None:
    run, buffer, plain = private("hooks", model()), io.BytesIO(), model()
    run[0].save_checkpoint(path=buffer, module=run[1], optimizer=run[2])
    buffer.seek(0)
    other: Any = torch.optim.SGD(plain.parameters())
    with pytest.raises(ValueError, match="must be the one that make_private returned, got SGD"):
        PrivacyEngine(accountant="rdp").load_checkpoint(path=buffer, module=plain, optimizer=other)


def save_sharded(rank: int, world_size: int, folder: str) -> tuple[list[Tensor], bytes]:
    run = private("ghost_fsdp", FSDP2Wrapper(model()))
    steps(run, 2, 8 * rank)
    run[0].save_checkpoint(path=f"{folder}/run.pt", module=run[1], optimizer=run[2])
    buffer = io.BytesIO()
    run[0].save_checkpoint(path=buffer, module=run[1], optimizer=run[2])
    steps(run, 2, 8 * rank)
    return [p.full_tensor() for p in run[1].parameters()], buffer.getvalue()


def resume_sharded(rank: int, world_size: int, folder: str) -> tuple[list[Tensor], int]:
    run = private("ghost_fsdp", FSDP2Wrapper(model(8 - 4)), seed=99)
    run[0].load_checkpoint(path=f"{folder}/run.pt", module=run[1], optimizer=run[2])
    steps(run, 2, 8 * rank)
    return [p.full_tensor() for p in run[1].parameters()], len(run[0].accountant)


def test_sharded_run_resumes_to_the_same_end_and_loads_elsewhere(tmp_path: Path) -> None:
    ends = run_distributed(save_sharded, 2, str(tmp_path))
    resumed = run_distributed(resume_sharded, 2, str(tmp_path))
    for a, b in zip(ends[0][0], resumed[0][0], strict=True):
        torch.testing.assert_close(a, b)  # model, optimizer and noise streams went on
    assert resumed[0][1] == 4
    # Another number of ranks, with noise streams of its own.
    assert run_distributed(resume_sharded, 3, str(tmp_path))[0][1] == 4
    # A plain model, from the file and from a buffer of either rank.
    plain = private("hooks", model())
    plain[0].load_checkpoint(path=tmp_path / "run.pt", module=plain[1], optimizer=plain[2])
    for buffer in (ends[0][1], ends[1][1]):
        again = private("hooks", model())
        again[0].load_checkpoint(path=io.BytesIO(buffer), module=again[1], optimizer=again[2])
        for a, b in zip(plain[1].parameters(), again[1].parameters(), strict=True):
            torch.testing.assert_close(a, b)
    assert plain[0].get_epsilon(1e-5) > 0


def test_a_changed_mechanism_is_said(tmp_path: Path) -> None:
    """The engine's arguments hold, not the file; schedules go on from them."""
    first = private("hooks", model())
    noise = StepNoise(first[2], step_size=1, gamma=0.5)
    noise.step()
    first[0].save_checkpoint(
        path=tmp_path / "run.pt", module=first[1], optimizer=first[2], noise_scheduler=noise
    )

    def resume(**changed: float) -> Any:
        run = private("hooks", model())
        for name, value in changed.items():
            setattr(run[2], name, value)
        run[0].load_checkpoint(
            path=tmp_path / "run.pt",
            module=run[1],
            optimizer=run[2],
            noise_scheduler=StepNoise(run[2], step_size=1, gamma=0.7),
        )
        return run[2]

    assert resume().noise_multiplier == 0.5  # no warning
    with pytest.warns(UserWarning, match=r"noise_multiplier = 0\.5 \(now 2\.0\)"):
        assert resume(noise_multiplier=4.0).noise_multiplier == 2.0
    with pytest.warns(UserWarning, match=r"max_grad_norm = 0\.5 \(now 0\.25\)"):
        assert resume(max_grad_norm=0.25).max_grad_norm == 0.25


def test_a_scheduler_on_one_side_is_said(tmp_path: Path) -> None:
    run = private("hooks", model())
    engine, path, parts = run[0], tmp_path / "run.pt", {"module": run[1], "optimizer": run[2]}
    noise = StepNoise(run[2], step_size=1, gamma=0.5)
    engine.save_checkpoint(path=path, noise_scheduler=noise, **parts)
    with pytest.warns(UserWarning, match="holds a noise_scheduler, which .* was not given"):
        engine.load_checkpoint(path=path, **parts)
    engine.save_checkpoint(path=path, **parts)
    with pytest.warns(UserWarning, match="holds no noise_scheduler, which .* starts anew"):
        engine.load_checkpoint(path=path, noise_scheduler=noise, **parts)


def test_an_optimizer_without_a_saved_state_is_said(tmp_path: Path) -> None:
    run = private("hooks", model())
    steps(run, 1)
    run[0].save_checkpoint(path=tmp_path / "run.pt", module=run[1])
    new_seed = pytest.warns(UserWarning, match="no state of this run's noise generator")
    with new_seed, pytest.warns(UserWarning, match="holds no optimizer, which .* starts anew"):
        run[0].load_checkpoint(path=tmp_path / "run.pt", module=run[1], optimizer=run[2])


class Counted(nn.Linear):
    """A layer with a state that is no tensor."""

    runs = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"runs": self.runs}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.runs = state["runs"]


def test_a_state_that_is_no_tensor(tmp_path: Path) -> None:
    run, again = (private("hooks", nn.Sequential(Counted(6, 3))) for _ in range(2))
    run[1]._module[0].runs = 7
    run[0].save_checkpoint(path=tmp_path / "run.pt", module=run[1], optimizer=run[2])
    again[0].load_checkpoint(path=tmp_path / "run.pt", module=again[1], optimizer=again[2])
    assert again[1]._module[0].runs == 7


def first_noise(rank: int, world_size: int, folder: str, load: str, save: str) -> Tensor:
    """The first noise that a resumed run draws, of all shards together."""
    run = private("ghost_fsdp", FSDP2Wrapper(model()))
    if load:
        run[0].load_checkpoint(path=f"{folder}/{load}", module=run[1], optimizer=run[2])
    steps(run, 1, 8 * rank)  # one more than the run before has counted
    run[0].save_checkpoint(path=f"{folder}/{save}", module=run[1], optimizer=run[2])
    reference = next(iter(run[2].params))
    zeros = torch.zeros_like(reference)
    (noise,) = run[2]._parallelism.noised(1.0, [zeros], [zeros.dtype])
    return noise.full_tensor()


@pytest.mark.usefixtures("reproducible")
def test_noise_never_starts_again_when_the_number_of_ranks_comes_back(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = run_distributed(first_noise, 2, folder, "", "a.pt")[0]
    other = run_distributed(first_noise, 3, folder, "a.pt", "b.pt")[0]
    back = run_distributed(first_noise, 2, folder, "b.pt", "c.pt")[0]
    again = run_distributed(first_noise, 2, folder, "", "d.pt")[0]
    assert torch.equal(first, again)  # the generators are seeded
    for noise in (other, back):
        assert not torch.isclose(noise, first).any()
    assert not torch.isclose(back, other).any()
