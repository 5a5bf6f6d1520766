"""The criterion and the loss of ghost clipping: one backward() call, clipped gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opacus.core.losses import per_sample_losses
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping

PrivateModule = GradSampleHooksFastGradientClipping | GradSampleModuleFastGradientClipping


class DPTensorFastGradientClipping:
    """A loss of B samples whose ``backward()`` leaves clipped gradients.

    Behaves like a zero-dimensional tensor: arithmetic acts on the per-sample losses
    and gives another such loss; everything else acts on :meth:`detach`.

    Args:
        module: The private module, or the hooks object if it is not wrapped.
        optimizer: The private optimizer.
        loss_per_sample: ``[B]`` losses with their graph.
        loss_reduction: ``"mean"`` or ``"sum"``, for the value and the averaging.
    """

    def __init__(
        self,
        module: PrivateModule,
        optimizer: DPOptimizerFastGradientClipping,
        loss_per_sample: Tensor,
        loss_reduction: str = "mean",
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(
                f"loss_reduction = {loss_reduction!r}. Only 'sum' and 'mean' losses are supported"
            )
        self.module = module
        self.optimizer = optimizer
        self.loss_per_sample = loss_per_sample
        self.loss_reduction = loss_reduction

    def backward(self, retain_graph: bool = False) -> None:
        """Add the clipped sum of the per-sample gradients to the parameters' ``grad``.

        Two backward passes: norms, then the sum of ``c_i * loss_i`` with
        ``c_i = min(1, C / (||g_i|| + 1e-6))``.

        Raises:
            ValueError: A second call before ``optimizer.step()`` where gradient
                accumulation is forbidden (Poisson sampling).
            RuntimeError: A trainable parameter was used past its layer.
        """
        self._check_accumulation()
        self.module.norm_pass(self.loss_per_sample, retain_graph)
        self.module.sum_pass(self.loss_per_sample, self.module.clip(), retain_graph)
        self.optimizer.note_clipped_batch()

    def _check_accumulation(self) -> None:
        pending = self.optimizer._clipped_batches > 0
        if pending and not self.module.grad_accumulation_allowed:
            raise ValueError(
                "Poisson sampling is not compatible with grad accumulation. Call "
                "optimizer.step() and optimizer.zero_grad() after every backward pass, or use "
                "BatchMemoryManager to simulate large batches"
            )

    # --- like a tensor ---

    def detach(self) -> Tensor:
        """The reduced loss, without a graph. An empty batch has loss 0."""
        losses = self.loss_per_sample.detach()
        if self.loss_reduction == "sum" or losses.numel() == 0:
            return losses.sum()
        return losses.mean()

    def item(self) -> float:
        """The reduced loss as a Python number."""
        return self.detach().item()

    def _with(self, loss_per_sample: Tensor) -> DPTensorFastGradientClipping:
        return type(self)(self.module, self.optimizer, loss_per_sample, self.loss_reduction)

    def _operand(self, other: Any) -> Any:
        if not isinstance(other, DPTensorFastGradientClipping):
            return other
        if other.loss_reduction != self.loss_reduction:
            raise ValueError(
                "Cannot combine losses with different reductions: "
                f"{self.loss_reduction} vs {other.loss_reduction}"
            )
        return other.loss_per_sample

    def __add__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(self.loss_per_sample + self._operand(other))

    def __radd__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(other + self.loss_per_sample)

    def __sub__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(self.loss_per_sample - self._operand(other))

    def __rsub__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(other - self.loss_per_sample)

    def __mul__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(self.loss_per_sample * other)

    def __rmul__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(other * self.loss_per_sample)

    def __truediv__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(self.loss_per_sample / other)

    def __pow__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(self.loss_per_sample**other)

    def __neg__(self) -> DPTensorFastGradientClipping:
        return self._with(-self.loss_per_sample)

    def __repr__(self) -> str:
        shape = tuple(self.loss_per_sample.shape)
        return f"DPTensorFastGradientClipping(loss_reduction={self.loss_reduction}, shape={shape})"

    def __str__(self) -> str:
        return f"DPTensorFastGradientClipping({self.item():.4f})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.detach())

    def __lt__(self, other: Any) -> Any:
        return self.detach() < _plain(other)

    def __le__(self, other: Any) -> Any:
        return self.detach() <= _plain(other)

    def __gt__(self, other: Any) -> Any:
        return self.detach() > _plain(other)

    def __ge__(self, other: Any) -> Any:
        return self.detach() >= _plain(other)

    @property
    def requires_grad(self) -> bool:
        """Whether :meth:`backward` is possible."""
        return self.loss_per_sample.requires_grad

    def __getattr__(self, name: str) -> Any:
        # Anything else that loggers and trainers ask of a loss: the reduced value's.
        if name.startswith("__") or name == "loss_per_sample":
            raise AttributeError(name)
        return getattr(self.detach(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = torch.utils._pytree.tree_map_only(cls, _plain, args)
        kwargs = torch.utils._pytree.tree_map_only(cls, _plain, kwargs or {})
        return func(*args, **kwargs)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, DPTensorFastGradientClipping) else value


class DPLossFastGradientClipping:
    """A criterion that gives one loss a sample, packed for ghost clipping.

    Args:
        module: The private module, or the hooks object if it is not wrapped.
        optimizer: The private optimizer.
        criterion: A loss function with an attribute ``reduction`` that it honours, or a
            function that returns one loss a sample. Its ``reduction`` is switched to
            ``"none"`` during a call and restored after it, also after an error.
        loss_reduction: ``"mean"`` or ``"sum"``; must be that of module, optimizer and
            criterion.

    Raises:
        ValueError: The reductions differ.
    """

    def __init__(
        self,
        module: PrivateModule,
        optimizer: DPOptimizerFastGradientClipping,
        criterion: Any,
        loss_reduction: str = "mean",
    ) -> None:
        reductions = {
            "loss_reduction": loss_reduction,
            "module.loss_reduction": module.loss_reduction,
            "optimizer.loss_reduction": optimizer.loss_reduction,
            "criterion.reduction": getattr(criterion, "reduction", loss_reduction),
        }
        if loss_reduction not in ("mean", "sum") or len(set(reductions.values())) > 1:
            raise ValueError(
                "loss_reduction must be 'mean' or 'sum' and the same in the module, the "
                f"optimizer and the criterion, got {reductions}"
            )
        self.module = module
        self.optimizer = optimizer
        self.criterion = criterion
        self.loss_reduction = loss_reduction
        optimizer.expects_criterion = True

    def __call__(
        self, *args: Any, shape: Any = None, **kwargs: Any
    ) -> DPTensorFastGradientClipping:
        """Per-sample losses of a batch.

        Losses with further dimensions, such as one a token, are reduced to one a sample
        over them: summed for ``"sum"``; for ``"mean"`` averaged over the positions that
        are not ``ignore_index``, or, if the criterion has none, over all of them.

        Args:
            args: What the criterion takes.
            shape: Shape of the logits before they were flattened, ``(B, T, ...)``, if
                the criterion is called on ``B * T`` rows; the sample is the sequence.
            kwargs: What the criterion takes.

        Raises:
            ValueError: The criterion did not give one loss (or more) a sample.
        """
        losses = self._unreduced(args, kwargs)
        targets = kwargs.get("target", args[1] if len(args) > 1 else None)
        losses = per_sample_losses(
            losses,
            rows=_rows(args, kwargs),
            samples=self._samples(shape),
            targets=targets,
            ignore_index=getattr(self.criterion, "ignore_index", None),
            reduction=self.loss_reduction,
        )
        return DPTensorFastGradientClipping(
            self.module, self.optimizer, losses, self.loss_reduction
        )

    def _samples(self, shape: Any) -> int | None:
        """Number of samples: as told, else that of the model's latest batch."""
        return int(shape[0]) if shape is not None else self.module.latest_batch

    def _unreduced(self, args: Any, kwargs: Any) -> Any:
        if not hasattr(self.criterion, "reduction"):
            if _takes_reduction(self.criterion):
                kwargs = {**kwargs, "reduction": "none"}
            return self.criterion(*args, **kwargs)
        before = self.criterion.reduction
        self.criterion.reduction = "none"
        try:
            return self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = before


def _takes_reduction(criterion: Any) -> bool:
    try:
        parameters = inspect.signature(criterion).parameters
    except (TypeError, ValueError):
        return False
    return "reduction" in parameters


def _rows(args: Any, kwargs: Any) -> int | None:
    """Number of rows that the criterion was called on."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > 0:
            return int(value.shape[0])
    return None
