"""Whether deferred and immediate norms are the same numbers, and the right ones."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memory_test.common.dp_transformer import DPTransformer

LENGTH = 24
VOCAB = 64
# fp32: order of summation only. The reference is fp64.
SAME = 1e-5
RIGHT = 1e-4


@dataclass(frozen=True)
class Error:
    """The largest difference of two vectors, relative to the size of the second."""

    what: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether it is within its limit; NaN is not."""
        return self.value <= self.limit

    def __str__(self) -> str:
        sign = "<=" if self.holds else ">"
        return f"{self.what}: relative error {self.value:.1e} {sign} {self.limit:.0e}"


def check_mode(mode: str, device: torch.device, batch: int) -> list[Error]:
    """Errors of norms and clipped gradients of one mode, on one process.

    Raises:
        RuntimeError: The comparison would say nothing: norms were not deferred, or no sample
            or every sample was clipped.
    """
    torch.manual_seed(0)
    model = DPTransformer(vocab_size=VOCAB, width=32, depth=3, heads=4, max_length=LENGTH).to(
        device
    )
    tokens = torch.randint(VOCAB, (batch, LENGTH), device=device)
    norms, gradients = reference(model, tokens)
    limit = float(norms.sort().values[batch // 2]) * 0.999  # some are clipped, some are not
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    clipped = int((factors < 1).sum())
    if batch > 1 and clipped in (0, batch):
        raise RuntimeError(f"{clipped} of {batch} samples are clipped: nothing is compared")
    sums = torch.einsum("b,bn->n", factors, gradients)
    found = {d: private_step(mode, model, tokens, limit, deferred=d) for d in (False, True)}
    return [
        Error("deferred and immediate norms", *_against(found[True][0], found[False][0], SAME)),
        Error("deferred and immediate sums", *_against(found[True][1], found[False][1], SAME)),
        Error("norms and one sample at a time", *_against(found[True][0], norms, RIGHT)),
        Error("sums and one sample at a time", *_against(found[True][1], sums, RIGHT)),
    ]


def reference(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Norms ``[B]`` and gradients ``[B, N]`` of one sample at a time, in fp64."""
    exact = copy.deepcopy(model).double()
    rows = []
    for sample in tokens:
        exact.zero_grad()
        loss_of_batch(nn.CrossEntropyLoss(), exact(sample[None]), sample[None], {}).backward()
        rows.append(torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None]))
    gradients = torch.stack(rows)
    return gradients.norm(dim=1), gradients


def private_step(
    mode: str, model: nn.Module, tokens: Tensor, limit: float, deferred: bool
) -> tuple[Tensor, Tensor]:
    """Norms ``[B]`` and the clipped sum ``[N]`` that ``mode`` finds."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from opacus import PrivacyEngine

    module = copy.deepcopy(model)
    samples = TensorDataset(tokens.cpu())
    sampler: Any = DistributedSampler(samples, 1, 0)
    if "fsdp" in mode:
        from opacus.utils.fsdp_utils import FSDP2Wrapper

        module = FSDP2Wrapper(module)
    private, _, criterion, _ = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(samples, batch_size=len(tokens), sampler=sampler),
        noise_multiplier=0.0,
        max_grad_norm=limit,
        poisson_sampling=False,
        grad_sample_mode=mode,
        deferred_norm=deferred,
    )
    waited = _count_waiting(private)
    shape = {"shape": (len(tokens), LENGTH - 1, VOCAB)}
    loss_of_batch(criterion, private(tokens), tokens, shape).backward()
    if bool(waited[0]) != deferred:
        raise RuntimeError(f"{waited[0]} norms waited in mode {mode} with deferred_norm={deferred}")
    parts = [_whole(p.grad).flatten() for p in private.parameters() if p.grad is not None]
    return private.per_sample_gradient_norms.double(), torch.cat(parts).double()


def loss_of_batch(criterion: Any, logits: Tensor, tokens: Tensor, shape: Any) -> Any:
    """The loss of predicting each next token."""
    flat = logits[:, :-1].reshape(-1, VOCAB)
    return criterion(flat, tokens[:, 1:].reshape(-1), **shape)


def _count_waiting(private: Any) -> list[int]:
    """Number of norms that wait when the first backward pass is over; filled in later."""
    waited, inner = [0], private.compute_all_norms_parallel

    def counted() -> Tensor:
        waited[0] = len(private._deferred_norm_cache)
        return inner()

    private.compute_all_norms_parallel = counted
    return waited


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _against(value: Tensor, expected: Tensor, limit: float) -> tuple[float, float]:
    difference = (value.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max()), limit
