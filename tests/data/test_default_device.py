"""Whatever torch's default device and dtype are: the same samples, and the same step.

After ``torch.set_default_device("cuda")`` what is drawn without a device lies on the GPU, with a
generator on the CPU not at all. On a machine without one, "meta" tells the same faults.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.checkpoints.positions import LoaderPosition
from opacus.core.ranks.parallelism import Single
from opacus.core.step.adaptive import private_fraction
from opacus.data_loader import DPDataLoader, switch_generator
from opacus.utils import uniform_sampler
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    SystemGenerator,
    UniformWithReplacementSampler,
    poisson_draw,
)

N = 40
DTYPES = [torch.float64, torch.bfloat16, torch.float16]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(N, 5, generator=draw, dtype=torch.float32, device="cpu")
    return TensorDataset(features, torch.arange(N, device="cpu") % 3)


class Skips:
    def signal_skip_step(self, do_skip: bool = True) -> None:
        pass

    def reset_accumulation(self) -> None:
        pass


# --- what draws samples ---


def poisson(monkeypatch: pytest.MonkeyPatch) -> Any:
    sampler = UniformWithReplacementSampler(num_samples=N, sample_rate=0.3, generator=seeded())
    return list(sampler)


def poisson_of_the_global_generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(5)
    return list(UniformWithReplacementSampler(num_samples=N, sample_rate=0.3))


def low_rate(monkeypatch: pytest.MonkeyPatch) -> Any:
    return poisson_draw(2**16, 2.0**-13, seeded()).tolist()


def of_the_system(monkeypatch: pytest.MonkeyPatch) -> Any:
    drawn = poisson_draw(2**13, 0.5, SystemGenerator())
    assert drawn.device.type == "cpu" and drawn.dtype == torch.int64
    return 3600 < len(drawn) < 4600


def of_a_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    torch.manual_seed(5)
    drawn = []
    for generator in (None, seeded()):
        sampler = DistributedUniformWithReplacementSampler(
            total_size=N, sample_rate=0.3, generator=generator
        )
        drawn.append([[int(i) for i in batch] for batch in sampler])
    return drawn


def loader(workers: int) -> Callable[[pytest.MonkeyPatch], Any]:
    def batches(monkeypatch: pytest.MonkeyPatch) -> Any:
        made = DPDataLoader(data(), sample_rate=0.3, generator=seeded(), num_workers=workers)
        return [x.tolist() for x, _ in made]

    return batches


def loader_of_the_global_generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(5)
    return [y.tolist() for _, y in DPDataLoader(data(), sample_rate=0.3)]


def shuffled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As make_private has it in ``secure_mode``, and where ranks share an order."""
    plain = DataLoader(data(), batch_size=7, shuffle=True)
    made = switch_generator(data_loader=plain, generator=seeded())
    return [y.tolist() for _, y in made]


def physical_batches(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = DPDataLoader(data(), sample_rate=0.3, generator=seeded())
    manager = BatchMemoryManager(
        data_loader=made,
        max_physical_batch_size=4,
        optimizer=Skips(),  # type: ignore[arg-type]
    )
    with manager as physical:
        return [y.tolist() for _, y in physical]


def position(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(5)
    made = DPDataLoader(data(), sample_rate=0.3)
    followed = LoaderPosition(made, None)
    first = [y.tolist() for _, y in made]
    followed.count(1)
    assert followed.resume(followed.state(), True, lambda: None)
    assert [y.tolist() for _, y in made] == first[1:]
    return first


DRAWS = [
    poisson, poisson_of_the_global_generator, low_rate, of_the_system, of_a_rank, loader(0),
    loader(1), loader_of_the_global_generator, shuffled, physical_batches, position,
]  # fmt: skip


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("draw", DRAWS)
def test_samples_do_not_depend_on_the_default_device(
    draw: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = draw(monkeypatch)
    with torch.device("meta"):
        assert torch.empty(1).device.type == "meta"
        assert draw(monkeypatch) == usual
        assert torch.empty(1).device.type == "meta"  # it is as it was


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("draw", DRAWS)
def test_samples_do_not_depend_on_the_default_dtype(
    draw: Callable[[pytest.MonkeyPatch], Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = draw(monkeypatch)
    with default_dtype(dtype):
        assert draw(monkeypatch) == usual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rate", [0.001, 0.3, 1 - 2.0**-20])
def test_coins_are_never_tossed_in_half_precision(
    rate: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the grid of bf16 there are 2^8 outcomes: 0.001 would be 0 or 1/256."""
    uniforms, types = uniform_sampler.Coins.uniforms, [torch.float64]

    def noted(self: uniform_sampler.Coins, start: int, end: int) -> Tensor:
        drawn = uniforms(self, start, end)
        types.append(drawn.dtype)
        return drawn

    monkeypatch.setattr(uniform_sampler.Coins, "uniforms", noted)
    with default_dtype(dtype):
        chosen = poisson_draw(2**20, rate, seeded())
        few = poisson_draw(2**20, 2.0**-14, seeded())  # by gaps
    assert set(types) == {torch.float64} and len(types) > 1
    assert 20 < len(few) < 120
    deviation = (2**20 * rate * (1 - rate)) ** 0.5
    assert abs(len(chosen) - 2**20 * rate) < 5 * deviation + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_count_of_unclipped_samples_is_not_rounded(dtype: torch.dtype) -> None:
    """In bf16 one sample more could change 256.5 to 258: twice what the noise is made for."""
    layout = Single(None, False)
    with default_dtype(dtype):
        for count in (256.5, 257.0, 257.5):
            got = private_fraction(count, 0.0, 1.0, layout, torch.device("cpu")) - 0.5
            assert got == count


# --- a step ---


def one_epoch(mode: str, clipping: str) -> list[Any]:
    with torch.device("cpu"), default_dtype(torch.float32):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))
    made: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data(), batch_size=10, generator=seeded()),
        noise_multiplier=1.0,
        noise_generator=seeded(),
        max_grad_norm=0.2 if clipping == "flat" else [0.1] * 6,
        clipping=clipping,
        grad_sample_mode=mode,
    )
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    for x, y in made[-1]:
        made[1].zero_grad()
        criterion(made[0](x), y).backward()
        made[1].step()
    weights = [p.detach() for p in model.parameters()]
    assert all(w.dtype == torch.float32 and w.device.type == "cpu" for w in weights)
    return weights


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk", "functorch", "ew"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_steps_do_not_depend_on_default_device_and_dtype(mode: str, clipping: str) -> None:
    usual = one_epoch(mode, clipping)
    with torch.device("meta"):
        torch.testing.assert_close(one_epoch(mode, clipping), usual)
    for dtype in DTYPES:
        with default_dtype(dtype):
            torch.testing.assert_close(one_epoch(mode, clipping), usual)


def test_an_ordinary_backward_pass() -> None:
    """Whose norms are looked at, nothing is clipped."""

    def norms() -> Tensor:
        with torch.device("cpu"), default_dtype(torch.float32):
            torch.manual_seed(0)
            model = nn.Linear(5, 3)
        made: Any = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(data(), batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode="ghost",
        )
        x, y = data().tensors
        nn.functional.cross_entropy(made[0](x), y).backward()
        return made[0].get_norm_sample()

    usual = norms()
    with torch.device("meta"):
        torch.testing.assert_close(norms(), usual)
    with default_dtype(torch.bfloat16):
        torch.testing.assert_close(norms(), usual)


def test_what_is_made_when_opacus_is_imported_lies_on_the_cpu() -> None:
    code = (
        "import torch; torch.set_default_device('meta'); import opacus.core.record.record as tap; "
        "print(tap.ANCHOR.device)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "cpu"
