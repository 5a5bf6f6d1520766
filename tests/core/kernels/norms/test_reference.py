"""The norm kernels against their definitions, with chunks so small that every loop runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opacus.core.kernels.norms import reference, trusted

SMALL = [1, 3, 20, 57, 1 << 26]


def product_definition(activations: Tensor, backprops: Tensor) -> Tensor:
    products = [a.double().T @ g.double() for a, g in zip(activations, backprops, strict=True)]
    return torch.tensor([p.square().sum().item() for p in products], dtype=torch.float64)


def table_definition(rows: Tensor, samples: Tensor, values: Tensor, batch: int) -> Tensor:
    norms = torch.zeros(batch, dtype=torch.float64)
    for i in range(batch):
        sums: dict[int, Tensor] = {}
        for row, sample, value in zip(rows.tolist(), samples.tolist(), values, strict=True):
            if sample == i:
                sums[row] = sums.get(row, 0) + value.double()
        norms[i] = sum(s.square().sum() for s in sums.values())
    return norms


@pytest.fixture(params=SMALL)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", request.param)
    return request.param


@pytest.mark.parametrize(
    "shape", [(3, 7, 5, 4), (1, 64, 3, 2), (2, 5, 1, 9), (4, 2, 6, 1), (2, 67, 3, 2)]
)
def test_both_product_norms_are_the_definition(chunk: int, shape: tuple[int, ...]) -> None:
    batch, tokens, d, p = shape
    a, g = torch.randn(batch, tokens, d).double(), torch.randn(batch, tokens, p).double()
    want = product_definition(a, g)
    torch.testing.assert_close(reference.width_norm_sq(a, g), want, rtol=1e-12, atol=0)
    torch.testing.assert_close(reference.gram_norm_sq(a, g), want, rtol=1e-11, atol=0)
    torch.testing.assert_close(reference.product_norm_sq(a, g), want, rtol=1e-11, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 128])
def test_gram_tiles_of_any_height(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "GRAM_ROWS", rows)
    for tokens in (7, 67, 131):  # more than TILE: up to a multiple of EVEN
        a, g = torch.randn(2, tokens, 5).double(), torch.randn(2, tokens, 4).double()
        got = reference.gram_norm_sq(a, g)
        torch.testing.assert_close(got, product_definition(a, g), rtol=1e-11, atol=0)


def test_chunked_sum_of_squares(chunk: int) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    got = reference.sum_of_squares(x)
    torch.testing.assert_close(got, x.square().sum((1, 2)), rtol=1e-13, atol=0)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0, 4)])
def test_sum_of_squares_of_nothing_is_zero(shape: tuple[int, ...]) -> None:
    got = reference.sum_of_squares(torch.randn(shape, dtype=torch.bfloat16))
    assert got.shape == shape[:1]
    assert got.dtype == torch.float32
    assert not got.any()


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_product_norm_of_nothing_is_zero(shape: tuple[int, ...]) -> None:
    batch, tokens, d, p = shape
    got = reference.product_norm_sq(torch.randn(batch, tokens, d), torch.randn(batch, tokens, p))
    assert torch.equal(got, torch.zeros(batch))


def test_single_token_norm_is_a_product_of_norms() -> None:
    a, g = torch.randn(4, 1, 6).double(), torch.randn(4, 1, 3).double()
    got = reference.product_norm_sq(a, g)
    torch.testing.assert_close(got, product_definition(a, g), rtol=1e-12, atol=0)


def test_sum_of_many_squares_keeps_its_digits() -> None:
    x = torch.rand(1, 4_000_000)
    want = x.double().square().sum(1)
    torch.testing.assert_close(reference.sum_of_squares(x).double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [reference.gram_norm_sq, reference.width_norm_sq])
@pytest.mark.parametrize(("a_scale", "g_scale"), [(1e-3, 1e-3), (300, 300), (1e-3, 300), (1, 1)])
def test_half_precision_neither_over_nor_underflows(norm, dtype, a_scale, g_scale) -> None:
    a = (torch.randn(3, 17, 6) * a_scale).to(dtype)
    g = (torch.randn(3, 17, 5) * g_scale).to(dtype)
    got, want = norm(a, g), product_definition(a, g)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [reference.gram_norm_sq, reference.width_norm_sq])
def test_autocast_does_not_lower_the_precision(norm, dtype) -> None:
    a, g = torch.randn(3, 17, 6) * 100, torch.randn(3, 17, 5) * 100
    with torch.autocast("cpu", dtype=dtype):
        assert torch.bmm(a.transpose(1, 2), g).dtype == dtype
        got = norm(a, g)
    assert torch.equal(got, norm(a, g))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [reference.gram_norm_sq, reference.width_norm_sq])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_half_precision_on_a_gpu(norm, dtype, scale: float) -> None:
    a = (torch.randn(3, 130, 64) * scale).to("cuda", dtype)
    g = (torch.randn(3, 130, 72) * scale).to("cuda", dtype)
    got, want = norm(a, g).cpu(), product_definition(a.cpu(), g.cpu())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=0)


def test_cancelling_gram_matrices_never_give_a_negative_norm() -> None:
    half, g = torch.randn(64, 9, 7), torch.randn(64, 9, 5)
    a, g = torch.cat([half, half], 1), torch.cat([g, -g], 1)  # A^T G is zero
    got = reference.gram_norm_sq(a, g)
    assert (got >= 0).all()
    scale = a.square().sum((1, 2)) * g.square().sum((1, 2))
    assert (got < 1e-5 * scale).all()


@pytest.mark.parametrize("norm", [reference.gram_norm_sq, reference.width_norm_sq])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_only_the_bad_sample_has_a_bad_norm(norm, bad: float) -> None:
    a, g = torch.randn(3, 7, 5), torch.randn(3, 7, 4)
    a[1, 2, 3] = bad
    finite = norm(a, g).isfinite()
    assert finite.tolist() == [True, False, True]


def test_gram_is_chosen_for_short_sequences_only() -> None:
    assert reference.gram_is_cheaper(8, 512, 512)
    assert reference.gram_is_cheaper(128, 4096, 4096)
    assert reference.gram_is_cheaper(512, 2048, 128_000)
    assert not reference.gram_is_cheaper(4096, 512, 512)
    assert not reference.gram_is_cheaper(64, 8, 8)


def test_gram_stays_cheaper_as_the_layer_grows() -> None:
    chosen = [reference.gram_is_cheaper(256, d, d) for d in (16, 64, 256, 1024, 4096)]
    assert chosen == sorted(chosen)
    assert len(set(chosen)) == 2


@pytest.mark.parametrize("path", ["gram_norm_sq", "width_norm_sq"])
def test_the_chooser_decides_the_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("gram_norm_sq", "width_norm_sq"):
        monkeypatch.setattr(reference, name, lambda a, g, name=name: calls.append(name))
    monkeypatch.setattr(reference, "gram_is_cheaper", lambda *_: path == "gram_norm_sq")
    reference.product_norm_sq(torch.randn(2, 3, 4), torch.randn(2, 3, 5))
    assert calls == [path]


def test_tf32_takes_no_products_that_may_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens whose parts cancel to a tenth: percents of it are lost by 11 bits a factor."""
    calls: list[str] = []
    gram = reference.gram_norms_sq
    monkeypatch.setattr(
        reference, "gram_norms_sq", lambda pairs: calls.append("gram") or gram(pairs)
    )
    pair = torch.randn(2, 8, 256), torch.randn(2, 8, 256)
    want = reference.products_norm_sq([pair])[0]
    assert calls == ["gram"] and trusted.trusted(pair[0]) == 2**-7
    for module in (reference, trusted):
        monkeypatch.setattr(module, "in_tf32", lambda tensor: True)
    got = reference.product_norm_sq(*pair), *reference.products_norm_sq([pair])
    assert calls == ["gram"] and trusted.trusted(pair[0]) == 2**-2
    for one in got:
        torch.testing.assert_close(one, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_norms_where_the_program_allows_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    a, g = torch.randn(4, 2, 512, device="cuda"), torch.randn(4, 2, 512, device="cuda")
    a[:, 1], g[:, 1] = a[:, 0], -g[:, 0] * 0.8  # of what cancels, an eightieth is left
    want = torch.einsum("btd,btp->bdp", a.double(), g.double()).square().sum((1, 2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert trusted.in_tf32(a) and not trusted.in_tf32(a.bfloat16())
        got = reference.product_norm_sq(a, g)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert not trusted.in_tf32(a)
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=0)


def lookups(ids: Tensor, d: int = 4) -> tuple[Tensor, Tensor, Tensor, int]:
    """Arguments of ``table_norm_sq`` for ids ``[B, T]``."""
    batch, tokens = ids.shape
    samples = torch.arange(batch).repeat_interleave(tokens)
    values = torch.randn(batch * tokens, d, dtype=torch.float64)
    return ids.reshape(-1), samples, values, batch


IDS = {
    "repeats": torch.randint(0, 3, (3, 20), generator=torch.Generator().manual_seed(0)),
    "equal": torch.full((3, 6), 5),
    "distinct": torch.stack([torch.randperm(9) for _ in range(3)]),
    "one": torch.tensor([[7]]),
    "far": torch.tensor([[2**40, 0, 2**40], [1, 1, 2**40]]),
    "int32": torch.tensor([[2, 0, 2], [1, 1, 2]], dtype=torch.int32),
}


@pytest.mark.parametrize("name", IDS)
def test_table_norm_adds_repeated_rows_first(chunk: int, name: str) -> None:
    arguments = lookups(IDS[name])
    got = reference.table_norm_sq(*arguments)
    torch.testing.assert_close(got, table_definition(*arguments), rtol=1e-12, atol=0)


def test_table_norm_of_scattered_lookups() -> None:
    rows = torch.tensor([4, 4, 1, 4, 0, 1])
    samples = torch.tensor([2, 0, 2, 2, 0, 2])  # unordered, and sample 1 looks nothing up
    values = torch.randn(6, 3, dtype=torch.float64)
    got = reference.table_norm_sq(rows, samples, values, 3)
    torch.testing.assert_close(got, table_definition(rows, samples, values, 3))
    assert got[1] == 0


def test_table_norm_of_nothing_is_zero() -> None:
    none = torch.zeros(0, dtype=torch.long)
    got = reference.table_norm_sq(none, none, torch.zeros(0, 3, dtype=torch.float16), 2)
    assert torch.equal(got, torch.zeros(2))


@pytest.mark.parametrize("scale", [1e-4, 300.0])
def test_table_norm_of_half_precision(scale: float) -> None:
    rows, samples, values, batch = lookups(IDS["repeats"])
    values = (values * scale).half()
    got = reference.table_norm_sq(rows, samples, values, batch)
    assert got.dtype == torch.float32
    want = table_definition(rows, samples, values, batch)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
