"""Per-sample gradients by torch's expanded weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils._pytree import tree_leaves

from opacus.core.rules.mixing import MixingCheck
from opacus.grad_sample.gsm_base import AbstractGradSampleModule


class GradSampleModuleExpandedWeights(AbstractGradSampleModule):
    """Wrapper whose forward runs torch's ``call_for_per_sample_grads``.

    Args:
        m: The module; every layer must be one that expanded weights know.
        batch_first: Must be ``True``.
        loss_reduction: ``"mean"`` or ``"sum"``.

    Raises:
        NotImplementedError: ``batch_first`` is ``False``.
    """

    def __init__(
        self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"
    ) -> None:
        if not batch_first:
            raise NotImplementedError("grad_sample_mode 'ew' needs batch_first=True")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._mixing = MixingCheck(m)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module on tensors ``[B, ...]``, recording per-sample gradients.

        Raises:
            ValueError: A layer gets other rows than the samples; names it.
            NotImplementedError: A norm mixes samples, in train mode; names it.
        """
        return super().forward(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._mixing.check()
        if not torch.is_grad_enabled():
            return self._module(*args, **kwargs)
        batch = _samples(args, kwargs)
        if batch == 0:  # torch refuses what Poisson sampling may draw
            return self._run_empty(*args, **kwargs)
        run = call_for_per_sample_grads(
            self._module, batch_size=batch, loss_reduction=self.loss_reduction
        )
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if "batch size matching input" not in str(error):
                raise
            raise _refused_rows(self._module, error) from error

    def _run_empty(self, *args: Any, **kwargs: Any) -> Any:
        """Run on no samples: per-sample gradients of shape ``[0, ...]``."""
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)  # type: ignore[attr-defined]
        return self._module(*args, **kwargs)

    def remove_hooks(self) -> None:
        """There are none."""


def _samples(args: Any, kwargs: Any) -> int:
    """Number of samples: that of the first tensor among a model's arguments.

    Raises:
        ValueError: There is none.
    """
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    raise ValueError(
        "grad_sample_mode 'ew' counts samples in the model's arguments, among which there is no "
        "tensor [batch, ...]: pass one, or use grad_sample_mode='hooks'"
    )


def _refused_rows(model: nn.Module, error: RuntimeError) -> ValueError:
    """What torch says of a layer that got other rows than the samples, with the layer's name."""
    names = {id(m): f"'{name}' ({type(m).__name__})" for name, m in model.named_modules()}
    trace, layer = error.__traceback__, "of the model"
    while trace is not None:
        layer = names.get(id(trace.tb_frame.f_locals.get("self")), layer)
        trace = trace.tb_next
    return ValueError(
        f"layer {layer}: {error}. Its rows are no samples: let its input have the batch in its "
        "first dimension ([batch, length, ...] instead of [batch * length, ...]), or freeze it"
    )
