"""A step adds noise and divides in one pass; whoever does either alone finds the sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opacus.optimizers import DPOptimizer

SIGMA, CLIP, BATCH = 1.5, 0.5, 7


def made(
    kind: type[DPOptimizer] = DPOptimizer,
    dtype: torch.dtype = torch.float32,
    reduction: str = "mean",
    batches: int = 1,
) -> Any:
    """An optimizer that is about to take its step, after so many physical batches but for one."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(5, 4).to(dtype)), nn.Parameter(torch.randn(3).to(dtype))]
    optimizer: Any = kind(
        torch.optim.SGD(parameters, lr=1.0),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=BATCH,
        loss_reduction=reduction,
        generator=torch.Generator().manual_seed(3),
    )
    for number in range(batches):
        if number:
            optimizer.signal_skip_step(True)
            optimizer.step()
            optimizer.zero_grad()
        for p in parameters:
            p.grad_sample = torch.randn(6, *p.shape).to(dtype)  # type: ignore[attr-defined]
    optimizer.signal_skip_step(False)
    return optimizer


def grads(optimizer: Any) -> list[torch.Tensor]:
    return [p.grad.double() for p in optimizer.params]


def by_hand(optimizer: Any) -> list[torch.Tensor]:
    """What a step releases, from its parts."""
    optimizer.clip_and_accumulate()
    optimizer.add_noise()
    assert max(float(g.abs().max()) for g in grads(optimizer)) > CLIP * SIGMA  # not divided yet
    optimizer.scale_grad()
    return grads(optimizer)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_releases_what_its_parts_do(
    dtype: torch.dtype, reduction: str, batches: int
) -> None:
    one, other = (made(DPOptimizer, dtype, reduction, batches) for _ in range(2))
    one.step()
    want = by_hand(other)
    sums = [p.summed_grad.double() for p in one.params]
    divisor = 1.0 if reduction == "sum" else float(BATCH)
    for got, expected, total in zip(grads(one), want, sums, strict=True):
        torch.testing.assert_close(got, expected, rtol=torch.finfo(dtype).eps, atol=0)
        assert (got * divisor - total).std() > 0.5 * SIGMA * CLIP  # the noise is divided, too
    one.zero_grad()
    for p in one.params:
        p.grad_sample = torch.zeros(6, *p.shape).to(dtype)
    by_hand(one)  # nothing of the step before is left


class OwnNoise(DPOptimizer):
    """Looks at the sum with its noise."""

    def add_noise(self) -> None:
        super().add_noise()
        self.seen = grads(self)


class OwnMean(DPOptimizer):
    """Divides by more."""

    def scale_grad(self) -> None:
        self.seen = grads(self)
        for p in self.params:
            assert p.grad is not None
            p.grad.div_(2 * BATCH)


@pytest.mark.parametrize(("kind", "divisor"), [(OwnNoise, BATCH), (OwnMean, 2 * BATCH)])
def test_a_part_of_ones_own_finds_the_sum(kind: type[DPOptimizer], divisor: int) -> None:
    optimizer, plain = made(kind), made()
    optimizer.step()
    plain.step()
    for got, seen, want in zip(grads(optimizer), optimizer.seen, grads(plain), strict=True):
        torch.testing.assert_close(seen, want * BATCH, rtol=1e-6, atol=0)
        torch.testing.assert_close(got, seen / divisor, rtol=1e-6, atol=0)


class OwnStep(DPOptimizer):
    """Puts the parts together by itself, and divides by itself."""

    def pre_step(self, closure: Any = None) -> bool:
        self.clip_and_accumulate()
        self.add_noise()
        for p in self.params:
            assert p.grad is not None
            p.grad.div_(BATCH)
        return True


def test_a_step_of_ones_own_finds_the_sum() -> None:
    optimizer, plain = made(OwnStep), made()
    optimizer.step()
    plain.step()
    for got, want in zip(grads(optimizer), grads(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "moment"), [("add_noise", 1), ("scale_grad", 0)])
def test_a_part_that_is_wrapped_finds_the_sum(name: str, moment: int) -> None:
    optimizer, plain = made(), made()
    original, seen = getattr(optimizer, name), []

    def around() -> None:
        seen.append([p.grad.clone() if p.grad is not None else None for p in optimizer.params])
        original()
        seen.append([p.grad.clone() for p in optimizer.params])

    setattr(optimizer, name, around)
    optimizer.step()
    plain.step()
    want = grads(plain)
    torch.testing.assert_close(grads(optimizer), want, rtol=1e-6, atol=0)
    for total, mean in zip(seen[moment], want, strict=True):
        torch.testing.assert_close(total.double(), mean * BATCH, rtol=1e-6, atol=0)


def test_after_a_step_that_failed_nothing_counts_as_divided() -> None:
    optimizer, plain = made(), made()

    def fails(*args: Any) -> None:
        raise ValueError("no")

    optimizer._count_step = fails
    with pytest.raises(ValueError, match="no"):
        optimizer.step()
    for p, other in zip(optimizer.params, plain.params, strict=True):
        p.grad = torch.ones_like(p)
        other.grad = torch.ones_like(p)
    optimizer.scale_grad()
    assert all(bool((p.grad - 1 / BATCH).abs().max() < 1e-6) for p in optimizer.params)
