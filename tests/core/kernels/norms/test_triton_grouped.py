"""Many layers in one launch, and several layers with one input."""

from __future__ import annotations

import pytest
import torch

from opacus.core.kernels.host import operands
from tests.core.kernels.triton_cases import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    MARKS,
    MASKS,
    ON_GPU,
    check,
    draw,
    draw_mask,
    product_definition,
)

pytestmark = MARKS
if ON_GPU or INTERPRETED:
    from opacus.core.kernels.norms import gram, width

    MODULES = {"width": width, "input_length": gram}

ALGORITHMS = ["width", "input_length"]
EQUAL = [(2, 20, 32, 16)] * 3
UNEQUAL = [(1, 20, 32, 16), (2, 70, 16, 136), (1, 1, 8, 24), (0, 5, 8, 8)]
ODD = [(2, 20, 33, 16), (1, 30, 15, 135)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shapes", [EQUAL, UNEQUAL, ODD], ids=["equal", "unequal", "odd"])
def test_each_layer_has_its_own_norm(algorithm, dtype, mask, shapes) -> None:
    pairs = [(draw(b, t, d, dtype=dtype), draw(b, t, p, dtype=dtype)) for b, t, d, p in shapes]
    masks = [draw_mask(mask, b, t) for b, t, _, _ in shapes]
    got = MODULES[algorithm].grouped_norm_sq(pairs, None if mask == "all" else masks)
    assert len(got) == len(pairs)
    for value, (a, g), m in zip(got, pairs, masks, strict=True):
        check(value, product_definition(a, g, m), dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_launch(algorithm, monkeypatch) -> None:
    pairs = [(draw(2, 8, 16, dtype=torch.float16), draw(2, 8, 16, dtype=torch.float16))] * 5
    launches = []
    kernel = MODULES[algorithm]._table_kernel
    for function in vars(MODULES[algorithm]).values():  # variants hold the kernel itself
        if hasattr(function, "cache_clear"):
            function.cache_clear()

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(MODULES[algorithm], "_table_kernel", Counted())
    MODULES[algorithm].grouped_norm_sq(pairs)
    assert len(launches) == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_layers(algorithm) -> None:
    assert MODULES[algorithm].grouped_norm_sq([]) == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_dtype_only(algorithm) -> None:
    a, b = draw(2, 4, 8), draw(2, 4, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="same dtype"):
        MODULES[algorithm].grouped_norm_sq([(a, a), (b, b)])
    masks = [torch.ones(2, 4, device=DEVICE), torch.ones(2, 4, device=DEVICE, dtype=torch.bool)]
    with pytest.raises(ValueError, match="masks"):
        MODULES[algorithm].grouped_norm_sq([(a, a), (a, a)], masks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("widths", [(16, 8, 8), (24, 40), (8, 16, 24, 32), (9, 15)], ids=str)
def test_shared_input(dtype, mask, widths) -> None:
    a = draw(2, 66, 24, dtype=dtype)
    gs = [draw(2, 66, p, dtype=dtype) for p in widths]
    m = draw_mask(mask, 2, 66)
    got = gram.shared_norm_sq(a, gs, m)
    assert len(got) == len(gs)
    for value, g in zip(got, gs, strict=True):
        check(value, product_definition(a, g, m), dtype)


def starts_of(pairs, masks=None) -> tuple[int, ...]:
    group = operands.group_of(pairs, masks)
    places = operands.addresses(group.tensors)
    return gram._starts(group, places, masks and operands.addresses(group.masks))


def test_neighbours_with_one_input_share_a_row_of_the_table() -> None:
    a, b = draw(2, 5, 9), draw(2, 5, 9)
    pairs = [(a, b), (a, a), (b, a)]
    assert starts_of(pairs) == (0, 2)
    # Other strides of the same memory, or another mask, are another input.
    assert starts_of([(a, b), (a[:, :2], b[:, :2])]) == (0, 1)
    masks = [torch.ones(2, 5, device=DEVICE) for _ in range(2)]
    assert starts_of(pairs, [masks[0], masks[1], masks[1]]) == (0, 1, 2)
    assert starts_of([(a, b), (a, a)], [masks[0], masks[0]]) == (0,)
    for value, (x, g) in zip(gram.grouped_norm_sq(pairs), pairs, strict=True):
        check(value, product_definition(x, g), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lora_layers(algorithm) -> None:
    pairs = []
    for layer in range(56):
        tokens = 32 if layer % 2 else 31
        a = draw(4, tokens, 1024, dtype=torch.bfloat16)
        r = draw(4, tokens, 16, dtype=torch.bfloat16)
        pairs += [(a, r), (r, a)]
    got = MODULES[algorithm].grouped_norm_sq(pairs)
    for value, (a, g) in zip(got, pairs, strict=True):
        check(value, product_definition(a, g), a.dtype)
