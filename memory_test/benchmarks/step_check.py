"""Is a mode right? Its norms and its clipped sum, against one sample at a time.

Two checks, both by means that share nothing with the package:

* small: a small model of the same class, in fp32 and in the timed type, against float64
  autograd on the whole, unsharded model.
* full: the very model and batch size that will be timed, against the non-private sharded
  model, which runs backward for each sample of each rank by itself. Compiled blocks round in other
  places than that eager model does: a compiled mode may differ from it by 1.5 times as much as the
  compiled non-private step does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memory_test.benchmarks.contenders import Contender, Recipe, build
from memory_test.benchmarks.layouts import data_rank
from memory_test.benchmarks.step_truth import Expected, copies_by_name, local, oracle, over_ranks
from memory_test.benchmarks.ways import Amount, Way
from memory_test.common.failures import UsageError
from memory_test.common.launch import Runtime
from memory_test.common.models import SHAPES

# By family, and by whether the head is tied.
SMALL = {("llama", False): "tiny-llama", ("llama", True): "tiny-tied", ("own", False): "tiny"}
SMALL_BATCH, SMALL_TOKENS = 3, 16
# Largest relative errors of norms, and of the clipped sum as a whole.
TOLERANCES = {
    torch.float64: (1e-3, 1e-3),
    torch.float32: (1e-3, 1e-3),
    torch.bfloat16: (2e-2, 5e-2),
    torch.float16: (2e-2, 5e-2),
}
FLOAT8_TOLERANCES = (2e-2, 1e-1)  # each stored element is rounded to 4 bits of mantissa


@dataclass(frozen=True)
class Check:
    """Outcome of one comparison.

    Attributes:
        what: ``"small fp32"``, ``"full bf16"``, ...
        samples: Number of samples, over all ranks.
        clipped: How many of them had a norm above C.
        norm_error: Largest relative error of a norm.
        sum_error: Norm of the difference of the clipped sums, relative.
        tolerances: The largest that are allowed, of both.
    """

    what: str
    samples: int
    clipped: int
    norm_error: float
    sum_error: float
    tolerances: tuple[float, float]

    @property
    def holds(self) -> bool:
        """Whether both errors are small; not if they are NaN."""
        return self.norm_error <= self.tolerances[0] and self.sum_error <= self.tolerances[1]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "tolerances": list(self.tolerances), "holds": self.holds}

    def __str__(self) -> str:
        return (
            f"{self.what}: norms differ by {self.norm_error:.1e} (allowed "
            f"{self.tolerances[0]:.0e}), the clipped sum by {self.sum_error:.1e} (allowed "
            f"{self.tolerances[1]:.0e})"
        )


def small_checks(recipe: Recipe, way: Way, runtime: Runtime) -> list[Check]:
    """Compare a small model of the same class with float64; a collective call."""
    shape = SHAPES.get(recipe.suite.model)
    known = None if shape is None else SMALL.get((shape.family, shape.tied))
    if known is None:
        raise UsageError(f"--model {recipe.suite.model}: only Llama and own shapes can be checked")
    suite = replace(recipe.suite, model=known)
    small = replace(
        recipe, suite=suite, tokens=SMALL_TOKENS, batch=SMALL_BATCH, dtype=torch.float32
    )
    ids = _small_tokens(small, data_rank(suite, runtime).count, runtime.device)
    expected = oracle(small, ids, runtime.device)
    small = replace(small, max_grad_norm=expected.max_grad_norm)
    dtypes = dict.fromkeys((torch.float32, recipe.dtype))
    if way.budget is not None:  # nothing of a small model is held
        way = replace(way, budget=None, held=Amount(0))
    return [_small_check(replace(small, dtype=d), way, ids, expected, runtime) for d in dtypes]


def _small_tokens(recipe: Recipe, count: int, device: torch.device) -> Tensor:
    """``[W, B, T]``, the same on all ranks; the first sample repeats one token."""
    vocab = SHAPES[recipe.suite.model].sizes["vocab_size"]
    shape = (count, recipe.batch, recipe.tokens)
    ids = torch.randint(1, vocab, shape, generator=torch.Generator().manual_seed(7))
    ids[:, 0] = ids[:, 0, :1]  # norms that differ: some are clipped, some are not
    return ids.to(device)


def _small_check(
    recipe: Recipe, way: Way, ids: Tensor, expected: Expected, runtime: Runtime
) -> Check:
    contender = build(recipe, way, runtime)
    norms, sums = observe(contender, ids[contender.data.rank])
    whole = {n: s.full_tensor() if hasattr(s, "full_tensor") else s for n, s in sums.items()}
    error = relative(whole, expected.sums, contender, None)
    return _compare("small", norms, error, expected, recipe.dtype, contender, runtime)


def full_check(
    contender: Contender,
    ids: Tensor,
    expected: Expected,
    dtype: torch.dtype,
    runtime: Runtime,
    rounding: float = 0.0,
) -> Check:
    """Compare a model that is going to be timed; a collective call.

    Args:
        contender: It.
        ids: ``[B, T]`` tokens of this rank.
        expected: What is right.
        dtype: The timed type.
        runtime: This process.
        rounding: Relative difference of non-private gradients of the same kind from what computed
            ``expected``.
    """
    norms, sums = observe(contender, ids)
    parts = {name: local(value) for name, value in sums.items()}
    del sums
    error = relative(parts, expected.sums, contender, runtime)
    del parts
    contender.park()
    check = _compare("full", norms, error, expected, dtype, contender, runtime)
    norm, total = check.tolerances
    return replace(check, tolerances=(norm, max(total, 1.5 * rounding)))


def observe(contender: Contender, ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """``[B]`` norms of this rank's samples, and the clipped sum before noise, by name."""
    contender.park()
    contender.backward(ids)
    norms = _norms_seen(contender)
    count = contender.way.accumulate
    if count > 1:
        contender.optimizer._check_skip_next_step()  # what a step would do
    contender.optimizer.clip_and_accumulate()
    sums = {n: p.summed_grad.detach() for n, p in contender.parameters.items()
            if getattr(p, "summed_grad", None) is not None}  # fmt: skip
    if count > 1:  # each of them the same batch
        sums = {name: value / count for name, value in sums.items()}
    contender.optimizer.reset_accumulation()  # the noise is never added: nothing is stepped
    contender.park()
    return norms, sums


def _norms_seen(contender: Contender) -> Tensor:
    """The norms by which the mode clips."""
    if contender.told_shape:
        return contender.model.per_sample_gradient_norms.float()
    samples = [p.grad_sample.flatten(1).float() for p in contender.parameters.values()]
    return torch.stack([s.square().sum(1) for s in samples]).sum(0).sqrt()


def _compare(
    kind: str, norms: Tensor, sum_error: float, expected: Expected, dtype: torch.dtype,
    contender: Contender, runtime: Runtime,
) -> Check:  # fmt: skip
    what = f"{kind} {str(dtype).removeprefix('torch.')}"
    tolerances = FLOAT8_TOLERANCES if contender.way.float8 else TOLERANCES[dtype]
    want = expected.norms[contender.data.rank].to(norms.device)
    error = float("inf")
    if norms.shape == want.shape:
        error = ((norms.double() - want.double()).abs() / want.double()).max().item()
    finite = [v if v == v else float("inf") for v in (error, sum_error)]  # NaN is not largest
    worst = runtime.largest(finite)
    clipped = int((expected.norms > expected.max_grad_norm).sum())
    return Check(what, expected.norms.numel(), clipped, worst[0], worst[1], tolerances)


def relative(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    contender: Contender,
    runtime: Runtime | None,
) -> float:
    """``|got - want| / |want|`` over all parameters; with ``runtime``, over all ranks' shards."""
    copies = copies_by_name(contender, runtime) if runtime else dict.fromkeys(want, 1)
    squares = torch.zeros(2, dtype=torch.float64)
    for name, wanted in want.items():
        seen = got.get(name)
        right = wanted if seen is None else wanted.to(seen.device)
        difference = right if seen is None else seen.to(right.dtype) - right
        pair = [difference.double().square().sum(), right.double().square().sum()]
        squares += torch.stack(pair).cpu() / copies[name]
    if runtime:
        squares = over_ranks(squares, contender, runtime)
    return float((squares[0] / squares[1]).sqrt())
