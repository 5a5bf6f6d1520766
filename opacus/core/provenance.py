"""Whose indices a table is looked up with: the samples', or positions shared by all."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.core.spec import LayerSpec


class IndexCheck:
    """Refuses table look-ups whose rows cannot be told from samples.

    Indices of shape ``[T]`` or ``[T, T]`` (relative positions) have no row for each
    sample. Where T is not the batch size that is found out by counting. Where it is, such
    a layer would be clipped by position, silently. So while the batch size equals another
    dimension of the model's inputs, the rows of a table are taken for samples only if its
    indices are an input of the model, or if an earlier batch of another size showed it.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._batch: int | None = None
        self._ambiguous = False
        self._storages: set[int] = set()

    def begin(self, inputs: Any, batch: int | None) -> None:
        """A forward pass of the model starts with these inputs."""
        tensors = [t for t in tree_leaves(inputs) if type(t) is Tensor]
        self._batch = batch
        self._ambiguous = (
            batch is not None and batch > 1 and any(batch in t.shape[1:] for t in tensors)
        )
        self._storages = {_storage(t) for t in tensors} if self._ambiguous else set()

    def look_up(self, spec: LayerSpec, indices: Tensor) -> None:
        """A layer is given ``indices``.

        Raises:
            ValueError: Whether their rows are samples cannot be told; names the layer.
        """
        if self._batch is None or not issubclass(spec.kind, nn.Embedding):
            return
        if indices.dim() == 0 or indices.shape[0] != self._batch or spec.name in self._known:
            return
        if not self._ambiguous:
            self._known.add(spec.name)
        elif _storage(indices) not in self._storages:
            raise ValueError(
                f"{spec} is looked up with indices of shape {tuple(indices.shape)} that are not an "
                f"input of the model. With {self._batch} samples, as many as another dimension of "
                "the inputs has, they cannot be told from positions that all samples share. Start "
                "with a batch of another size, pass the indices to the model (position_ids, "
                "decoder_input_ids, ...), or freeze the layer"
            )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
