"""Norms, partial sums and unfolding, against torch's own operations."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from opacus.utils.tensor_utils import (
    calc_sample_norms,
    calc_sample_norms_one_layer,
    filter_dilated_rows,
    sum_over_all_but_batch_and_last_n,
    unfold2d,
    unfold3d,
)


def test_norms() -> None:
    named = [("a", torch.randn(3, 4, 5)), ("b", torch.randn(3, 2)), ("c", torch.randn(3))]
    each = [torch.tensor([row.norm() for row in tensor]) for _, tensor in named]
    for got, want in zip(calc_sample_norms(iter(named), flat=False), each, strict=True):
        torch.testing.assert_close(got, want)
    (flat,) = calc_sample_norms(named)
    torch.testing.assert_close(flat, torch.stack(each).norm(dim=0))
    torch.testing.assert_close(calc_sample_norms_one_layer(named[0][1]), each[0])


def test_norms_of_nothing() -> None:
    assert calc_sample_norms_one_layer(torch.zeros(0, 3)).shape == (0,)
    assert calc_sample_norms([("a", torch.zeros(0, 3))])[0].shape == (0,)
    assert calc_sample_norms([], flat=False) == []
    with pytest.raises(ValueError, match="named_params is empty"):
        calc_sample_norms([])


def test_sums() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert sum_over_all_but_batch_and_last_n(x, 3) is x
    torch.testing.assert_close(sum_over_all_but_batch_and_last_n(x, 2), x.sum(1))
    torch.testing.assert_close(sum_over_all_but_batch_and_last_n(x, 1), x.sum(1).sum(1))
    torch.testing.assert_close(sum_over_all_but_batch_and_last_n(x, 0), x.flatten(1).sum(1))
    with pytest.raises(ValueError, match="n_dims=4"):
        sum_over_all_but_batch_and_last_n(x, 4)


@pytest.mark.filterwarnings("ignore:.*padding='same' with even kernel lengths.*:UserWarning")
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dilation", [1, (1, 2, 3)])
@pytest.mark.parametrize("stride", [1, 2, (2, 1, 3)])
@pytest.mark.parametrize("kernel", [2, (3, 1, 2)])
def test_unfolding_is_what_convolutions_do(dims: int, kernel, stride, dilation) -> None:
    unfold, conv = (unfold2d, F.conv2d) if dims == 2 else (unfold3d, F.conv3d)
    kernel, stride, dilation = (
        v if isinstance(v, int) else v[:dims] for v in (kernel, stride, dilation)
    )
    size = (kernel,) * dims if isinstance(kernel, int) else kernel
    x, weight = torch.randn(2, 3, *(7, 8, 9)[:dims]), torch.randn(4, 3, *size)
    for padding in (0, 1, (1, 0, 2)[:dims], "valid", "same"):
        if padding == "same" and stride != 1:
            continue
        want = conv(x, weight, stride=stride, padding=padding, dilation=dilation)
        columns = unfold(x, kernel_size=kernel, padding=padding, stride=stride, dilation=dilation)
        torch.testing.assert_close(
            weight.flatten(1) @ columns, want.flatten(2), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    "settings", list(itertools.product([2, (3, 2)], [0, (1, 2)], [1, 2], [1, 2]))
)
def test_two_dimensions_equal_torchs_unfold(settings) -> None:
    names = ("kernel_size", "padding", "stride", "dilation")
    options = dict(zip(names, settings, strict=True))
    x = torch.randn(2, 3, 7, 8)
    assert torch.equal(unfold2d(x, **options), F.unfold(x, **options))


def test_empty_batches_unfold() -> None:
    assert unfold3d(torch.zeros(0, 3, 4, 4, 4), kernel_size=2).shape == (0, 24, 27)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="5 dimensions"):
        unfold3d(torch.zeros(3, 4, 4, 4), kernel_size=2)
    with pytest.raises(ValueError, match="kernel_size must be one size or 3"):
        unfold3d(torch.zeros(1, 3, 4, 4, 4), kernel_size=(2, 2))
    with pytest.raises(ValueError, match="larger than the padded input"):
        unfold3d(torch.zeros(1, 3, 4, 4, 4), kernel_size=(2, 5, 2))
    with pytest.raises(ValueError, match="padding"):
        unfold3d(torch.zeros(1, 3, 4, 4, 4), kernel_size=2, padding="full")


def test_dilated_rows() -> None:
    x = torch.randn(1, 2, 3, 2, 2, 3, 5, 3)
    filtered = filter_dilated_rows(x, (1, 2, 1), (3, 5, 3), (3, 3, 3))
    assert torch.equal(filtered, x[..., :, ::2, :])
    with pytest.raises(ValueError, match="kernel_size"):
        filter_dilated_rows(x, (1, 2, 1), (3, 5, 3), (3, 2, 3))
