"""Direct launches start what Triton itself would have started, with the same arguments."""

# ruff: noqa: E402

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or INTERPRETED or torch.cuda.is_available():
    pytest.skip("needs Triton's compiler, and no GPU", allow_module_level=True)

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from opacus.core.kernels.host import launch
from opacus.core.kernels.host.launch import Variant
from tests.core.kernels import fake_driver

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:triton")
KNOWN = launch.FIRST <= launch.VERSION <= launch.LAST


@triton.jit(do_not_specialize=["offset"])
def _kernel(x, y, size, offset, scale, stride, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    places = tl.arange(0, BLOCK)
    value = tl.load(x + places, mask=places < size, other=0.0) * scale
    if TWICE:
        value *= 2
    tl.store(y + places * stride + offset, value, mask=places < size)


@triton.jit
def _with_default(x, BLOCK: tl.constexpr, MORE: tl.constexpr = 3):
    tl.store(x + tl.arange(0, BLOCK), MORE)


CONSTANTS = {"BLOCK": 16, "TWICE": True, "num_warps": 1}
MEMORY = torch.zeros(64)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> fake_driver.NoDevice:
    """Triton's kernels are compiled; launches are noted."""
    own = fake_driver.NoDevice()
    monkeypatch.setattr(type(driver), "active", property(lambda self: own))
    fake_driver.launches.clear()
    return own


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each launch that goes through Triton."""
    seen: list[Any] = []
    real = type(_kernel).run

    def run(self, *arguments, **options):
        seen.append(arguments)
        return real(self, *arguments, **options)

    monkeypatch.setattr(type(_kernel), "run", run)
    return seen


def tensor(dtype: torch.dtype = torch.float32, aligned: bool = True) -> torch.Tensor:
    flat = torch.zeros(64, dtype=dtype)
    assert flat.data_ptr() % 16 == 0
    return flat if aligned else flat[1:]


def plain(arguments: tuple[Any, ...]) -> list[Any]:
    """Tensors as their addresses: a launcher takes both."""
    return [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]


TENSORS = [tensor(), tensor(aligned=False), tensor(torch.bfloat16), tensor(torch.bfloat16, False)]
NUMBERS = [0, 1, 2, 16, 17, -16, -1, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), 2**40 + 1]


@pytest.mark.skipif(not KNOWN, reason="another Triton")
def test_each_kind_of_arguments_starts_what_triton_compiled_for_it(through_triton) -> None:
    # Every tensor with every other; every number as each argument, in a mixed order.
    cases = [(x, y, 20, 20, 0.5, 20) for x, y in itertools.product(TENSORS, TENSORS)]
    for n in NUMBERS:
        x = TENSORS[0]
        cases += [(x, x, n, 20, 0.5, 20), (x, x, 20, n, 0.5, 20), (x, x, 20, 20, 0.5, n)]
    variant, seen = Variant(_kernel, **CONSTANTS), set()
    random.Random(0).shuffle(cases)
    for repeat in range(2):
        for case in cases:
            compiled = _kernel[(3, 2)](*case, **CONSTANTS)
            through_triton.clear()
            variant((3, 2), *case)
            if repeat:
                assert not through_triton
            launcher, grid, function, _, arguments = fake_driver.launches[-1]
            assert launcher is compiled.run
            assert function == compiled.function
            assert grid == (3, 2, 1)
            assert plain(arguments) == [*plain(case), 16, True]
            seen.add(function)
    # Not all to the same: pairs of tensors, sizes and strides of 1, 16 and others, wide ones.
    assert len(seen) > 16


@pytest.mark.skipif(not KNOWN, reason="another Triton")
def test_constants_do_not_mix() -> None:
    variants = [Variant(_kernel, **{**CONSTANTS, "TWICE": twice}) for twice in (True, False)]
    for _ in range(2):
        for variant in variants:
            variant((1,), MEMORY, MEMORY, 3, 3, 1.0, 3)
    functions = [launched[2] for launched in fake_driver.launches]
    assert functions[:2] == functions[2:] and functions[0] != functions[1]
    assert [launched[4][-1] for launched in fake_driver.launches] == [True, False] * 2


@pytest.mark.parametrize("direct", [True, False])
def test_a_kernel_runs_on_the_card_of_its_arguments(no_device, monkeypatch, direct) -> None:
    """As an operation of torch does, whatever the current card is."""
    entered: list[int] = []

    class Entered:
        def __init__(self, place: int) -> None:
            self.place, self.before = place, no_device.number

        def __enter__(self) -> None:
            no_device.number = self.place
            entered.append(self.place)

        def __exit__(self, *_: Any) -> None:
            no_device.number = self.before

    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: no_device.number)
    on: list[int] = []
    started = type(_kernel).run
    monkeypatch.setattr(
        type(_kernel), "run", lambda *a, **o: (on.append(no_device.number), started(*a, **o))[1]
    )
    for place in (1, 0, -1, 1):
        monkeypatch.setattr(launch, "_device_of", lambda arguments, place=place: place)
        variant = Variant(_kernel, **CONSTANTS)
        variant._direct = direct
        variant((1,), MEMORY, MEMORY, 3, 3, 1.0, 3)
    assert entered == [1, 1] and on == [1, 0, 0, 1] and no_device.number == 0


def test_the_device_of_arguments_is_that_of_the_first_tensor() -> None:
    assert launch._device_of((3, MEMORY, 1.0)) == MEMORY.get_device() == -1
    assert launch._device_of((3, 1.0)) == -1
    shape = launch.TensorDescriptor(torch.zeros(2, 64, 64), [2, 64, 64], [4096, 64, 1], [1, 16, 32])
    assert launch._device_of((3, shape)) == -1


@pytest.mark.skipif(not KNOWN, reason="another Triton")
def test_each_device_and_driver_has_its_own(no_device, through_triton, monkeypatch) -> None:
    variant, case = Variant(_kernel, **CONSTANTS), (MEMORY, MEMORY, 3, 3, 1.0, 3)
    variant((1,), *case)
    variant((1,), *case)
    assert len(through_triton) == 1
    no_device.number = 1
    variant((1,), *case)
    assert len(through_triton) == 2
    other = fake_driver.NoDevice()
    monkeypatch.setattr(type(driver), "active", property(lambda self: other))
    variant((1,), *case)
    assert len(through_triton) == 3


def check_goes_through_triton(seen: list[Any], variant: Variant, *case: Any) -> None:
    seen.clear()
    for _ in range(3):
        variant((1,), *case)
    assert len(seen) == 3


def test_unknown_arguments_go_through_triton(through_triton) -> None:
    variant = Variant(_kernel, **CONSTANTS)
    for odd in (True, 2**63):
        check_goes_through_triton(through_triton, variant, MEMORY, MEMORY, odd, 3, 1.0, 3)

    class Own(torch.Tensor):
        pass

    own = MEMORY.as_subclass(Own)
    check_goes_through_triton(through_triton, variant, own, MEMORY, 3, 3, 1.0, 3)


def test_tensors_elsewhere_go_through_triton(no_device, through_triton) -> None:
    """So that Triton's launcher, which looks where a pointer leads to, can refuse them."""
    no_device.device = torch.device("cuda", 0)
    variant = Variant(_kernel, **CONSTANTS)
    check_goes_through_triton(through_triton, variant, MEMORY, MEMORY, 3, 3, 1.0, 3)


def test_defaults_go_through_triton(through_triton) -> None:
    check_goes_through_triton(through_triton, Variant(_with_default, BLOCK=16), MEMORY)


def test_other_versions_go_through_triton(through_triton, monkeypatch) -> None:
    monkeypatch.setattr(launch, "KNOWN", False)
    variant = Variant(_kernel, **CONSTANTS)
    check_goes_through_triton(through_triton, variant, MEMORY, MEMORY, 3, 3, 1.0, 3)


def test_who_watches_launches_sees_them(through_triton) -> None:
    variant, case, seen = Variant(_kernel, **CONSTANTS), (MEMORY, MEMORY, 3, 3, 1.0, 3), []
    variant((1,), *case)
    hook = knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        check_goes_through_triton(through_triton, variant, *case)
    finally:
        hook.remove(seen.append)
    assert len(seen) == 3


def test_descriptors_are_those_of_triton() -> None:
    first, second = torch.zeros(2, 64, 64), torch.ones(2, 64, 64)
    for tensor_ in (first, second, first, second[:, :32]):
        got = launch.describe(launch.TensorDescriptor, tensor_, (1, 16, 32))
        shape, strides = list(tensor_.shape), list(tensor_.stride())
        want = launch.TensorDescriptor(tensor_, shape, strides, [1, 16, 32])
        assert vars(got).pop("base") is vars(want).pop("base")
        assert vars(got) == vars(want)
    odd = torch.zeros(2 * 64 * 64 + 1)[1:].view(2, 64, 64)
    with pytest.raises(AssertionError, match="16-byte"):
        launch.describe(launch.TensorDescriptor, odd, (1, 16, 32))


KERNELS = """
import sys, torch
from triton.runtime import driver
from tests.core.kernels import fake_driver
driver.set_active(fake_driver.NoDevice())
from opacus.core.kernels.noise import gaussian_triton
from opacus.core.kernels.norms import hopper
from opacus.core.kernels.norms import gram
from opacus.core.kernels.norms import width
from opacus.core.kernels.host import operands
from opacus.core.kernels.norms import bias_and_affine as rows
from opacus.core.kernels.sums import scaled_rows_triton
from opacus.core.kernels.norms import embedding as table
from opacus.core.kernels.sums import weighted_sum_triton
from opacus.core.kernels.norms import squares_triton
from opacus.core.kernels.noise.gaussian import Draw
from opacus.core.kernels.host.launch import JITFunction
from opacus.core.kernels.noise.regions import Region, whole

buffer, uploads = torch.zeros(1 << 16), {}
operands.blank = lambda shape, device: buffer[:torch.Size(shape).numel()].view(shape)
operands.takes_tma = lambda *ts: all(operands._takes_tma(t) for t in ts)
upload = operands.upload
operands.upload = lambda n, d: uploads.setdefault(tuple(n), upload(n, d))
torch.empty_like = lambda t: t
a, g = torch.ones(2, 32, 128).bfloat16(), torch.ones(2, 32, 64).bfloat16()
odd, mask = torch.ones(2, 32, 63), torch.ones(2, 32) > 0
ids, f = torch.zeros(2, 32, dtype=torch.long), torch.ones(2)
sort = ids.sort(dim=1)
torch.Tensor.sort = lambda *_, **__: sort
torch.Tensor.long = lambda self: self
skip = f > 2
sums = [weighted_sum_triton.Sum(a, f, 0, a[0].numel())]
shard = [Draw(a, a, region, bytes(range(32))) for region in (whole(8192), Region(3, 60, 6, 9))]
cases = {
    "width": lambda: width.norm_sq(a, g, tile=width.TILES[2]),
    "gram": lambda: gram.norm_sq(a, g, tile=gram.TILES[2]),
    "table width": lambda: width.grouped_norm_sq([(odd, odd)] * 2),
    "table gram": lambda: gram.grouped_norm_sq([(a, g)] * 2, [mask] * 2),
    "bias": lambda: rows.bias_norm_sq(odd),
    "affine": lambda: rows.affine_norm_sq(a, a, eps=1e-5, centre=True, bias=False),
    "embedding": lambda: table.embedding_norm_sq(ids, odd),
    "scaled": lambda: scaled_rows_triton.launch(a, f, skip),
    "sum": lambda: weighted_sum_triton.launch(sums, None, buffer, 16),
    "squares": lambda: squares_triton.launch([odd, f], [2, 1]),
    "noise": lambda: gaussian_triton.launch(1, shard, 7),
    "secure noise": lambda: gaussian_triton.launch(1, shard, 7, 0.5, (), True),
}
if "hopper" in sys.argv:
    cases |= {
        "hopper width": lambda: hopper.width_norm_sq(a, g, hopper.WIDTH_TILES[2]),
        "hopper gram": lambda: hopper.gram_sums(a, g, hopper.GRAM_TILES[0]),
    }
for name, case in cases.items():
    def plain(value):
        if hasattr(value, "base"):
            rest = sorted((n, str(v)) for n, v in vars(value).items() if n != "base")
            return value.base.data_ptr(), *rest
        return value.data_ptr() if isinstance(value, torch.Tensor) else value
    fake_driver.launches.clear()
    case()
    count = len(fake_driver.launches)
    assert count, name
    run, JITFunction.run = JITFunction.run, None
    case()
    JITFunction.run = run
    assert len(fake_driver.launches) == 2 * count, name
    for first, second in zip(fake_driver.launches[:count], fake_driver.launches[count:]):
        assert first[:3] == second[:3], name
        one, two = ([plain(v) for v in launch[4]] for launch in (first, second))
        assert one == two, (name, one, two)
print("all", len(cases))
"""


@pytest.mark.slow
@pytest.mark.skipif(not KNOWN, reason="another Triton")
@pytest.mark.parametrize("hopper", [False, True], ids=["", "hopper"])
def test_every_kernel_is_started_with_the_arguments_that_triton_got(hopper) -> None:
    if hopper and importlib.util.find_spec("triton.experimental.gluon") is None:
        pytest.skip("no Triton with Gluon")
    options = ["hopper"] if hopper else []
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNELS, *options],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.startswith("all")
