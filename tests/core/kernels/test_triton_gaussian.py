"""The noise kernel: the right distribution, no number twice, and the sum left as it was."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.core.kernels.triton_cases import DEVICE, INTERPRETED, MARKS, ON_GPU

pytestmark = MARKS
if ON_GPU or INTERPRETED:
    from opacus.core.kernels import gaussian_triton

COUNT = 1 << 16


def key(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64, device=DEVICE)


def draw(std: float, sizes: list[int], number: int = 5, dtype: torch.dtype = torch.float32):
    tensors = [torch.zeros(size, dtype=dtype, device=DEVICE) for size in sizes]
    gaussian_triton.launch(std, tensors, tensors, key(number))
    return tensors


def test_numbers_are_normal() -> None:
    (noise,) = draw(3.0, [COUNT])
    z = (noise / 3.0).double().cpu()
    assert stats.kstest(z, "norm").pvalue > 1e-4
    assert abs(z.mean()) < 5 / math.sqrt(COUNT)
    assert abs(z.square().mean() - 1) < 5 * math.sqrt(2 / COUNT)
    assert abs(z.pow(4).mean() - 3) < 5 * math.sqrt(96 / COUNT)
    assert 3.9 < z.abs().max() < 6.9
    assert len(z.unique()) > 0.99 * COUNT


def test_neighbours_are_independent() -> None:
    """Numbers that come from one pair, one quadruple, or neighbouring ones."""
    (noise,) = draw(1.0, [COUNT])
    z = noise.double().cpu()
    for apart in (1, 2, 3, 4, 8, 4096):
        for power in (1, 2):  # pairs of Box and Muller share a radius: squares must not show it
            a, b = z[:-apart].pow(power), z[apart:].pow(power)
            correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
            assert abs(correlation) < 5 / math.sqrt(COUNT - apart), (apart, power)


def test_tensors_and_keys_do_not_share_numbers() -> None:
    sizes = [5, 4096, 4097, 1, 10000]
    first, again, other = (torch.cat(draw(1.0, sizes, n)) for n in (5, 5, 6))
    assert torch.equal(first, again)
    for noise in (first, torch.cat([first, other])):
        assert len(noise.unique()) > 0.999 * len(noise)


def test_every_element_gets_its_noise_and_no_other_is_written() -> None:
    guarded = [torch.full((size + 2,), 7.0, device=DEVICE) for size in (1, 4095, 4096, 9000)]
    inner = [t[1:-1] for t in guarded]
    gaussian_triton.launch(1.0, inner, inner, key(1))
    for tensor in guarded:
        assert tensor[0] == tensor[-1] == 7.0
        assert (tensor[1:-1] != 7.0).all()
    assert abs(torch.cat(inner).mean() - 7.0) < 0.05


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_sum_is_rounded_once(target) -> None:
    """fp32 sums become half-precision gradients after the noise is in."""
    total = torch.linspace(-4, 4, 5000, device=DEVICE)
    (noise,) = draw(0.5, [5000])
    result = torch.empty(5000, dtype=target, device=DEVICE)
    gaussian_triton.launch(0.5, [total], [result], key(5))
    want = (total + noise).to(target).float()
    wrong = (result.float() - want).abs() > torch.finfo(target).eps * want.abs()
    assert wrong.float().mean() < 1e-3  # a fused multiply-add may round another way


@pytest.mark.gpu
def test_equal_states_of_a_generator_give_equal_noise() -> None:
    from opacus.core.kernels.gaussian import add_gaussian, can_fuse

    generator = torch.Generator(DEVICE).manual_seed(3)
    drawn = []
    for seed in (3, None, 3):
        if seed is not None:
            generator.manual_seed(seed)
        sums = [torch.zeros(5000, device=DEVICE), torch.zeros(70, device=DEVICE).bfloat16()]
        for total in sums:
            assert can_fuse(total, generator), (generator.device, total.device, total.dtype)
        add_gaussian(1.0, sums, sums, generator)
        drawn.append(torch.cat([total.float() for total in sums]))
    assert torch.equal(drawn[0], drawn[2])
    assert (drawn[0] != drawn[1]).float().mean() > 0.9
