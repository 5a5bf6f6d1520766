"""TRL's DPOTrainer, private: what is hidden is a prompt with both answers."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from trl import DPOTrainer

from opacus.integrations.transformers.mixin import DPTrainerMixin

_LOSSES = ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm")
# Entries of a batch that are not the model's.
_NOT_THE_MODELS = ("completion_mask", "ref_chosen_logps", "ref_rejected_logps")


class DPDPOTrainer(DPTrainerMixin, DPOTrainer):
    """A ``DPOTrainer`` that trains with differential privacy; see :class:`DPTrainerMixin`.

    An example is a prompt with its chosen and its rejected answer: the gradient of both together
    is clipped. Losses ``sigmoid``, ``hinge``, ``ipo``, ``robust`` and ``sigmoid_norm``, and
    weighted sums of them; others are refused.
    """

    rows_per_example = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = kwargs.get("args", args[2] if len(args) > 2 else None)
        if arguments is not None:
            refuse_dpo_arguments(arguments)
        super().__init__(*args, **kwargs)
        take_pairs(self.model)

    def model_outputs(self, model: Any, inputs: dict[str, Any]) -> tuple[dict, dict]:
        """Logits ``[B, 2, T, V]`` of the pairs, and what the loss needs beside them."""
        reference = self._reference(inputs)  # first: it may run the same model
        pairs = {k: in_pairs(v) for k, v in inputs.items() if not k.startswith("ref_")}
        own = {k: v for k, v in pairs.items() if k not in _NOT_THE_MODELS}
        outputs = model(**own, as_pairs=True, use_cache=False)
        needed = {"input_ids": pairs["input_ids"], "completion_mask": pairs["completion_mask"]}
        return {"logits": outputs["logits"]}, {**needed, "reference": reference}

    def _reference(self, inputs: dict[str, Any]) -> Tensor:
        """``[B, 2]``: log-probabilities of the answers under the reference model."""
        if self.precompute_ref_logps:
            logps = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        elif not len(inputs["input_ids"]):  # which it cannot run on
            logps = (torch.zeros(0, device=self.args.device),) * 2
        else:
            model = self.model if self.ref_model is None else self.ref_model
            logps = self.compute_ref_log_probs(model, inputs)
        return torch.stack([value.detach() for value in logps], dim=1)

    def per_sample_loss(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Tensor:
        """``[B]``: the loss of each pair."""
        mask = inputs["completion_mask"]
        scores = completion_logps(outputs["logits"], inputs["input_ids"], mask)
        scores = scores - inputs["reference"]  # [B, 2]
        weighted = zip(self.loss_types, self.loss_weights, strict=True)
        losses = [weight * self._pair_loss(kind, scores, mask) for kind, weight in weighted]
        return torch.stack(losses).sum(0)

    def _pair_loss(self, kind: str, scores: Tensor, mask: Tensor) -> Tensor:
        if kind in ("ipo", "sigmoid_norm"):
            scores = scores / mask.sum(-1).clamp(min=1)
        margin = scores[:, 0] - scores[:, 1]
        if kind == "hinge":
            return torch.relu(1 - self.beta * margin)
        if kind == "ipo":
            return (margin - 1 / (2 * self.beta)) ** 2
        right, wrong = F.logsigmoid(self.beta * margin), F.logsigmoid(-self.beta * margin)
        if kind == "robust":
            flipped = self.label_smoothing
            return (flipped * wrong - (1 - flipped) * right) / (1 - 2 * flipped)
        return -right


def refuse_dpo_arguments(args: Any) -> None:
    """Refuse losses that are not a pair's own, and options that are not done here.

    Raises:
        ValueError: It names the argument.
    """
    kinds = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
    unknown = [kind for kind in kinds if kind not in _LOSSES]
    if unknown:
        raise ValueError(
            f"loss_type={unknown} is not supported in private training (aot losses sort the pairs "
            f"of a batch, sft is a mean over its tokens): use some of {list(_LOSSES)}"
        )
    if args.torch_compile:
        raise ValueError(
            "torch_compile=True is not supported with pairs: which rows are a pair can be "
            "followed in eager code only, not in compiled blocks. Leave it out"
        )
    for name, plain in (
        ("ld_alpha", None),
        ("f_divergence_type", "reverse_kl"),
        ("use_weighting", False),
    ):
        value = getattr(args, name, plain)
        if getattr(value, "value", value) != plain:
            raise ValueError(f"{name}={value!r} is not supported in private training: leave it out")


def in_pairs(rows: Any) -> Any:
    """``[2B, ...]``, chosen before rejected, as ``[B, 2, ...]``; what is no tensor stays."""
    if not isinstance(rows, Tensor):
        return rows
    return rows.unflatten(0, (2, len(rows) // 2)).transpose(0, 1)


def take_pairs(model: Any) -> None:
    """Let the model run on ``[B, 2, T]`` where ``as_pairs=True``, so that it sees B examples."""
    rows_only = model.forward

    def forward(self: Any, *args: Any, as_pairs: bool = False, **kwargs: Any) -> Any:
        if not as_pairs:
            return rows_only(*args, **kwargs)
        tensors = {k: v for k, v in kwargs.items() if isinstance(v, Tensor)}
        rows = {k: v.flatten(0, 1) for k, v in tensors.items()}
        outputs = rows_only(*args, **{**kwargs, **rows})
        logits = outputs["logits"]
        return {"logits": logits.unflatten(0, (len(logits) // 2, 2))}

    model.forward = types.MethodType(forward, model)


def completion_logps(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of each completion.

    Args:
        logits: ``[B, 2, T, V]``.
        ids: ``[B, 2, T]`` tokens.
        mask: ``[B, 2, T]``, 1 for tokens of completions.

    Returns:
        ``[B, 2]``.
    """
    logits = logits[:, :, -ids.shape[2] :][:, :, :-1].float()
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), ids[:, :, 1:].reshape(-1), reduction="none"
    ).view(*ids.shape[:2], ids.shape[2] - 1)
    return -(losses * mask[:, :, 1:]).sum(-1)
