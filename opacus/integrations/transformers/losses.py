"""Losses of transformers' heads: one an example, independent of the other examples.

A model's own ``loss`` is a mean over the tokens of the batch: there the gradient of an example
depends on the lengths of the others, and clipping bounds nothing. Here it is the mean over the
example's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # label of a token that does not count

Tensors = Mapping[str, Any]


class Outputs(dict[str, Any]):
    """A model's outputs by key and by attribute, as functions written for Trainer expect."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"{name}: a loss by example is given the outputs that are tensors, {[*self]}; "
                "override model_outputs to give it more, each with one row an example"
            ) from None


def tokens_mean(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy over each example's own labelled tokens; 0 if it has none.

    Args:
        logits: ``[B, T, V]``.
        labels: ``[B, T]``, -100 for tokens that take no part.
        smoothing: Label smoothing in [0, 1].

    Returns:
        ``[B]``.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    losses = F.cross_entropy(
        flat, labels.reshape(-1), ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    ).view(labels.shape)
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def causal_lm(outputs: Tensors, inputs: Tensors, smoothing: float = 0.0) -> Tensor:
    """``[B]``: tokens predict the next one."""
    labels = inputs["labels"]
    logits = outputs["logits"][:, -labels.shape[1] :]  # after the virtual tokens of PEFT's prompts
    return tokens_mean(logits[:, :-1], labels[:, 1:], smoothing)


def aligned_tokens(outputs: Tensors, inputs: Tensors, smoothing: float = 0.0) -> Tensor:
    """``[B]``: tokens predict their own label (masked language models, tags, decoders)."""
    return tokens_mean(outputs["logits"], inputs["labels"], smoothing)


def question_answering(outputs: Tensors, inputs: Tensors, smoothing: float = 0.0) -> Tensor:
    """``[B]``: where an answer starts and ends; answers outside of the text take no part."""
    total: Tensor | None = None
    for side in ("start", "end"):
        logits, positions = outputs[f"{side}_logits"], inputs[f"{side}_positions"].reshape(-1)
        outside = logits.shape[1]
        loss = F.cross_entropy(
            logits.float(), positions.clamp(0, outside), ignore_index=outside, reduction="none",
            label_smoothing=smoothing,
        )  # fmt: skip
        total = loss if total is None else total + loss
    assert total is not None
    return total / 2


def classification(problem_type: str | None, labels_count: int) -> Callable[..., Tensor]:
    """The loss of a head with ``[B, labels_count]`` outputs, as transformers chooses it."""

    def loss(outputs: Tensors, inputs: Tensors, smoothing: float = 0.0) -> Tensor:
        logits, labels = outputs["logits"].float(), inputs["labels"]
        kind = problem_type or _problem_type(labels, labels_count)
        if kind == "single_label_classification":
            return F.cross_entropy(
                logits, labels.reshape(-1), ignore_index=IGNORED, reduction="none",
                label_smoothing=smoothing,
            )  # fmt: skip
        target = labels.reshape(logits.shape).to(logits.dtype)
        function = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
        return function(logits, target, reduction="none").flatten(1).mean(1)

    return loss


def _problem_type(labels: Tensor, count: int) -> str:
    if count == 1:
        return "regression"
    whole = labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if whole else "multi_label_classification"


_BY_HEAD: dict[str, Callable[..., Tensor]] = {
    "ForCausalLM": causal_lm,
    "ForMaskedLM": aligned_tokens,
    "ForTokenClassification": aligned_tokens,
    "ForQuestionAnswering": question_answering,
}
_CLASSIFIERS = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)


def loss_of(model: Any) -> Callable[..., Tensor]:
    """The loss that belongs to a model's head.

    Args:
        model: A ``PreTrainedModel``, without wrappers.

    Raises:
        ValueError: Its head is of no kind that is known here.
    """
    kind, config = getattr(model, "loss_type", None), getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and _writes_text(model):
        return aligned_tokens
    if kind in _CLASSIFIERS:
        return classification(getattr(config, "problem_type", None), config.num_labels)
    if kind in _BY_HEAD:
        return _BY_HEAD[kind]
    if type(model).__name__.endswith("LMHeadModel"):
        return causal_lm
    raise ValueError(
        f"no loss per example is known for {type(model).__name__}, and its own loss is one for the "
        "whole batch, which cannot be clipped by example. Override "
        "per_sample_loss(self, outputs, inputs) to return one loss an example, or pass "
        f"compute_loss_func. Known heads: {sorted([*_BY_HEAD, *_CLASSIFIERS])}"
    )


def _writes_text(model: Any) -> bool:
    return type(model).__name__.endswith("ForConditionalGeneration") or hasattr(
        model, "prepare_decoder_input_ids_from_labels"
    )


def by_function(
    function: Callable[..., Any], outputs: Tensors, inputs: Tensors, shifted: bool = False
) -> Tensor:
    """``[B]``: a ``compute_loss_func`` for Trainer, of each example alone.

    Args:
        function: Takes outputs, labels and ``num_items_in_batch``, here the number of the
            example's own labels; returns one loss, or one an example.
        outputs: Of the model, by name.
        inputs: The batch, by name.
        shifted: Whether a label is of the token before, so that the first counts for nothing.
    """
    count = next(len(v) for v in outputs.values() if isinstance(v, Tensor))
    if count == 0:
        first = next(v for v in outputs.values() if isinstance(v, Tensor))
        return first.flatten(1).sum(1)
    items = _own_labels(inputs.get("labels"), shifted)

    def of(start: int, stop: int, number: Tensor | None) -> Any:
        labels = _cut(inputs, count, start, stop).get("labels")
        own = Outputs(_cut(outputs, count, start, stop))
        return function(own, labels, num_items_in_batch=number)

    def alone(i: int) -> Any:
        return of(i, i + 1, None if items is None else items[i])

    first = alone(0)
    if isinstance(first, Tensor) and first.shape == (1,):  # one loss an example
        whole = of(0, count, items)
        if whole.shape == (count,):
            return whole  # type: ignore[no-any-return]
    return torch.stack([first.reshape(()), *(alone(i).reshape(()) for i in range(1, count))])


def _own_labels(labels: Any, shifted: bool) -> Tensor | None:
    """Number of labels of each example, at least 1; ``None`` if they are no tensor."""
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        return None
    rows = labels.unsqueeze(1) if labels.dim() == 1 else labels[:, int(shifted) :]
    return (rows != IGNORED).flatten(1).sum(1).clamp(min=1)


def _cut(values: Tensors, count: int, start: int, stop: int) -> dict[str, Any]:
    def one(value: Any) -> Any:
        rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == count
        return value[start:stop] if rows else value

    return {name: one(value) for name, value in values.items()}
