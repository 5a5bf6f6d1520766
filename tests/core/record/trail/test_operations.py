"""The label that the trail gives to the result of an operation, against what each element is of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from opacus.core.record.trail import Trail
from opacus.core.record.trail.labels import Labels, Lost

B, T, D = 4, 3, 2


def labelled(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> tuple[Tensor, Trail]:
    """The result of a function of inputs whose first dimension is the samples'."""
    torch.manual_seed(0)
    inputs = [torch.randn(B, *shape, dtype=torch.float64) for shape in shapes]
    with Trail(inputs, B) as trail:
        result = function(*inputs)
    return result, trail


def dependence(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Tensor:
    """``[B, *result]``: whether a result's element has a gradient with respect to a sample."""
    torch.manual_seed(0)
    inputs = [torch.randn(B, *shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    result = function(*inputs)
    rows = []
    for element in result.reshape(-1):
        grads = torch.autograd.grad(
            element, inputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.stack([(g != 0).flatten(1).any(1) for g in grads]).any(0))
    return torch.stack(rows, 1).view(B, *result.shape)


def mask(x: Tensor) -> Tensor:
    return torch.tensor([True, False, True, True])


def put_rows(x: Tensor) -> Tensor:
    h = x.clone()
    h[mask(x)] = h[mask(x)] * 2
    return h


def routed(x: Tensor) -> Tensor:
    """Tokens to experts and back, as in a mixture of experts."""
    flat = x.reshape(-1, D)
    chosen = flat.detach().abs().sum(1).argsort()  # two experts, half of the tokens each
    out = torch.zeros_like(flat)
    for some in (chosen[:5], chosen[5:]):
        out.index_add_(0, some, flat[some] * 3)
    return out.view(B, T, D)


def step_by_step(x: Tensor) -> Tensor:
    out = x.new_zeros(B, T, D)
    for t in range(T):
        out[:, t] = x[:, t] * 2
    return out


def into_empty(x: Tensor) -> Tensor:
    out = torch.empty(T, B, D)
    for t in range(T):
        out[t] = x[:, t] * 2
    return out


def halves(x: Tensor) -> Tensor:
    out = x.new_zeros(B, T, D)
    out[:2] = x[2:]
    out[2:] = x[:2]
    return out


def through_a_view(x: Tensor) -> Tensor:
    h = x.clone()
    h.view(B * T, D)[3:6] *= 2
    h.transpose(0, 1)[0] += 1
    return h


def attention(x: Tensor) -> Tensor:
    heads = x.view(B, T, 1, D).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(B, T, D)


def matrices(x: Tensor) -> Tensor:
    return x @ x.mT + 9 * torch.eye(T).to(x)


def message_passing(x: Tensor) -> Tensor:
    flat = x.reshape(-1, D)
    return torch.gru_cell(flat, flat, x.new_ones(3 * D, D), x.new_ones(3 * D, D))


def bags(x: Tensor) -> Tensor:
    """Of one, two and three lookups, and one that is empty."""
    flat = x.reshape(-1, D)[[0, 3, 4, 9, 10, 11], 0]
    starts, table = torch.tensor([0, 1, 3, 3]), x.new_ones(5, D)
    places = torch.tensor([0, 4, 2, 1, 1, 3])
    return F.embedding_bag(places, table, starts, per_sample_weights=flat, mode="sum")


def packed_and_padded(x: Tensor) -> Tensor:
    some = pack_padded_sequence(x.mT.mT, torch.tensor([3, 2, 2, 1]), batch_first=True)
    times_first, _ = pad_packed_sequence(some)
    return times_first + 0 * x.sum(1)


def seen_turned(x: Tensor) -> Tensor:
    h = x.new_zeros(B, B)
    turned = h.t()
    h.copy_(x[:, :1, 0].expand(B, B))
    return turned * 1


def one_block_at_a_time(x: Tensor) -> Tensor:
    out = torch.zeros_like(x[:, None].mT)
    for i in range(1):
        out[:, i] = x.mT
    return out.flatten(0, 1)


FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(0, 1),
    "unflatten": lambda x: x.flatten(0, 1).unflatten(0, (B, T)),
    "merge all": lambda x: x.reshape(-1),
    "odd shape": lambda x: x.reshape(2, -1),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "time major flat": lambda x: x.transpose(0, 1).reshape(-1, D),
    "select": lambda x: x[2],
    "slice": lambda x: x[1::2],
    "of time": lambda x: x[:, -1],
    "chunk": lambda x: x.chunk(2)[1],
    "split": lambda x: x.split([1, 3])[1],
    "unbind": lambda x: x.unbind(1)[0],
    "stack": lambda x: torch.stack([x, x * 2]),
    "stack inside": lambda x: torch.stack([x, x * 2], 1),
    "cat": lambda x: torch.cat([x, x.flip(0)]),
    "cat of time": lambda x: torch.cat([x, x * 2], 1),
    "cat with nothing": lambda x: torch.cat([x[2:2], x[1:2].relu(), x[:0]]),
    "cat with a token": lambda x: torch.cat([torch.ones(1, 1, D).expand(B, 1, D).to(x), x], 1),
    "repeat": lambda x: x.repeat(2, 1, 1),
    "repeat interleave": lambda x: x.repeat_interleave(2, 0),
    "expand": lambda x: x[:, None].expand(B, 5, T, D),
    "roll": lambda x: x.roll(1, 0),
    "roll all": lambda x: x.roll(1),
    "flip": lambda x: x.flip(0, 1),
    "index": lambda x: x[torch.tensor([2, 0, 3])],
    "index pairs": lambda x: x[torch.tensor([2, 0]), torch.tensor([1, 2])],
    "index of time": lambda x: x[:, torch.tensor([2, 0])],
    "mask": lambda x: x[mask(x)],
    "mask of tokens": lambda x: x[x.detach().sum(-1) > 0],
    "index select": lambda x: x.index_select(0, torch.tensor([1, 1, 0])),
    "gather rows": lambda x: x.gather(0, torch.tensor([1, 0, 2])[:, None, None].expand(3, T, D)),
    "gather tokens": lambda x: x.gather(
        1, x.detach().norm(dim=-1).argsort(1)[..., None].expand_as(x)
    ),
    "sort tokens": lambda x: x.sort(1)[0],
    "sort rows": lambda x: x.sort(0)[0],
    "top tokens": lambda x: x.topk(2, 1)[0],
    "order and back": lambda x: x[x.detach().sum((1, 2)).argsort()].tanh(),
    "masked select": lambda x: x.masked_select(x.detach() > 0),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "masked scatter": lambda x: x.masked_scatter(
        torch.tensor([1, 0, 1], dtype=torch.bool)[:, None].expand(T, D), x[:, :2] * 2
    ),
    "scatter to some rows": lambda x: torch.zeros(B, D).to(x).masked_scatter(
        mask(x)[:, None], x[[0, 2, 3], 1]
    ),
    "masked fill": lambda x: x.masked_fill(x > 0, 0.0) + 0 * x,
    "masked fill in place": lambda x: (x * 1).masked_fill_(x.detach() > 0, 0.0) + 0 * x,
    "masked fill by a tensor": lambda x: x.masked_fill(x > 0, torch.ones(()).to(x)) + 0 * x,
    "in place": lambda x: (x * 1).abs_().copysign_(x.detach()),
    "put rows": put_rows,
    "routed": routed,
    "step by step": step_by_step,
    "halves": halves,
    "through a view": through_a_view,
    "windows": lambda x: x.unfold(1, 2, 1).reshape(-1, 2),
    "pad": lambda x: F.pad(x, (1, 1)) + 0 * x.sum(-1, keepdim=True),
    "linear": lambda x: F.linear(x, torch.ones(5, D).to(x)),
    "from the left": lambda x: torch.ones(5, T).to(x) @ x,
    "attention": attention,
    "own products": lambda x: torch.einsum("btd,bsd->bts", x, x),
    "layer norm": lambda x: F.layer_norm(x, (D,)),
    "softmax": lambda x: x.softmax(1),
    "mean": lambda x: x.mean(1),
    "convolution": lambda x: F.conv1d(x, torch.ones(2, T, 1).to(x)),
    "pooling": lambda x: F.adaptive_avg_pool1d(x, 1),
    "instance norm": lambda x: F.instance_norm(x),
    "cumsum": lambda x: x.cumsum(1),
    "fft": lambda x: torch.fft.fft(x, dim=1).real,
    "fft of reals and back": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=T, dim=1),
    "fft of planes": lambda x: torch.fft.fft2(x).abs(),
    "inverse": lambda x: torch.linalg.inv(x @ x.mT + torch.eye(T).to(x)),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(T).to(x)),
    "matrix exponential": lambda x: torch.linalg.matrix_exp(x @ x.mT),
    "orthogonal": lambda x: torch.linalg.qr(x)[0],
    "solved": lambda x: torch.linalg.solve(x @ x.mT + torch.eye(T).to(x), x),
    "solved by triangles": lambda x: torch.linalg.solve_triangular(
        (x @ x.mT).tril() + 3 * torch.eye(T).to(x), x, upper=False
    ),
    "sampled": lambda x: F.grid_sample(
        x[:, None], x[:, :, None, :].detach().tanh(), align_corners=False
    ) + 0 * x.sum((1, 2))[:, None, None, None],
    "polar": lambda x: torch.polar(x.abs() + 1, x * 2).real,
    "prelu": lambda x: F.prelu(x, torch.ones(1).to(x) / 4),
    "scatter": lambda x: torch.zeros(B, 5, D).to(x).scatter(
        1, torch.tensor([4, 0, 2])[None, :, None].expand(B, T, D), x
    ) + 0 * x.sum(1, keepdim=True),
    "scatter rows": lambda x: torch.zeros_like(x).scatter(
        0, torch.tensor([3, 0, 2, 1])[:, None, None].expand(B, T, D), x
    ),
    "one block at a time": one_block_at_a_time,
    "masked fill of rows in place": lambda x: (x.flatten(0, 1) * 1).masked_fill_(x.flatten(0, 1) > 1, 0.0),
    "compared in place": lambda x: (x * 1).transpose(0, 1).gt_(0.0) + x.transpose(0, 1),
    "solve triangular": lambda x: torch.linalg.solve_triangular(matrices(x), x, upper=False),
    "solve": lambda x: torch.linalg.solve(matrices(x), x),
    "solve for vectors": lambda x: torch.linalg.solve(matrices(x), x[:, :, 0]),
    "one matrix for all": lambda x: torch.linalg.solve(9 * torch.eye(T).to(x), x),
    "solve for others": lambda x: torch.linalg.solve(matrices(x), torch.ones(B, 1, T, 2).to(x)),
    "cholesky solve": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(matrices(x))),
    "singular values": lambda x: torch.linalg.svd(x)[1],
    "eigenvalues": lambda x: torch.linalg.eigh(matrices(x))[0],
    "determinant": lambda x: torch.linalg.slogdet(matrices(x))[1],
    "exponential": lambda x: torch.linalg.matrix_exp(matrices(x) / 9),
    "log sigmoid": lambda x: F.logsigmoid(x).flatten(0, 1),
    "randomly leaky": lambda x: F.rrelu(x.transpose(0, 1), training=True),
    "spectrum": lambda x: torch.fft.rfft(x.flatten(1)).real,
    "filtered": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=T, dim=1),
    "affine": lambda x: F.affine_grid(x.transpose(1, 2), [B, 1, 2, 2], align_corners=False),
    "shuffled channels": lambda x: F.channel_shuffle(x.transpose(1, 2)[..., None], 2),
    "bilinear": lambda x: F.bilinear(x.flatten(0, 1), x.flatten(0, 1), x.new_ones(5, D, D)),
    "cross": lambda x: torch.linalg.cross(x, x.exp(), dim=1).transpose(0, 1),
    "complex": lambda x: torch.complex(x, x).transpose(0, 1).abs(),
    "rows of limited norm": lambda x: x.renorm(2, 0, 0.1),
    "message passing": message_passing,
    "bags": bags,
    "take": lambda x: x.take(torch.arange(B * T * D).flip(0).view(-1, D)),
    "put": lambda x: torch.zeros_like(x).put(torch.arange(B * T * D).flip(0).view_as(x), x),
    "strided": lambda x: x.as_strided((D, B, 2), (1, T * D, D), D).contiguous(),
    "strided rows": lambda x: x[1:].as_strided((2, D), (T * D, 1), T * D).contiguous(),
    "packed": lambda x: pack_padded_sequence(
        x, torch.tensor([2, 1, 3, 1]), batch_first=True, enforce_sorted=False
    ).data,
    "packed and padded": packed_and_padded,
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_label_is_that_of_each_element(name: str) -> None:
    function = FOLLOWED[name]
    result, trail = labelled(function, (T, D))
    state = trail.state(result)
    assert isinstance(state, Labels), state
    depends = dependence(function, (T, D))
    assert bool((depends.sum(0) <= 1).all()), "the test itself mixes samples"
    ids = state.ids.expand(result.shape)
    known = depends.any(0)
    assert known.any()
    # An element that depends on a sample has that sample's label.
    assert torch.equal(ids[known], depends.int().argmax(0)[known])


def tokens_of(x: Tensor) -> Tensor:
    """Two tokens of each of the samples 3, 0 and 0 again, as rows of pictures come into a text."""
    return torch.tensor([[0, 0, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0]]).bool()


INTO_PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.masked_scatter(
        tokens_of(x)[..., None].expand_as(x), x[torch.tensor([3, 0, 0])] * 2
    ),
    "elements": lambda x: x.masked_scatter(x.detach() > 0, x.flip(0) * 2),
    "elements of each row": lambda x: x.masked_scatter(tokens_of(x)[..., None], x.flip(0)),
    "into constants": lambda x: torch.ones_like(x).masked_scatter(
        tokens_of(x)[..., None].expand_as(x), x.flip(0) * 2
    ),
    "its own": lambda x: x.masked_scatter(torch.ones(B, T, D).bool(), x * 2),
    "in place": lambda x: (x * 1).masked_scatter_(x.detach() > 0, x.flip(0) * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", INTO_PLACES)
def test_elements_that_a_mask_puts_into_their_places(name: str) -> None:
    function = INTO_PLACES[name]
    torch.manual_seed(0)
    x = torch.randn(B, T, D, dtype=torch.float64).requires_grad_()
    with Trail([x], B) as trail:
        result = function(x)
    state = trail.state(result)
    assert isinstance(state, Labels), state
    assert state.moved is (name in ("elements", "in place"))  # by values, not by a constant mask
    depends = dependence(function, (T, D))
    known = depends.any(0)
    assert torch.equal(state.ids.expand(result.shape)[known], depends.int().argmax(0)[known])


def test_what_a_mask_puts_into_its_place_without_a_gradient() -> None:
    x = torch.randn(B, T, D)
    with Trail([x], B) as trail:
        result = x.masked_scatter(x > 0, x.flip(0))
    state = trail.state(result)
    assert isinstance(state, Labels) and state.ids.flatten().tolist() == list(range(B))
    assert not state.moved


def test_written_to_empty_memory() -> None:
    result, trail = labelled(into_empty, (T, D))
    state = trail.state(result)
    assert isinstance(state, Labels)
    assert state.ids.flatten().tolist() == list(range(B))
    assert state.ids.shape == (1, B, 1)


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of the batch": lambda x: x.mean(0),
    "mean of all": lambda x: x - x.mean(),
    "across the batch": lambda x: torch.ones(5, B).to(x) @ x.flatten(1),
    "contrast": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "neighbours": lambda x: x + x.roll(1, 0),
    "chosen by any": lambda x: torch.where((x.detach() > 1).any(), x, x * 2),
    "masked by others": lambda x: x.masked_fill(x.detach().flip(0) > 0, 0.0),
    "a place that all choose": lambda x: x[:, x.detach().sum((0, 2)).argmax()[None]],
    "places where any is": lambda x: x[:, (x.detach() > 1).any(0).any(-1)],
    "selected by all": lambda x: x.index_select(1, x.detach().sum((0, 2)).argmax()[None]),
    "places of others": lambda x: x.gather(1, x.detach().flip(0).argsort(1)),
    "batch statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "softmax of the batch": lambda x: x.softmax(0),
    "fft of the batch": lambda x: torch.fft.fft(x, dim=0).real,
    "solved across samples": lambda x: torch.linalg.solve_triangular(
        torch.ones(B, B).to(x).tril(), x.flatten(1), upper=False
    ),
    "inverse of all": lambda x: torch.linalg.inv(x.flatten(1)[:, :B] + torch.eye(B).to(x)),
    "time for samples": lambda x: x.new_ones(B, B, D) * x[:, :1] + x[:, 0],
    "added up": lambda x: torch.zeros(2, T, D).to(x).index_add(
        0, torch.tensor([0, 1, 0, 1]), x
    ),
    "channels of limited norm": lambda x: x.renorm(2, 1, 0.1),
    "a system of the batch": lambda x: torch.linalg.solve(
        torch.ones(T, B, B).to(x) + torch.eye(B).to(x), x.transpose(0, 1)
    ),
    "spectrum of the batch": lambda x: torch.fft.fft(x, dim=0).real,
    "one bag for all": lambda x: F.embedding_bag(
        torch.zeros(B, dtype=torch.long), x.new_ones(1, D), torch.tensor([0]), mode="sum",
        per_sample_weights=x[:, 0, 0],
    ),
    "attention over samples": lambda x: F.scaled_dot_product_attention(
        x[None].transpose(1, 2), x[None].transpose(1, 2), x[None].transpose(1, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_elements_of_several_samples_end_the_trail(name: str) -> None:
    result, trail = labelled(MIXED[name], (T, D))
    state = trail.state(result)
    assert isinstance(state, Lost) and state.mixed, state


def test_unknown_operations_end_the_trail() -> None:
    result, trail = labelled(
        lambda x: torch.segment_reduce(x, "sum", lengths=torch.ones(B).long()), (T, D)
    )
    state = trail.state(result)
    assert isinstance(state, Lost) and not state.mixed and "segment_reduce" in state.reason


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.normal(0.0, x.exp()),
        lambda x: torch.poisson(x.exp()),
        lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
        lambda x: torch.multinomial(x.exp()[..., 0], 2)[..., None],
    ],
)
def test_what_is_drawn_from_a_samples_chances_is_its_own(draw: Callable[[Tensor], Tensor]) -> None:
    result, trail = labelled(lambda x: draw(x).flatten(0, 1), (T, D))
    state = trail.state(result)
    assert isinstance(state, Labels)
    assert state.ids.flatten().tolist() == [i for i in range(B) for _ in range(len(result) // B)]


def test_memory_written_past_torch_is_not_taken_for_constants() -> None:
    def by_numpy(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.numpy()[...] = x.numpy() * 2
        return out + 1

    result, trail = labelled(by_numpy, (T, D))
    assert isinstance(trail.state(result), Lost)


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks:UserWarning"
)  # of some versions of torch
def test_sparse_tensors_end_the_trail_if_they_hold_what_is_the_samples() -> None:
    places = torch.tensor([[0, 1], [1, 0]])

    def sparse(values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(places, values, (2, 2), check_invariants=True)

    result, trail = labelled(lambda x: sparse(x[0, 0]).to_dense() + 1, (T, D))
    assert isinstance(trail.state(result), Lost)
    result, trail = labelled(lambda x: x + sparse(torch.ones(2)).to_dense()[0], (T, D))
    state = trail.state(result)
    assert isinstance(state, Labels) and state.ids.flatten().tolist() == [0, 1, 2, 3]


def test_a_view_is_not_taken_for_another_of_its_shape() -> None:
    result, trail = labelled(seen_turned, (T, D))
    state = trail.state(result)
    depends = dependence(seen_turned, (T, D)).int().argmax(0)
    assert not isinstance(state, Labels) or torch.equal(state.ids.expand(B, B), depends)


def test_label_is_small() -> None:
    result, trail = labelled(lambda x: (x.view(B, T, D).relu() * 2)[:, 1:].contiguous(), (T, D))
    state = trail.state(result)
    assert isinstance(state, Labels) and state.ids.shape == (B, 1, 1)


def test_a_view_of_square_memory_that_was_written_to_later_is_not_taken_for_the_whole() -> None:
    def turned(x: Tensor) -> Tensor:
        h = torch.zeros(B, B).to(x)
        view = h.t()
        h.copy_(x)
        return view * 1

    result, trail = labelled(turned, (B,))
    state = trail.state(result)
    assert not isinstance(state, Labels) or state.ids.flatten().tolist() == [0, 1, 2, 3] * B


def test_dimensions_of_size_one_of_a_part_that_is_the_whole() -> None:
    def chunked(x: Tensor) -> Tensor:
        out = torch.zeros(B, T, 1, D).to(x)
        for chunk in range(1):
            out[:, :, chunk] = x * 2
        return out.view(B * T, D)

    result, trail = labelled(chunked, (T, D))
    state = trail.state(result)
    assert isinstance(state, Labels)
    assert state.ids.flatten().tolist() == [b for b in range(B) for _ in range(T)]


def test_views_see_what_is_written_to_others() -> None:
    def swapped(x: Tensor) -> Tensor:
        h = x.clone()
        view = h.view(B, -1)
        h[:2] = x[2:]
        return view * 1

    result, trail = labelled(swapped, (T, D))
    state = trail.state(result)
    known = isinstance(state, Labels)
    assert not known or state.ids.flatten().tolist() == [2, 3, 2, 3]
