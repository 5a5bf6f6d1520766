"""The kernel of weighted sums against sums in float64."""

from __future__ import annotations

import pytest
import torch

from opacus.core.kernels.sums import weighted_sum
from tests.core.kernels.triton_cases import DEVICE, DTYPES, INTERPRETED, MARKS, ON_GPU, draw

pytestmark = MARKS
if ON_GPU or INTERPRETED:
    from opacus.core.kernels.sums import weighted_sum_triton as kernel
    from opacus.core.kernels.sums.weighted_sum_triton import Sum

# The second list cannot be read 16 bytes at a time.
SIZES = [[8, 2048, 40000, 64], [5, 2049, 70001, 1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=["aligned", "odd"])
@pytest.mark.parametrize("rows", [1, 3])
def test_sums_of_many_tensors(dtype, sizes, rows) -> None:
    grads = [draw(rows, n, dtype=dtype) for n in sizes]
    factors = [torch.rand(rows, device=DEVICE) for _ in sizes]
    excluded = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    if rows > 1:
        excluded[1] = True
        for grad in grads:
            grad[1] = float("nan")
    out = torch.full((1, sum(sizes)), float("nan"), device=DEVICE)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    sums = [Sum(g, f, s, n) for g, f, s, n in zip(grads, factors, starts, sizes, strict=True)]
    kernel.launch(sums, excluded, out, out.stride(0))
    kept = ~excluded
    want = torch.cat(
        [f[kept].double() @ g[kept].double() for f, g in zip(factors, grads, strict=True)]
    )
    torch.testing.assert_close(out[0].double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [16, 12], ids=["aligned", "odd"])
def test_segments_lie_a_stride_apart(width) -> None:
    """As a reduction over four ranks wants them: each rank's part in its own row."""
    ranks, rows = 4, 3
    grad = draw(2, rows * ranks, width, dtype=torch.bfloat16)
    factors = torch.rand(2, device=DEVICE)
    stride = rows * width + 2 * width  # another parameter lies in front
    out = torch.full((ranks, stride), 7.0, device=DEVICE)
    none = torch.zeros(2, dtype=torch.bool, device=DEVICE)
    kernel.launch([Sum(grad, factors, 2 * width, rows * width)], none, out, stride)
    want = torch.einsum("b,b...->...", factors.double(), grad.double()).view(ranks, -1)
    torch.testing.assert_close(out[:, 2 * width :].double(), want, rtol=1e-5, atol=1e-6)
    assert (out[:, : 2 * width] == 7.0).all()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes what a GPU would."""
    if not ON_GPU:
        monkeypatch.setattr(weighted_sum, "can_batch", lambda grads, factors: True)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("before", [32, 3], ids=["aligned", "odd"])
def test_one_sum_is_written_into_a_part_of_a_bucket(monkeypatch, before) -> None:
    started = launches(monkeypatch)
    grad, factors = draw(2, 4, 48, dtype=torch.bfloat16), torch.rand(2, device=DEVICE)
    whole = torch.full((4, before + 48 + 5), 7.0, device=DEVICE)
    part = whole[:, before : before + 48]
    assert weighted_sum.weighted_sum(grad, factors, None, out=part) is part
    want = torch.einsum("b,b...->...", factors.double(), grad.double())
    torch.testing.assert_close(part.double(), want, rtol=1e-5, atol=1e-6)
    assert (whole[:, :before] == 7.0).all() and (whole[:, before + 48 :] == 7.0).all()
    assert started == [1]


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=["aligned", "odd"])
def test_a_lone_sample_is_scaled_where_it_lies(dtype, sizes) -> None:
    grads = [draw(1, n, dtype=dtype) for n in sizes] + [draw(1, 9, dtype=torch.float32)]
    factors = [torch.rand(1, device=DEVICE) + 0.1 for _ in grads]
    places = [grad.data_ptr() for grad in grads]
    want = [f.double() * g.double() for f, g in zip(factors, grads, strict=True)]
    assert weighted_sum.scale_in_place(grads, factors, None)
    assert [grad.data_ptr() for grad in grads] == places
    for grad, wanted in zip(grads, want, strict=True):
        torch.testing.assert_close(grad, wanted.to(grad.dtype))
    grads[0][0, 3] = float("nan")
    assert weighted_sum.scale_in_place(
        grads, factors, torch.ones(1, dtype=torch.bool, device=DEVICE)
    )
    assert not any(grad.any() for grad in grads)


@pytest.mark.usefixtures("taken")
def test_gradients_that_share_memory_are_left_alone() -> None:
    both = draw(1, 16)
    before, factors = both.clone(), torch.full((1,), 0.5, device=DEVICE)
    for grads in ([both, both], [both[:, :8], both[:, 8:]], [both, both.view(1, 4, 4)]):
        assert not weighted_sum.scale_in_place(grads, [factors] * 2, None)
    assert torch.equal(both, before)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sums each launch has, from now on."""
    started: list[int] = []
    launch = kernel.launch
    monkeypatch.setattr(
        kernel, "launch", lambda sums, *a: (started.append(len(sums)), launch(sums, *a))
    )
    return started


@pytest.mark.parametrize(("stride", "wanted"), [(64, [1, 2]), (51, [3])])
def test_odd_sizes_of_ranks_have_a_launch_of_their_own(monkeypatch, stride, wanted) -> None:
    """If the rows of ranks lie at odd places, all are odd."""
    started, places = launches(monkeypatch), [(0, 16), (16, 32), (48, 3)]
    grads = [draw(3, 2 * n, dtype=torch.bfloat16) for _, n in places]
    factors = [torch.rand(3, device=DEVICE) for _ in grads]
    out = torch.full((2, stride), 7.0, device=DEVICE)
    weighted_sum.weighted_sums(
        grads, factors, None, out, [start for start, _ in places], [n for _, n in places]
    )
    for (start, n), grad, factor in zip(places, grads, factors, strict=True):
        want = torch.einsum("b,b...->...", factor.double(), grad.double()).view(2, n)
        got = out[:, start : start + n].double()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert (out[:, 51:] == 7.0).all() and sorted(started) == wanted


@pytest.mark.usefixtures("taken")
def test_large_sums_have_a_storage_and_small_ones_share_one(monkeypatch) -> None:
    """All in one launch for each dtype, and for odd sizes."""
    monkeypatch.setattr(weighted_sum, "SHARED_ELEMENTS", 64)
    shapes = [(16,), (5, 16), (3,), (8,), (0,), (4, 24), (32,)]
    grads = [draw(3, *shape, dtype=torch.bfloat16) for shape in shapes] + [draw(3, 40)]
    factors = [torch.rand(3, device=DEVICE) for _ in grads]
    started = launches(monkeypatch)
    sums = weighted_sum.weighted_sum_each(grads, factors, None, [torch.float32] * len(grads))
    for got, grad, factor in zip(sums, grads, factors, strict=True):
        want = torch.einsum("b,b...->...", factor.double(), grad.double())
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    storages = [total.untyped_storage().data_ptr() for total in sums]
    assert storages[2] == storages[3] and len(set(storages)) == 6
    assert sorted(started) == [1, 2, 5]
