"""Notices when clipped sums are changed between ``backward()`` and ``step()``.

Note [Sums in p.grad]
    In ghost modes ``p.grad`` holds the clipped sum, where everything that scales, clips or adds
    to gradients reaches it. Each sum is marked when it is complete. PyTorch counts in-place
    changes of a tensor (``_version``), and a tensor put in its place has no mark. What reads
    ``p.grad`` changes neither, nor does ``GradScaler.unscale_``, whose operation does not count.

    A factor of 1 is no change: ``clip_grad_norm_`` multiplies by it to read the norm. So sums
    that have been written to are compared by their norms, which are taken beside the marks,
    without waiting for the device.

    Some versions of PyTorch do not count what ``torch._foreach_*`` does to shards (DTensors).
    There the norms are compared in each step. On a GPU the host does not wait for the answer: the
    device itself lets a changed sum come to nothing (:meth:`SumWatch.guarded`), and the error
    follows before the next step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.kernels.host.operands import triton_is_installed
from opacus.core.platform.host_copies import wait_for
from opacus.core.platform.sharded import compute_devices, local_of, locals_of
from opacus.core.privacy.gradients import is_processed

# Relative change of a norm by a loss scale that has been divided by.
ROUNDING = 1e-5


class SumWatch:
    """Marks the clipped sums in the ``grad`` of parameters, and finds those without a mark."""

    def __init__(self) -> None:
        self._grads: list[Tensor] = []
        self._shards: list[Tensor] = []  # this rank's part of each
        self._noted: list[tuple[int, int]] = []  # their versions when they were complete
        self._norms: Tensor | None = None  # of this rank's shards of the sums
        self._moved: Tensor | None = None  # on the device: whether any sum of this step has changed
        # The same, of the step before, on its way to the host.
        self._answer: tuple[Tensor, torch.cuda.Event] | None = None

    def note(self, parameters: Sequence[nn.Parameter]) -> None:
        """The parameters' ``grad`` are complete sums now."""
        self._grads = [p.grad for p in parameters if p.grad is not None]
        self._shards = locals_of(self._grads)
        self._noted = self._versions()
        self._norms = _norms(self._shards, self._grads)

    def forget(self) -> None:
        """The sums have been taken or dropped."""
        self._grads, self._shards, self._noted, self._norms = [], [], [], None

    def changed(self, parameters: Sequence[nn.Parameter], scale: float = 1.0) -> list[nn.Parameter]:
        """The parameters whose ``grad`` is not a sum as it was noted.

        Args:
            parameters: All parameters; a ``grad`` of ``None``, of zeros or used by an earlier
                step is none that would be released.
            scale: What ``GradScaler`` has divided the sums by.
        """
        grads = self._grads
        written = self._noted != self._versions()
        sharded = bool(grads) and self._shards[0] is not grads[0]
        blind = sharded and _uncounted(grads[0])
        moved: set[int] = set()
        if written or (blind and self._norms is not None and not self._norms.is_cuda):
            kept = self._same(scale).tolist()
            moved = {id(grad) for grad, same in zip(grads, kept, strict=True) if not same}
        elif blind:
            self.doubt(~self._same(scale).all())
        known = {id(grad) for grad in grads} - moved
        return [
            parameter
            for parameter in parameters
            if parameter.grad is not None
            and id(parameter.grad) not in known
            and not is_processed(parameter.grad)
            and bool((local_of(parameter.grad) != 0).any())
        ]

    def doubt(self, flag: Tensor | None) -> None:
        """A sum may not be what was measured, as the device will know."""
        if flag is not None:
            self._moved = flag if self._moved is None else self._moved | flag

    def guarded(self, divisor: float | Tensor) -> float | Tensor:
        """The divisor of the noised sums: infinity if the device has found a change."""
        moved, self._moved = self._moved, None
        if moved is None:
            return divisor
        arrived = torch.cuda.Event()
        self._answer = (moved.to("cpu", non_blocking=True), arrived)
        arrived.record(torch.cuda.current_stream(moved.device))
        return torch.where(moved, math.inf, divisor)

    def changed_before(self) -> bool:
        """Whether a step before had a changed sum, which came to nothing on the device."""
        if self._answer is None or not self._answer[1].query():
            return False
        (answer, _), self._answer = self._answer, None
        return bool(answer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_moved": None, "_answer": None}

    def _versions(self) -> list[tuple[int, int]]:
        """Counts of changes, of each sharded tensor and of this rank's shard."""
        pairs = zip(self._grads, self._shards, strict=True)
        return [(grad._version, shard._version) for grad, shard in pairs]

    def _same(self, scale: float) -> Tensor:
        """``[n]`` bool: which sums have the norm that was noted."""
        now, before = _norms(self._shards, self._grads), self._norms
        assert now is not None and before is not None
        tolerance = 0.0 if scale == 1.0 else ROUNDING
        return torch.isclose(now * scale, before, rtol=tolerance, atol=0.0, equal_nan=True)


def _norms(shards: list[Tensor], grads: list[Tensor]) -> Tensor | None:
    """``[n]`` norms of this rank's shards, each taken on the device that computes with it.

    A shard that waits in host memory is read by one core there; to copy it out takes less time.
    """
    if not shards:
        return None
    if all([shard.is_cuda for shard in shards]):
        return _on_gpu(shards)
    devices = compute_devices(grads)
    pairs = list(zip(shards, devices, strict=True))
    if all(shard.device.type == device.type for shard, device in pairs):
        return _stacked(torch._foreach_norm(shards))
    norms = [torch.linalg.vector_norm(s.to(d, non_blocking=True)) for s, d in pairs]
    for device in set(devices):
        wait_for(device)  # before anyone writes to what is copied
    return _stacked(norms)


def _on_gpu(shards: list[Tensor]) -> Tensor:
    """``[n]`` norms, the same numbers in each call."""
    if triton_is_installed():
        from opacus.core.kernels.norms import squares_triton

        squares = squares_triton.squares_of_wholes(shards)
        if squares is not None:
            return squares.sqrt()
    return _stacked(torch._foreach_norm(shards))


def _stacked(norms: Sequence[Tensor]) -> Tensor:
    """``[n]``, on the device of the first."""
    first = norms[0].device
    return torch.stack([norm if norm.device == first else norm.to(first) for norm in norms])


@functools.cache
def _counts_foreach(mesh: Any) -> bool:
    from torch.distributed.tensor import distribute_tensor

    probe = distribute_tensor(torch.ones(1, device=mesh.device_type), mesh, src_data_rank=None)
    before = probe._version, local_of(probe)._version
    torch._foreach_mul_([probe], 2.0)
    return (probe._version, local_of(probe)._version) != before


def _uncounted(grad: Any) -> bool:
    """Whether PyTorch misses changes of such shards."""
    return not _counts_foreach(grad.device_mesh)
