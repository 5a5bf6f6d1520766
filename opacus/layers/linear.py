"""Linear layers whose batch dimension is always the first."""

from __future__ import annotations

from torch import nn


class BatchFirstLinear(nn.Linear):
    """A linear layer that is only ever called on batch-first inputs ``[B, *, in_features]``.

    Layers such as :class:`~opacus.layers.DPLSTM` take time-major inputs too, but call
    their linear layers batch first. Per-sample gradients of these are therefore right
    whatever ``batch_first`` says about the model around them.
    """

    batch_first = True


class RNNLinear(BatchFirstLinear):
    """The linear layer of a recurrent cell: called ``[B, in]`` each step or ``[B, T, in]`` once.

    Args:
        in_features: Size of each input.
        out_features: Size of each output.
        bias: Whether an additive bias is learned.

    Attributes:
        max_batch_len: Number of samples B of the running batch; a call may be about
            fewer of them, the first ones.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.max_batch_len = 0
