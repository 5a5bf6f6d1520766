"""The noise kernel: published words, the reference's numbers, and the sum left as it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from opacus.core.kernels.noise.gaussian import Draw, grid_of
from opacus.core.kernels.noise.gaussian_reference import add
from opacus.core.kernels.noise.regions import Region, whole
from tests.core.kernels.triton_cases import DEVICE, INTERPRETED, MARKS, ON_GPU

pytestmark = MARKS
if ON_GPU or INTERPRETED:
    from opacus.core.kernels.noise import gaussian_triton

KEY = bytes(range(32))
OLD = (KEY, KEY[::-1])
SECURE = pytest.mark.parametrize("secure", [False, True], ids=["philox", "chacha"])
# Of the GPU's logarithm and its fast sine, on numbers up to 6.8.
TOLERANCE = 2e-3 if ON_GPU else 2e-5


def grid(std: float, secure: bool) -> float:
    return grid_of(std) if secure else 0.0


def both(
    regions: list[Region],
    step: int = 3,
    secure: bool = False,
    keys: list[bytes] | None = None,
    past: Sequence[tuple[float, int]] = (),
) -> tuple[list[Tensor], list[Tensor]]:
    """Noise of the kernel and of the reference."""
    results = []
    for launch, device in ((gaussian_triton.launch, DEVICE), (add, "cpu")):
        draws = []
        for number, region in enumerate(regions):
            zeros = torch.zeros(region.size, device=device)
            draws.append(
                Draw(zeros, zeros, region, keys[number] if keys else KEY, OLD[: len(past)])
            )
        launch(1.0, draws, step, grid(1.0, secure), past, secure)
        results.append([draw.target.cpu() for draw in draws])
    return results[0], results[1]


@SECURE
@pytest.mark.parametrize(
    "regions",
    [
        [whole(4096), whole(1), whole(5000)],
        [Region(8, 4096, 4096, 4096), Region(3, 5000, 5000, 5000), Region(2**40 + 5, 77, 77, 77)],
        [Region(5, 60, 12, 30), Region(16, 4096, 32, 64), Region(7, 9, 3, 5)],
    ],
    ids=["whole", "shards of rows", "shards of columns"],
)
def test_the_kernel_and_the_reference_agree(regions: list[Region], secure: bool) -> None:
    for step in (3, 2**33 + 1):
        got, want = both(regions, step, secure)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)
            assert b.abs().max() > 0.1


@SECURE
def test_noise_of_earlier_steps_is_added_again(secure: bool) -> None:
    past = [(-0.5, 2), (0.25, 2**33)]
    regions = [Region(3, 500, 500, 500)] if secure else [whole(5000), Region(5, 60, 12, 30)]
    got, want = both(regions, 3, secure, None, past)
    for region, a, b in zip(regions, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2 * TOLERANCE)
        total = torch.zeros(region.size)
        for weight, step, key in ((1.0, 3, KEY), (-0.5, 2, KEY), (0.25, 2**33, OLD[1])):
            term = torch.zeros(region.size)
            add(1.0, [Draw(term, term, region, key)], step, grid(1.0, secure), (), secure)
            total += weight * term
        assert (total - term).abs().max() > 0.5
        torch.testing.assert_close(b, total, rtol=0, atol=1e-4)


@SECURE
def test_tensors_have_their_own_keys(secure: bool) -> None:
    keys = [KEY, bytes(32), KEY]
    (a, b, c), want = both([whole(1000)] * 3, 3, secure, keys)
    assert torch.equal(a, c) and (a != b).float().mean() > 0.99
    torch.testing.assert_close([a, b, c], want, rtol=0, atol=TOLERANCE)


@SECURE
def test_a_shard_has_the_numbers_of_its_elements(secure: bool) -> None:
    (all_,), _ = both([whole(5000)], 3, secure)
    columns = [Region(25 * k, 1250, 25, 100) for k in range(4)]
    parts, _ = both([Region(0, 4001, 4001, 4001), Region(4001, 999, 999, 999)], 3, secure)
    assert torch.equal(torch.cat(parts), all_)
    parts, _ = both(columns, 3, secure)
    assert torch.equal(torch.cat([p.view(-1, 25) for p in parts], 1).flatten(), all_)


def test_every_element_gets_its_noise_and_no_other_is_written() -> None:
    guarded = [torch.full((size + 2,), 7.0, device=DEVICE) for size in (1, 4095, 4096, 5000)]
    draws = [Draw(t[1:-1], t[1:-1], whole(len(t) - 2), KEY) for t in guarded]
    gaussian_triton.launch(1.0, draws, 1)
    for tensor in guarded:
        assert tensor[0] == tensor[-1] == 7.0
        assert (tensor[1:-1] != 7.0).all()


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_sum_is_rounded_once(target: torch.dtype) -> None:
    """fp32 sums become half-precision gradients after the noise is in."""
    total = torch.linspace(-4, 4, 5000, device=DEVICE)
    noise, result = torch.zeros_like(total), torch.empty(5000, dtype=target, device=DEVICE)
    gaussian_triton.launch(0.5, [Draw(noise, noise, whole(5000), KEY)], 2)
    gaussian_triton.launch(0.5, [Draw(total, result, whole(5000), KEY)], 2)
    want = (total + noise).to(target).float()
    wrong = (result.float() - want).abs() > torch.finfo(target).eps * want.abs()
    assert wrong.float().mean() < 1e-3  # a fused multiply-add may round another way


@SECURE
def test_sums_lie_on_a_grid(secure: bool) -> None:
    total = torch.linspace(-1e-4, 1e-4, 5000, device=DEVICE)
    draw = Draw(total, torch.empty_like(total), whole(5000), KEY)
    gaussian_triton.launch(3.0, [draw], 2, grid_of(3.0), secure=secure)
    steps = (draw.target / grid_of(3.0)).double()
    assert torch.equal(steps, steps.round()) and 2.9 < draw.target.std() < 3.1


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32], ids=str)
def test_the_sum_with_its_noise_is_divided(target: torch.dtype) -> None:
    """After it has been put on the grid, and before it is rounded to half precision."""
    total, divisor = torch.linspace(-40, 40, 5000, device=DEVICE), 24.0
    for launch, source in ((gaussian_triton.launch, total), (add, total.cpu())):
        whole_, result = torch.empty_like(source), torch.empty_like(source, dtype=target)
        launch(3.0, [Draw(source, whole_, whole(5000), KEY)], 2, grid_of(3.0))
        launch(3.0, [Draw(source, result, whole(5000), KEY)], 2, grid_of(3.0), divisor=divisor)
        want = (whole_ / divisor).to(target)
        torch.testing.assert_close(result, want, rtol=torch.finfo(target).eps, atol=0)
        assert (whole_ - source).std() > 2.9
    # The definition rounds to half precision once; the interpreter of kernels cuts off.
    assert torch.equal(result, want)
