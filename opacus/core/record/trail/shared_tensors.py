"""What the trail knows of tensors that all samples share; see :mod:`opacus.core.record.shared`."""

from __future__ import annotations

import torch
from torch import Tensor

from opacus.core.platform.saved_tensors import finds_saved_tensors
from opacus.core.record.shared import Place
from opacus.core.record.trail.labels import Labels, Lost, State
from opacus.core.record.trail.memory import DATA, Memory


class SharedTensors:
    """A base of ``Trail``: the :class:`~opacus.core.record.shared.Scope` of a forward pass."""

    count: int
    moved: bool
    _memory: Memory
    _over: bool

    def _start_sharing(self) -> None:
        # Layers whose outputs of a shape all samples share, and where the samples of tensors were
        # that these met: a checkpoint runs them again when the pass is over.
        self.shared: set[tuple[str, torch.Size]] = set()
        self._met: dict[tuple[torch.Size, torch.dtype], set[Place | None]] = {}

    def state(self, tensor: Tensor) -> State:
        """The label of a tensor."""
        raise NotImplementedError

    def _in_order(self, dims: int, dim: int) -> Tensor:
        ids = torch.arange(self.count, device="cpu")
        return ids.view([self.count if d == dim else 1 for d in range(dims)])

    def is_shared(self, output: Tensor, batch_dim: int) -> bool:
        """Whether what a layer gave is nobody's, and has no row for each sample."""
        if self.state(output) is not None:
            return False
        if output.dim() <= batch_dim or output.shape[batch_dim] != self.count:
            return True
        if self._memory.source(output) == DATA:
            return False  # samples have said where constants are: one-hot codes of theirs
        own = output.detach()  # positions expanded to the batch have equal rows
        return not torch.equal(own, own.narrow(batch_dim, 0, 1).expand_as(own))

    def share(self, value: Tensor) -> Tensor:
        """A row for each sample ``[n, ...]``, all equal, without memory."""
        rows = value.expand(self.count, *value.shape)
        self._memory.put(rows, Labels(self._in_order(rows.dim(), 0)), DATA)
        return rows

    def place_of(self, tensor: Tensor) -> Place | None:
        """Where the samples of a tensor are; ``None`` for nobody's.

        Raises:
            ValueError: They are not along one dimension, in order.
            RuntimeError: The forward pass is over.
        """
        key = tensor.shape, tensor.dtype
        if not self._over:
            place = self._place_of(tensor)
            self._met.setdefault(key, set()).add(place)
            return place
        # Where the place would say whose gradient is whose, what has this shape is not enough.
        met = self._met.get(key, set())
        if not finds_saved_tensors() or len(met) != 1:
            raise RuntimeError(
                "what a layer has computed once for all samples is used after the forward pass, "
                "where whose rows it meets is not known (an activation checkpoint runs such a part "
                "of the model again, the loss takes it, or a custom autograd.Function saves it): "
                "leave that part out of checkpoints, expand it to the batch before a function, or "
                "freeze the layer (adapters in other layers, such as LoRA, can be trained)"
            )
        return next(iter(met))

    def _place_of(self, tensor: Tensor) -> Place | None:
        state = self.state(tensor)
        if state is None:
            return None
        reason = state.reason if isinstance(state, Lost) else "they are in no order"
        if isinstance(state, Labels):
            self.moved |= state.moved
            varying = [d for d, size in enumerate(state.ids.shape) if size > 1]
            line = state.ids.reshape(-1)
            block, rest = divmod(len(line), self.count)
            wanted = torch.arange(self.count, device=line.device).repeat_interleave(max(1, block))
            if len(varying) == 1 and not rest and torch.equal(line, wanted):
                return Place(tensor.dim() - varying[0], block)
        raise ValueError(
            f"a layer that runs once for all {self.count} samples meets a tensor "
            f"{tuple(tensor.shape)} that has not the samples along one dimension ({reason}), so "
            "their gradients cannot be told apart: freeze the layer (adapters in other layers, "
            "such as LoRA, can be trained)"
        )

    def not_simple(self) -> None:
        """Shared tensors have to be followed each time."""
        self.moved = True
