"""The loss of a language model without its logits ``[B, T, V]``, which are most of its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.kernels.loss.head import LossOptions
from opacus.core.platform.torch_internals import outside_graphs
from opacus.core.record.head_loss import head_losses, losses_of_head


def causal_lm_loss(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of each token's prediction of the next one, a part of the vocabulary at a time.

    The loss of an example is the mean over its own tokens that count, independent of other
    examples. Exact, forward and backward, per example too: in the private model's training step the
    head is a layer like others. As a criterion of ``make_private`` it is called with the same
    arguments; inside of the model's forward its results ``[B]`` are the model's output.

    Args:
        hidden: ``[B, T, d]``, what the head would be given.
        head: The model's ``nn.Linear`` with V outputs; its weight may be an embedding's.
        labels: ``[B, T]`` integers; position t predicts ``labels[:, t + 1]``.
        reduction: ``"mean"`` or ``"sum"`` over examples, or ``"none"``: ``[B]``.
        ignore_index: Label of tokens that take no part.
        label_smoothing: In [0, 1].
        z_loss: Factor of the squared log-sum-exp of each token's logits, which is added.

    Returns:
        In fp32 at least.

    Raises:
        ValueError: Another head (an adapter around it, say), or shapes that do not fit.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    targets = next_tokens(labels, ignore_index)
    options = LossOptions(ignore_index, float(label_smoothing), float(z_loss))
    losses = losses_of_head(hidden, head, targets, options)
    losses = _mean_of_own(losses, targets, ignore_index)
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def next_tokens(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """``[B, T]``: the label that each position predicts; nothing follows the last one."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)


def without_logits(model: Any, **options: Any) -> Any:
    """Let a causal language model of transformers compute its loss without logits in training.

    ``model(**batch, labels=labels).loss`` is then ``[B]``, one an example, see
    :func:`causal_lm_loss`, and ``.logits`` holds the tokens' losses ``[B, T]``. In ``eval()`` and
    without ``labels`` nothing changes. Call it before sharding and ``make_private``.

    Args:
        model: With ``get_output_embeddings()`` and ``loss_function``; changed in place.
        options: ``ignore_index``, ``label_smoothing``, ``z_loss`` of :func:`causal_lm_loss`.

    Returns:
        The model.

    Raises:
        ValueError: It has no such head.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear) or not hasattr(model, "loss_function"):
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear as get_output_embeddings() and no "
            "loss_function: compute hidden states yourself and call causal_lm_loss(hidden, head, "
            "labels)"
        )
    state = _Labels(head, model.loss_function, **options)
    head.forward = state.logits_or_losses  # type: ignore[method-assign]
    head.register_forward_hook(state.seen)
    model.register_forward_pre_hook(state.begin, with_kwargs=True)
    model.register_forward_hook(state.end, always_call=True)
    model.loss_function = state.reduce
    return model


def is_without_logits(model: Any) -> bool:
    """Whether :func:`without_logits` has changed this model."""
    return isinstance(getattr(getattr(model, "loss_function", None), "__self__", None), _Labels)


class _Labels:
    """The labels of the batch that a model runs on, for its head."""

    def __init__(
        self,
        head: nn.Linear,
        loss_function: Any,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        self.head = head
        self.loss_function = loss_function
        self.options = LossOptions(ignore_index, float(label_smoothing), float(z_loss))
        self.targets: Tensor | None = None
        self.place: tuple[int, int] | None = None  # of the head's output

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """The model is about to run."""
        labels = kwargs.get("labels")
        self.targets = self.place = None
        if isinstance(labels, Tensor) and model.training and torch.is_grad_enabled():
            self.targets = next_tokens(labels, self.options.ignore_index)

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """The model has run, or failed."""
        self.targets = self.place = None

    @outside_graphs
    def logits_or_losses(self, hidden: Tensor) -> Tensor:
        """What the head computes: the tokens' losses, if there are labels."""
        if self.targets is None:
            return nn.functional.linear(hidden, self.head.weight, self.head.bias)
        return head_losses(hidden, self.head, self.targets, self.options)

    def seen(self, head: nn.Module, args: Any, output: Tensor) -> None:
        """The head has run."""
        self.place = output.data_ptr(), output._version

    def reduce(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[B]`` losses of examples from those of tokens, or the model's own loss."""
        if self.targets is None:
            loss: Tensor = self.loss_function(logits, labels, *args, **kwargs)
            return loss
        if (logits.data_ptr(), logits._version) != self.place or logits.shape != self.targets.shape:
            raise ValueError(
                "the model changes its logits after the head (by a cap or a scale, say), or shifts "
                "the labels itself, so its loss is not that of the head: train without "
                "without_logits()"
            )
        return _mean_of_own(logits, self.targets, self.options.ignore_index)


def _mean_of_own(losses: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """``[B, T] -> [B]``: means over the tokens that count."""
    return losses.sum(1) / (targets != ignore_index).sum(1).clamp(min=1)
