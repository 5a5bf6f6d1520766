"""Compares the batches of the ranks with the declared data layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.platform.trees import tensors_of
from opacus.core.ranks.mesh import ModelRanks
from opacus.core.record.recorder import Recorder

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64


class DataCheck:
    """Raises on all ranks when their batches contradict the data layout.

    Sharded: looks at the first batch that several ranks have samples of. If all of them are
    equal, every sample would be summed once a rank, at that many times the sensitivity.
    Replicated: looks at every batch, which must be the same on all ranks. Ranks along a
    tensor-parallel axis must have equal batches in any case, each time.

    Costs one all-gather of eight numbers; no sample leaves its rank.

    Args:
        replicated: What was declared.
        ranks: Who has to agree.
    """

    def __init__(self, replicated: bool, ranks: ModelRanks) -> None:
        self.replicated = replicated
        self.ranks = ranks
        self.done = ranks.count == 1 and not ranks.tensor
        self._differ = False  # whether the data axes were found to have different batches

    def before(self, recorder: Recorder, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is about to run; every rank must call this. See :meth:`look`."""
        tapped = recorder.active(module) or recorder.lone_runs
        if tapped and not (recorder.in_backward or recorder.probed):
            passes = recorder.passes
            units = None if passes.named is None else passes.named.ids
            self.look(() if passes.latest_batch == 0 else (args, kwargs), units)

    def look(self, inputs: Any, units: Tensor | None = None) -> None:
        """Compare the inputs of a forward pass; every rank must call this.

        Args:
            inputs: What the model is called with.
            units: Of their rows, where the user names them, as numbers of this batch: equal where
                batches are to be.

        Raises:
            ValueError: They contradict the layout.
        """
        if self.done:
            return
        device = self.ranks.device
        own = torch.cat([fingerprint(inputs, device), fingerprint(units, device)])
        every = self.ranks.gather_all(own)
        peers = every.view(self.ranks.count, -1, len(own)).tolist()
        if any(one != group[0] for group in peers for one in group):
            raise ValueError(
                "ranks along the tensor-parallel axis got different batches, but each holds a part "
                "of the same samples' gradients: give them the same sampler (its rank is the one "
                "along the data-parallel axis)"
            )
        batches = [group[0] for group in peers]
        if self.replicated:
            self._check_equal(batches)
        else:
            self._check_different(batches)

    def _check_equal(self, batches: list[list[int]]) -> None:
        if any(batch != batches[0] for batch in batches):
            rows = [batch[0] for batch in batches]
            raise ValueError(
                "data_layout='replicated', but ranks got different batches (with "
                f"{rows} samples, or other units' rows): use data_layout='sharded', or give all "
                "ranks the same batches in the same order"
            )

    def _check_different(self, batches: list[list[int]]) -> None:
        filled = [batch for batch in batches if batch[0]]
        if len(filled) < 2 or self._differ:
            return  # look again
        self._differ, self.done = True, not self.ranks.tensor
        if filled[0][3] and all(batch[:4] == filled[0][:4] for batch in filled):
            raise ValueError(
                f"data_layout='sharded', but {len(filled)} ranks got the same batch of "
                f"{filled[0][0]} samples, each of which would count {len(filled)} times: give the "
                "loader a DistributedSampler (or Poisson sampling by make_private), or, to "
                "test on the same data, pass data_layout='replicated'"
            )


def fingerprint(inputs: Any, device: torch.device) -> Tensor:
    """``[4]`` int64: rows, two sums over the bytes, whether these tell batches apart."""
    tensors = tensors_of(inputs)
    rows = next((t.shape[0] for t in tensors if t.dim()), 0)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    varied = torch.zeros((), dtype=torch.bool, device=device)
    for tensor in tensors:
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not local.numel():
            continue
        data = local.detach().flatten().contiguous().view(torch.uint8).to(device, torch.int64)
        weights = (torch.arange(len(data), device=device) * 2 + 1) * _ODD
        sums += torch.stack([(data * weights).sum(), (data * (weights >> 17)).sum()])
        varied |= (local != local.flatten()[0]).any().to(device)
    return torch.cat([torch.tensor([rows], device=device), sums, varied.long().view(1)])
