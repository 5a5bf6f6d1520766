"""The loss of a language model without its logits ``[B, T, V]``, which are most of its memory."""

from __future__ import annotations

from collections.abc import Callable
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
    head = linear_head(model)
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear as get_output_embeddings() and no "
            "loss_function: compute hidden states yourself and call causal_lm_loss(hidden, head, "
            "labels)"
        )
    LossInHead(model, head, **options)
    return model


def is_without_logits(model: Any) -> bool:
    """Whether :func:`without_logits` has changed this model."""
    return isinstance(getattr(getattr(model, "loss_function", None), "__self__", None), LossInHead)


def linear_head(model: Any) -> nn.Linear | None:
    """The head of a model of transformers whose loss can be computed without logits."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head if isinstance(head, nn.Linear) and hasattr(model, "loss_function") else None


class LossInHead:
    """Lets a model's head return the tokens' losses, once it is made, until :meth:`undo`.

    Args:
        model: See :func:`without_logits`.
        head: Its head.
    """

    def __init__(
        self,
        model: Any,
        head: nn.Linear,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        self.head = head
        self.loss_function = model.loss_function
        self.options = LossOptions(ignore_index, float(label_smoothing), float(z_loss))
        self.labels: Tensor | None = None  # of the batch that the model runs on
        self.targets: Tensor | None = None  # the same, if the head is to compute losses
        self.place: tuple[int, int] | None = None  # of the head's output
        self._tried: Tensor | None = None
        self._trying = False
        # What a module has of its own, and not by its class.
        replaced = ((head, "forward"), (model, "loss_function"), (model, "_loss_function"))
        self._before = [(module, name, vars(module).get(name)) for module, name in replaced]
        head.forward = self.logits_or_losses  # type: ignore[method-assign]
        model.loss_function = self.reduce
        self._handles = [
            model.register_forward_pre_hook(self.begin, with_kwargs=True),
            model.register_forward_hook(self.end, always_call=True),
        ]

    def undo(self) -> None:
        """The model is what it was."""
        for handle in self._handles:
            handle.remove()
        for module, name, value in self._before:
            vars(module).pop(name, None)
            if value is not None:
                vars(module)[name] = value

    def fits(self, run: Callable[[], Any]) -> bool:
        """Whether a model's loss is that of its head's output, and of nothing else.

        Args:
            run: Runs the model on some tokens with labels, without gradients.
        """
        self._trying, self._tried = True, None
        try:
            loss = run()["loss"]
        finally:
            self._trying = False
        tried, self._tried = self._tried, None
        return tried is not None and tried.data_ptr() == loss.data_ptr() and loss._version == 0

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """The model is about to run."""
        labels = kwargs.get("labels")
        self.labels = labels if isinstance(labels, Tensor) else None
        self.targets = self.place = None
        if self.labels is not None and model.training and torch.is_grad_enabled():
            self.targets = next_tokens(self.labels, self.options.ignore_index)

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """The model has run, or failed."""
        self.labels = self.targets = self.place = None

    @outside_graphs
    def logits_or_losses(self, hidden: Tensor) -> Tensor:
        """What the head computes: the tokens' losses, if there are labels."""
        if self.targets is None:
            output = nn.functional.linear(hidden, self.head.weight, self.head.bias)
        else:
            output = head_losses(hidden, self.head, self.targets, self.options)
        self.place = output.data_ptr(), output._version
        return output

    def reduce(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[B]`` losses of examples from those of tokens, or the model's own loss."""
        known, as_given = self.labels, (logits.data_ptr(), logits._version) == self.place
        if self._trying:
            same = known is not None and labels.data_ptr() == known.data_ptr()
            fits = as_given and same and logits.shape[:-1] == labels.shape
            self._tried = logits.new_zeros(len(logits)) if fits else None
            return logits.new_zeros(len(logits)) if self._tried is None else self._tried
        if self.targets is None:
            loss: Tensor = self.loss_function(logits, labels, *args, **kwargs)
            return loss
        if not as_given or logits.shape != self.targets.shape:
            raise ValueError(
                "the model changes its logits after the head (by a cap or a scale, say), or shifts "
                "the labels itself, so its loss is not that of the head: train without "
                "without_logits()"
            )
        return _mean_of_own(logits, self.targets, self.options.ignore_index)


def _mean_of_own(losses: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """``[B, T] -> [B]``: means over the tokens that count."""
    return losses.sum(1) / (targets != ignore_index).sum(1).clamp(min=1)
