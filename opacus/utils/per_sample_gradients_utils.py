"""Checks that a module's per-sample gradients are those of one sample at a time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from opacus.grad_sample import wrap_model
from opacus.utils.module_utils import trainable_parameters

Batch = Tensor | PackedSequence | list[Tensor] | tuple[Tensor, ...]


def clone_module(module: nn.Module) -> nn.Module:
    """A copy of a module, by saving and loading it."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copy: nn.Module = torch.load(buffer, weights_only=False)
    return copy


def is_batch_empty(batch: Batch) -> bool:
    """Whether a batch (or its first tensor) has no elements."""
    first = batch if isinstance(batch, Tensor) else batch[0]
    return bool(first.numel() == 0)


def get_grad_sample_modes(use_ew: bool = False) -> list[str]:
    """Modes whose per-sample gradients can be checked.

    Args:
        use_ew: Include ``"ew"``.
    """
    return ["hooks", "functorch", *(["ew"] if use_ew else [])]


def check_torch_version_for_ew_sample() -> bool:
    """Whether torch has expanded weights; every supported version has."""
    return True


class ModelWithLoss(nn.Module):
    """A module followed by the L1 distance of its output to zero.

    Args:
        module: The module.
        loss_reduction: ``"mean"`` or ``"sum"``.
    """

    supported_reductions: ClassVar[list[str]] = ["mean", "sum"]

    def __init__(self, module: nn.Module, loss_reduction: str = "mean") -> None:
        super().__init__()
        if loss_reduction not in self.supported_reductions:
            raise ValueError(
                f"Passed loss_reduction={loss_reduction}. Only {self.supported_reductions} "
                "supported."
            )
        self.wrapped_module = module
        self.criterion = nn.L1Loss(reduction=loss_reduction)

    def forward(self, x: Any) -> Tensor:
        """Loss of a batch; of a packed sequence, the mean over its sequences for ``"mean"``."""
        output = self.wrapped_module(*x) if type(x) is tuple else self.wrapped_module(x)
        if not isinstance(output, PackedSequence):
            return self.criterion(output, torch.zeros_like(output))
        if self.criterion.reduction == "sum":
            return self.criterion(output.data, torch.zeros_like(output.data))
        parts = unpack_packedsequences(output)
        return torch.stack([self.criterion(p, torch.zeros_like(p)) for p in parts]).mean()


def compute_microbatch_grad_sample(
    x: Any,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    chunk_method: Callable[[Any], Iterable[Any]] = iter,
) -> dict[str, Tensor]:
    """Per-sample gradients ``[B, *shape]`` by running one sample at a time.

    Args:
        x: Batch, ``[B, ...]`` or ``[T, B, ...]``, or a list of samples.
        module: The module.
        batch_first: Where the batch is.
        loss_reduction: Reduction over the elements of a sample.
        chunk_method: Splits ``x`` into samples.
    """
    with _reproducible():
        model = ModelWithLoss(clone_module(module), loss_reduction)
        named = list(trainable_parameters(model.wrapped_module))
        samples: dict[str, list[Tensor]] = {name: [] for name, _ in named}
        if not batch_first and type(x) is not list:
            x = x.transpose(0, 1)
        for sample in chunk_method(x):
            model.zero_grad()
            if type(sample) is not tuple:
                sample = sample.unsqueeze(0 if batch_first else 1)
            model(sample).backward()
            for name, parameter in named:
                grad = parameter.grad
                samples[name].append(torch.zeros_like(parameter) if grad is None else grad.clone())
    return {name: torch.stack(grads) for name, grads in samples.items()}


def compute_microbatch_grad_sample_tensor_or_seq(
    x: Tensor | PackedSequence,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
) -> dict[str, Tensor]:
    """:func:`compute_microbatch_grad_sample`, for packed sequences too."""
    samples = unpack_packedsequences(x) if isinstance(x, PackedSequence) else x
    return compute_microbatch_grad_sample(
        samples, module, batch_first=batch_first, loss_reduction=loss_reduction
    )


def compute_opacus_grad_sample(
    x: Any,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
) -> dict[str, Tensor]:
    """Per-sample gradients ``[B, *shape]`` of a private module, in one backward pass.

    Arguments are those of :func:`compute_microbatch_grad_sample`, and the mode.
    """
    with _reproducible():
        private = wrap_model(
            clone_module(module),
            grad_sample_mode,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
        )
        model = ModelWithLoss(private, loss_reduction)
        model.zero_grad()
        model(x).backward()
    return {name: p.grad_sample for name, p in trainable_parameters(private._module)}  # type: ignore[attr-defined]


def compute_grad_samples_microbatch_and_opacus(
    x: Any,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
    chunk_method: Callable[[Any], Iterable[Any]] = iter,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both kinds of per-sample gradients of a batch, one sample at a time first, for comparison.

    Arguments are those of :func:`compute_microbatch_grad_sample`, and the mode.

    Raises:
        RuntimeError: The batch is empty.
        ValueError: They are not of the same parameters.
    """
    if isinstance(x, PackedSequence):
        samples: Any = unpack_packedsequences(x)
    elif is_batch_empty(x):
        raise RuntimeError("x is expected to be non-empty.")
    else:
        samples = x
    alone = compute_microbatch_grad_sample(
        samples, module, batch_first, loss_reduction, chunk_method
    )
    together = compute_opacus_grad_sample(x, module, batch_first, loss_reduction, grad_sample_mode)
    if alone.keys() != together.keys():
        raise ValueError(
            f"Keys not matching: {sorted(alone.keys() ^ together.keys())} are on one side only"
        )
    return alone, together


def check_per_sample_gradients_are_correct(
    x: Any,
    module: nn.Module,
    *,
    batch_first: bool = True,
    atol: float = 10e-6,
    rtol: float = 10e-5,
    grad_sample_mode: str = "hooks",
) -> bool:
    """Whether per-sample gradients equal those of one sample at a time.

    Args:
        x: Batch.
        module: The module.
        batch_first: Where the batch is.
        atol: Absolute tolerance.
        rtol: Relative tolerance.
        grad_sample_mode: Mode to check.

    Raises:
        RuntimeError: The mode cannot take the batch in dimension 1.
    """
    if grad_sample_mode == "ew" and not batch_first:
        raise RuntimeError("Batch should be first dimension.")
    return all(
        _agree(x, module, batch_first, reduction, grad_sample_mode, atol, rtol)
        for reduction in ("sum", "mean")
    )


def unpack_packedsequences(X: PackedSequence) -> list[Tensor]:  # noqa: N803 (Opacus' name)
    """The sequences of a packed batch, in the order of its samples, each ``[T_i, ...]``."""
    padded, lengths = pad_packed_sequence(X, batch_first=True)
    return [sequence[:length] for sequence, length in zip(padded, lengths, strict=True)]


def _agree(
    x: Any,
    module: nn.Module,
    batch_first: bool,
    reduction: str,
    mode: str,
    atol: float,
    rtol: float,
) -> bool:
    alone, together = compute_grad_samples_microbatch_and_opacus(
        x, module, batch_first, reduction, mode
    )
    return all(
        grad.shape == alone[name].shape and torch.allclose(grad, alone[name], rtol=rtol, atol=atol)
        for name, grad in together.items()
    )


@contextmanager
def _reproducible() -> Iterator[None]:
    """Deterministic algorithms and a fixed seed, restored afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
