"""One step of a private Trainer: a logical batch, a physical one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from opacus.data_loader import CollateFnWithEmpty
from opacus.integrations.transformers.arguments import DPArguments
from opacus.integrations.transformers.batches import LogicalBatch, agreed_parts, tokens_in
from opacus.integrations.transformers.logs import PrivateLogs
from opacus.integrations.transformers.losses import Outputs

# Beginnings of the names under which the criterion gets outputs and inputs.
_OUTPUT, _INPUT = "output_", "input_"


class PrivateStep(PrivateLogs):
    """Overrides of a Trainer's own; a base of ``DPTrainerMixin``.

    Guarantee: what the optimizer's step gets is the clipped sum of one logical batch, of no
    examples too. All processes run equally many physical batches.
    """

    args: Any
    model: Any
    optimizer: Any
    privacy: DPArguments
    _sharded: bool
    _private: Any
    _private_loader: Any
    _criterion: Any
    _blank: CollateFnWithEmpty | None
    state: Any
    _tr_loss: Tensor
    _globalstep_last_logged: int
    _filters_losses: bool
    _flops: Fraction | None = None  # of a token

    def model_outputs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """See ``DPTrainerMixin``."""
        raise NotImplementedError

    def per_sample_loss(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
        """See ``DPTrainerMixin``."""
        raise NotImplementedError

    def training_step(
        self, model: Any, inputs: LogicalBatch, num_items_in_batch: Any = None
    ) -> Tensor:
        """Clip and sum a logical batch, a physical one at a time; Trainer's step adds the noise."""
        model.train()
        if hasattr(self.optimizer, "train"):  # schedule-free
            self.optimizer.train()
        self.optimizer.zero_grad(set_to_none=True)
        parts, mean_size = agreed_parts(inputs)
        total = torch.zeros((), device=self.args.device)
        for part in range(parts):
            last = part == parts - 1
            size = inputs.sizes[part] if part < len(inputs.sizes) else 0
            self.optimizer.signal_skip_step(do_skip=not last)
            total += self._physical_step(model, inputs.chunks[part] if size else None, size)
            if not last:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        self._note_step(mean_size)
        # Trainer takes the mean over processes, so this becomes one over all examples.
        return self._filtered(total / (mean_size or 1.0))

    def _filtered(self, loss: Tensor) -> Tensor:
        """What ``logging_nan_inf_filter`` makes of a loss: Trainer's own would wait for the GPU."""
        if not self._filters_losses:
            return loss
        mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean)

    def _physical_step(self, model: Any, chunk: Any, size: int) -> Tensor:
        """Backward pass of one physical batch; returns the sum of its losses."""
        chunk = chunk if size else self._no_examples()
        with self.compute_loss_context_manager():
            named = self._named(model, chunk)
            if self._criterion is not None:
                loss = self._criterion(**named)
            else:
                loss = self._losses(**named)
                loss = loss.mean() if size else loss.sum()
        loss.backward()
        if not size:
            return torch.zeros((), device=self.args.device)
        if self.privacy.log_private_gradient_norms:
            self._norms.append(self._private.per_sample_gradient_norms.detach().float())
        return loss.detach().float() * size

    def _named(self, model: Any, chunk: Mapping[str, Any]) -> dict[str, Any]:
        """What the criterion is given of a collated batch."""
        on_device = {  # out of pinned memory nothing waits for it
            k: v.to(self.args.device, non_blocking=True) if isinstance(v, Tensor) else v
            for k, v in chunk.items()
        }
        outputs, inputs = self.model_outputs(model, self._prepare_inputs(on_device))
        named = {_OUTPUT + k: v for k, v in outputs.items()}
        return named | {_INPUT + k: v for k, v in inputs.items()}

    def _losses(self, **named: Any) -> Tensor:
        """The criterion that becomes private: one loss an example, of tensors by name."""
        outputs = {k.removeprefix(_OUTPUT): v for k, v in named.items() if k.startswith(_OUTPUT)}
        inputs = {k.removeprefix(_INPUT): v for k, v in named.items() if k.startswith(_INPUT)}
        losses = self.per_sample_loss(Outputs(outputs), inputs)
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(f"per_sample_loss must return one loss an example, [B]; got {shape}")
        return losses

    @torch.no_grad()
    def _losses_alone(self, chunk: Mapping[str, Any]) -> Tensor:
        """``[B]`` of a collated batch, without dropout; before the model is private."""
        self.model.eval()
        try:
            with self.compute_loss_context_manager(), torch.compiler.set_stance("force_eager"):
                return self._losses(**self._named(self.model, chunk))
        finally:
            self.model.train()

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Autocast, where accelerate's wrapper would do it; sharded models have a policy."""
        stack = super().compute_loss_context_manager()  # type: ignore[misc]
        if not self._sharded:
            stack.enter_context(self.accelerator.autocast())
        return stack

    def _clip_grad_norm(self, model: Any) -> None:
        """Nothing: gradients are clipped by example, and their sum must not be."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Not logged: it is exact, and private."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Of a logical batch, or of an ordinary one."""
        if not isinstance(inputs, LogicalBatch):
            return super().floating_point_ops(inputs)  # type: ignore[misc, no-any-return]
        if not inputs.size:
            return 0
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = [tokens_in(chunk, name, False) for chunk in inputs.chunks]
        if tokens[0] and self._flops is None:
            # Trainer counts all parameters anew each time, which takes as long as some layers.
            first = super().floating_point_ops(inputs.chunks[0])  # type: ignore[misc]
            self._flops = Fraction(first, tokens[0])
        return int((self._flops or 0) * sum(tokens))

    def _track_num_input_tokens(self, inputs: LogicalBatch) -> None:
        if self.args.include_num_input_tokens_seen == "no":
            return
        name = getattr(self.model, "main_input_name", "input_ids")
        bare = self.args.include_num_input_tokens_seen == "non_padding"
        sizes = zip(inputs.chunks, inputs.sizes, strict=True)
        ones = torch.ones(sum(tokens_in(c, name, bare) for c, size in sizes if size))
        super()._track_num_input_tokens({name: ones, "attention_mask": ones})  # type: ignore[misc]

    def _no_examples(self) -> dict[str, Any]:
        """A physical batch of no examples, as the model gets it."""
        if self._blank is None:
            collate = self._private_loader.collate_fn
            collate = getattr(collate, "wrapped_collator_fn", collate)
            dataset = self._private_loader.dataset
            self._blank = CollateFnWithEmpty(collate.collate, dataset=dataset)
        return dict(self._blank([]))
