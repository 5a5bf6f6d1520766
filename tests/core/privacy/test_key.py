"""Keys: no random number of the guarantee comes twice, and a global seed changes none."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from opacus.core.kernels.noise.gaussian import grid_of
from opacus.core.privacy.key import APART, COUNT, NOISE, Key, RunKey
from opacus.core.privacy.noise import add_noise, gaussian, parameter_names
from opacus.core.ranks.parallelism import Single

SECURE = pytest.mark.parametrize("secure", [False, True], ids=["philox", "chacha"])
COUNT_OF_NUMBERS = 40_000


def seeded(seed: int = 3) -> RunKey:
    return RunKey(torch.Generator().manual_seed(seed))


def noise(
    key: RunKey, name: str = "w", size: int = COUNT_OF_NUMBERS, secure: bool = False,
    purpose: str = NOISE, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    made = torch.zeros(size, dtype=dtype)
    add_noise(1.0, [(made, made, name)], key, purpose, secure)
    return made


def correlation(a: Tensor, b: Tensor) -> float:
    return abs(torch.corrcoef(torch.stack([a, b]).double())[0, 1].item())


def closest(a: Tensor, b: Tensor) -> float:
    """Largest correlation under any shift (cyclic), by Fourier transforms."""
    a, b = ((t - t.mean()) / t.std() for t in (a.double(), b.double()))
    product = torch.fft.fft(a) * torch.fft.fft(b).conj()
    return torch.fft.ifft(product).real.abs().max().item() / len(a)


@SECURE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_are_normal(secure: bool, dtype: torch.dtype) -> None:
    n = COUNT_OF_NUMBERS
    z = noise(seeded(), secure=secure, dtype=dtype).double()
    assert stats.kstest(z, "norm").pvalue > 1e-4
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.square().mean() - 1) < 5 * math.sqrt(2 / n)
    assert abs(z.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)
    for apart in (1, 2, 3, 4, 8, 16):
        for power in (1, 2):  # pairs of Box and Muller share a radius: squares must not show it
            assert correlation(z[:-apart].pow(power), z[apart:].pow(power)) < 5 / math.sqrt(n - 16)


@SECURE
def test_steps_names_purposes_and_keys_are_independent(secure: bool) -> None:
    key = seeded()
    drawn = [noise(key, secure=secure) for _ in range(3)]
    drawn += [noise(key, name, secure=secure) for name in ("v", "w.w", "")]
    drawn += [noise(key, secure=secure, purpose=purpose) for purpose in (COUNT, APART)]
    drawn += [noise(other, secure=secure) for other in (seeded(4), RunKey(), RunKey())]
    for a, b in itertools.combinations(drawn, 2):
        # Two keys are the operating system's: one of 5e8 runs has a pair that is as close.
        assert closest(a, b) < 8 / math.sqrt(COUNT_OF_NUMBERS)


def test_a_counter_that_stands_still_is_found() -> None:
    """The check above can fail."""
    key = seeded()
    one, two = noise(key), noise(key)
    key._next[NOISE] -= 1
    again = noise(key)
    assert closest(two, again) > 0.99 > 0.1 > closest(one, again)
    shifted = torch.roll(two, 1000)
    assert closest(two, shifted) > 0.99


@SECURE
def test_high_bits_of_the_counter_matter(secure: bool) -> None:
    """Element numbers and steps that differ above 2^32 alone."""
    from opacus.core.kernels.noise.gaussian import Draw, add_gaussian
    from opacus.core.kernels.noise.regions import Region

    drawn = []
    for first, step in [(0, 5), (2**32, 5), (2**34, 5), (2**36, 5), (0, 5 + 2**32), (2**32, 2**34)]:
        made = torch.zeros(2000)
        draw = Draw(made, made, Region(first, 2000, 2000, 2000), bytes(32))
        add_gaussian(1.0, [draw], step, secure)
        drawn.append(made)
    for a, b in itertools.combinations(drawn, 2):
        assert closest(a, b) < 0.2


def test_seeds_repeat_and_the_global_one_changes_nothing() -> None:
    assert torch.equal(noise(seeded(5)), noise(seeded(5)))
    unseeded = []
    for _ in range(2):
        torch.manual_seed(1)
        unseeded.append(noise(RunKey()))
    assert closest(*unseeded) < 0.1
    generator = torch.Generator().manual_seed(7)
    key = RunKey(generator)
    first = noise(key)
    generator.manual_seed(7)
    assert closest(first, noise(key)) < 0.1
    one, two = RunKey(generator), RunKey(generator)  # two optimizers with one generator
    assert closest(noise(one), noise(two)) < 0.1


def test_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPACUS_REPRODUCIBLE", "1")
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(noise(RunKey()))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert not RunKey(secure=True).seeded
    monkeypatch.setenv("OPACUS_REPRODUCIBLE", "yes")
    with pytest.raises(ValueError, match="OPACUS_REPRODUCIBLE must be 0 or 1"):
        RunKey()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))])
def test_a_copy_has_a_key_of_its_own(duplicate) -> None:
    for key in (RunKey(), seeded()):
        noise(key)
        other = duplicate(key)
        assert other.step == 1
        assert closest(noise(key), noise(other)) < 0.1


def test_resuming() -> None:
    """Seeded runs repeat; others never do; no number is given out twice."""
    key, system = seeded(), RunKey()
    for each in (key, system):
        noise(each)
    state, of_system = key.state_dict(), system.state_dict()
    assert system.key.secret.hex() not in repr(of_system) and "secret" not in repr(system.key)
    want = noise(key)
    again, other, lost = seeded(99), RunKey(), seeded()
    assert again.resume(state) and torch.equal(noise(again), want)
    assert other.resume(of_system) and other.step == 1
    assert closest(noise(other), noise(system)) < 0.1  # two runs from one checkpoint
    assert not lost.resume(of_system) and lost.step == 1
    assert RunKey().resume(state)  # a run without a seed takes no key from a file
    key.at_least({NOISE: 9})
    key.at_least({NOISE: 4})
    assert key.advance(NOISE) == 9


def test_labels_do_not_run_into_each_other() -> None:
    key = Key(bytes(32))
    assert key.derive("a", "bc") != key.derive("ab", "c") != key.derive("abc")


def test_another_generator_does_not_start_again() -> None:
    layout = Single(torch.Generator().manual_seed(1))
    one = next(iter(layout.noised(1.0, [torch.zeros(1000)], [torch.float32])))
    layout.generator = torch.Generator().manual_seed(1)
    two = next(iter(layout.noised(1.0, [torch.zeros(1000)], [torch.float32])))
    assert layout.key.step == 2 and closest(one, two) < 0.2


def test_names_of_wrapped_models_are_those_of_the_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self, name: str, module: nn.Module) -> None:
            super().__init__()
            self.add_module(name, module)

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    want = set(parameter_names(model).values())
    assert want == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for names in (["module"], ["_module"], ["_orig_mod", "module", "_module"]):
        wrapped: nn.Module = model
        for name in names:
            wrapped = Wrapper(name, wrapped)
        assert set(parameter_names(wrapped).values()) == want
    both = nn.Module()
    both.module, both._module = nn.Linear(2, 2), nn.Linear(2, 2)
    assert len(set(parameter_names(both).values())) == 4


def test_secure_noise_lies_on_a_grid() -> None:
    z = gaussian(3.0, torch.zeros(1000), secure_mode=True)
    steps = (z / grid_of(3.0)).double()
    assert torch.equal(steps, steps.round()) and len(steps.unique()) > 980  # 1.4 meet


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_that_are_not_contiguous(dtype: torch.dtype) -> None:
    total = torch.arange(12.0).view(3, 4).t()
    flat = list(Single(torch.Generator().manual_seed(1)).noised(1.0, [total.contiguous()], [dtype]))
    turned = list(Single(torch.Generator().manual_seed(1)).noised(1.0, [total], [dtype]))
    assert torch.equal(flat[0], turned[0]) and turned[0].dtype == dtype
    in_place = list(
        Single(torch.Generator().manual_seed(1)).noised(1.0, [total], [dtype], in_place=True)
    )
    assert torch.equal(in_place[0], flat[0]) and (in_place[0] is total) == (dtype == total.dtype)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_noise_of_its_own(seeded: bool) -> None:
    """Two processes would release different sums with one noise; a seed asks for just that."""
    key = RunKey(torch.Generator().manual_seed(0) if seeded else None)
    key.keeps_past = True
    past, number = key.stream(NOISE, "weight", 0), key.advance(NOISE)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        found = key.stream(NOISE, "weight", number), key.stream(NOISE, "weight", number + 1)
        os.write(writing, b"".join(found))
        os._exit(0)
    os.waitpid(child, 0)
    own = key.stream(NOISE, "weight", number + 1)
    of_child = os.read(reading, 1000)
    assert of_child[: len(past)] == past == key.stream(NOISE, "weight", 0)  # for correlated noise
    assert (of_child[len(past) :] == own) == seeded
