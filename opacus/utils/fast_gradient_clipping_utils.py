"""The criterion and the loss of ghost clipping: one backward() call, clipped gradients."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from opacus.core.platform.torch_internals import outside_graphs
from opacus.core.record.named import NamedUnits
from opacus.core.step.arithmetic import ARITHMETIC, combined
from opacus.core.step.loss_scale import SCALING, calling_scaler
from opacus.core.step.losses import MEANS, as_reduced, per_sample_losses, rows_of, samples_in
from opacus.core.step.private_step import clip_batch
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping

PrivateModule = GradSampleHooksFastGradientClipping | GradSampleModuleFastGradientClipping


class DPTensorFastGradientClipping(Tensor):
    """A loss of B samples whose ``backward()`` leaves clipped gradients.

    A zero-dimensional tensor with the value of the reduced loss. Arithmetic acts on the
    per-sample losses and gives another such loss; everything else acts on
    :meth:`detach` and gives ordinary tensors without a graph.

    Args:
        module: The private module, or the hooks object if it is not wrapped.
        optimizer: The private optimizer.
        loss_per_sample: ``[B]`` losses with their graph.
        loss_reduction: ``"mean"`` or ``"sum"``, for the value and the averaging.

    Raises:
        ValueError: ``loss_reduction`` is neither.
    """

    # The factor that a GradScaler put on the losses; see opacus.core.step.loss_scale.
    loss_scale: Tensor | None

    @staticmethod
    def __new__(
        cls: type[DPTensorFastGradientClipping],
        module: PrivateModule,
        optimizer: DPOptimizerFastGradientClipping,
        loss_per_sample: Tensor,
        loss_reduction: str = "mean",
        *_: Any,
    ) -> DPTensorFastGradientClipping:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(
                f"loss_reduction = {loss_reduction!r}. Only 'sum' and 'mean' losses are supported"
            )
        losses = loss_per_sample.detach()
        mean = loss_reduction == "mean" and losses.numel() > 0
        return Tensor._make_subclass(cls, losses.mean() if mean else losses.sum())

    def __init__(
        self,
        module: PrivateModule,
        optimizer: DPOptimizerFastGradientClipping,
        loss_per_sample: Tensor,
        loss_reduction: str = "mean",
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.loss_per_sample = loss_per_sample
        self.loss_reduction = loss_reduction
        self.loss_scale = None

    def backward(self, retain_graph: bool = False) -> None:  # type: ignore[override]
        """Add the clipped sum of the per-sample gradients to the parameters' ``grad``.

        Norms first, then the sum of ``c_i * g_i`` with ``c_i = min(1, C / (||g_i|| +
        1e-6))``. After ``scaler.scale(loss)`` norms are those of the unscaled gradients,
        and ``grad`` holds the clipped sum times the scale, for the scaler to divide.

        Args:
            retain_graph: Keep the graph, for gradients of something else.

        Raises:
            ValueError: A second call before ``optimizer.step()`` where gradient
                accumulation is forbidden (Poisson sampling).
            RuntimeError: A trainable parameter bypassed its layer, or a loss of the same forward
                pass has been clipped in this step already.
        """
        votes = self.optimizer.votes
        if votes is not None:
            votes.begin()
        try:
            self._check_accumulation()
            clip_batch(
                self.module,
                self.optimizer,
                self.loss_per_sample,
                loss_scale=None if self.loss_scale is None else float(self.loss_scale),
                retain_graph=retain_graph,
                norms_are_known=self._norms_are_known,
            )
        except BaseException as error:
            if votes is not None:
                votes.refuse(error)
            raise

    def _norms_are_known(self, norms: Tensor) -> None:
        """What a subclass does between the norms ``[B]`` and the clipping."""

    def _check_accumulation(self) -> None:
        pending = self.optimizer.clipped_batches > 0
        if pending and not self.module.grad_accumulation_allowed:
            raise ValueError(
                "Poisson sampling is not compatible with grad accumulation, nor is privacy_unit. "
                "Call optimizer.step() and optimizer.zero_grad() after every backward pass (with "
                "accelerate or Trainer, set gradient_accumulation_steps=1), or use "
                "BatchMemoryManager to simulate large batches. Several losses of the same "
                "samples are added up before one backward()"
            )

    # --- like a tensor ---

    def detach(self) -> Tensor:
        """The reduced loss, without a graph. An empty batch has loss 0."""
        return _plain(self)

    def item(self) -> float:  # type: ignore[override]
        """The reduced loss as a Python number."""
        return self.detach().item()

    def _with(self, loss_per_sample: Tensor) -> DPTensorFastGradientClipping:
        return type(self)(self.module, self.optimizer, loss_per_sample, self.loss_reduction)

    def __add__(self, other: Any) -> DPTensorFastGradientClipping:  # type: ignore[override]
        return _arithmetic(operator.add, self, other)

    def __radd__(self, other: Any) -> DPTensorFastGradientClipping:  # type: ignore[override]
        return _arithmetic(operator.add, other, self)

    def __sub__(self, other: Any) -> DPTensorFastGradientClipping:  # type: ignore[override]
        return _arithmetic(operator.sub, self, other)

    def __rsub__(self, other: Any) -> DPTensorFastGradientClipping:  # type: ignore[override]
        return _arithmetic(operator.sub, other, self)

    def __mul__(self, other: Any) -> DPTensorFastGradientClipping:  # type: ignore[override]
        scaled = _arithmetic(operator.mul, self, other)
        if calling_scaler(SCALING) is not None:
            before = 1.0 if self.loss_scale is None else self.loss_scale
            scaled.loss_scale = before * other.detach()
        return scaled

    def __rmul__(self, other: Any) -> DPTensorFastGradientClipping:  # type: ignore[override]
        return _arithmetic(operator.mul, other, self)

    def __truediv__(self, other: Any) -> DPTensorFastGradientClipping:  # type: ignore[override]
        return _arithmetic(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> DPTensorFastGradientClipping:  # type: ignore[override]
        return _arithmetic(operator.truediv, other, self)

    def __pow__(self, other: Any) -> DPTensorFastGradientClipping:  # type: ignore[override]
        return _arithmetic(operator.pow, self, other)

    def __neg__(self) -> DPTensorFastGradientClipping:  # type: ignore[override]
        return _arithmetic(operator.neg, self)

    # `loss /= 2` makes a new loss: there is no tensor whose graph it could change.
    __iadd__, __isub__, __imul__ = __add__, __sub__, __mul__  # type: ignore[assignment]
    __itruediv__, __ipow__ = __truediv__, __pow__  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.loss_per_sample.shape)
        return f"DPTensorFastGradientClipping(loss_reduction={self.loss_reduction}, shape={shape})"

    def __str__(self) -> str:
        return f"DPTensorFastGradientClipping({self.item():.4f})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether :meth:`backward` is possible."""
        return self.loss_per_sample.requires_grad

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if not kwargs and name in ARITHMETIC:
            return _arithmetic(func, *args)
        if not kwargs and name in ("mean", "sum") and len(args) == 1 and _is_loss(args[0]):
            return args[0]
        args = tree_map_only(DPTensorFastGradientClipping, _plain, args)
        kwargs = tree_map_only(DPTensorFastGradientClipping, _plain, kwargs or {})
        return func(*args, **kwargs)


def _is_loss(value: Any) -> bool:
    return isinstance(value, DPTensorFastGradientClipping)


def _plain(value: Tensor) -> Tensor:
    """The value of a private loss as an ordinary tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def _arithmetic(function: Callable[..., Any], *operands: Any) -> DPTensorFastGradientClipping:
    return combined(function, operands, [_is_loss(o) for o in operands])


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
        if reductions["criterion.reduction"] in MEANS:
            reductions["criterion.reduction"] = "mean"
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
        optimizer.isolation = module.isolation
        if module.book_keeping:
            optimizer.overwrite_sums()

    @outside_graphs
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
            TypeError: ``shape`` is no shape.
            ValueError: The criterion did not give one loss (or more) a sample.
        """
        losses, named = self._unreduced(args, kwargs), self.module._recorder.passes.named
        rows, alone, ids = rows_of(self.criterion, losses, args, kwargs), self._alone, None
        if named is None:
            samples = self._samples(losses, shape)
            losses = self._per_sample(losses, rows, args, kwargs, samples)
        else:
            losses = named.sums(losses, self._valid(losses, args, kwargs), self._averages())
            alone, ids = partial(self._one_unit, named.ids.dim()), named.ids
        self.module.isolation.look_at_losses(alone, args, kwargs, losses, rows, ids, self.criterion)
        return DPTensorFastGradientClipping(
            self.module, self.optimizer, losses, self.loss_reduction
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the user's criterion; arguments are those of ``torch.compile``."""
        if isinstance(self.criterion, nn.Module):
            self.criterion.compile(*args, **kwargs)
        else:
            self.criterion = torch.compile(self.criterion, *args, **kwargs)

    def _averages(self) -> bool:
        return self.loss_reduction == "mean"

    def _valid(self, losses: Tensor, args: Any, kwargs: Any) -> Tensor | None:
        """Which losses have a target that counts."""
        targets = _targets(args, kwargs)
        ignored = getattr(self.criterion, "ignore_index", None)
        if ignored is None or not isinstance(targets, Tensor) or targets.numel() != losses.numel():
            return None
        return targets != ignored

    def _one_unit(self, dims: int, args: Any, kwargs: Any, samples: int) -> Tensor:
        """``[1]``: the loss of rows, or of tokens in a row, that are one unit's."""
        losses = self._unreduced(args, kwargs)
        shape = [1] * (dims - 1) + [losses.numel()]
        named = NamedUnits.numbered(torch.zeros(shape, dtype=torch.int64, device=losses.device), 1)
        return named.sums(losses, self._valid(losses, args, kwargs), self._averages())

    def _alone(self, args: Any, kwargs: Any, samples: int) -> Tensor:
        losses = self._unreduced(args, kwargs)
        rows = rows_of(self.criterion, losses, args, kwargs)
        return self._per_sample(losses, rows, args, kwargs, samples)

    def _per_sample(
        self, losses: Any, rows: int | None, args: Any, kwargs: Any, samples: int | None
    ) -> Tensor:
        return per_sample_losses(
            losses,
            rows=rows,
            samples=samples,
            targets=_targets(args, kwargs),
            ignore_index=getattr(self.criterion, "ignore_index", None),
            reduction=self.loss_reduction,
        )

    def _samples(self, losses: Any, shape: Any) -> int | None:
        """How many samples there are: by the shape that the user gives, else by the inputs."""
        passes = self.module._recorder.passes
        if shape is None:
            self._refuse_joined(losses, passes.latest_batch)
            return passes.latest_batch
        samples = samples_in(shape, losses)
        passes.samples_are_told()
        return samples

    def _refuse_joined(self, losses: Any, samples: int | None) -> None:
        """Refuse joined losses of several forward passes, which look like flattened sequences."""
        if samples is None or not isinstance(losses, Tensor) or losses.dim() != 1:
            return
        if losses.shape[0] == samples:
            return
        batches = self.module._recorder.passes.waiting_batches()
        if len(batches) > 1 and samples < losses.shape[0] <= sum(batches):
            raise ValueError(
                f"the criterion returned {losses.shape[0]} losses for outputs of {len(batches)} "
                f"forward passes of {batches} samples: call the model once on all samples, or the "
                "criterion and backward() for each part. If these are tokens of flattened "
                "sequences, pass the shape that they had: criterion(..., shape=(batch, length))"
            )

    def _unreduced(self, args: Any, kwargs: Any) -> Any:
        losses = self._called(args, kwargs)
        return as_reduced(self.criterion, losses, args, kwargs, self.loss_reduction)

    def _called(self, args: Any, kwargs: Any) -> Any:
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


def _targets(args: Any, kwargs: Any) -> Any:
    """What a criterion is given besides the outputs."""
    return kwargs.get("target", args[1] if len(args) > 1 else None)


def _takes_reduction(criterion: Any) -> bool:
    try:
        parameters = inspect.signature(criterion).parameters
    except (TypeError, ValueError):
        return False
    return "reduction" in parameters
