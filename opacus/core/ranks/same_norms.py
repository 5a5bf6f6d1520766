"""Ranks that hold the same samples must have measured the same gradients.

Under tensor parallelism each rank has the whole of some parameters, whose noise is the same on all
of them. If the ranks' sums of such a parameter differed, their difference would have no noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.platform.sharded import compute_device

# Largest relative difference of norms that rounding explains, by the parameters' type.
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}
_HALF = 0.05
# Relative to the whole gradient: below it rounding may be all there is of a parameter's.
_FLOOR = 1e-5


def check_same_norms(
    parameters: Mapping[str, nn.Parameter],
    norm_sq: Mapping[str, Tensor],
    samples: int,
    groups: Sequence[dist.ProcessGroup],
) -> None:
    """Compare the norms of ranks that hold the same samples; all of them must call this.

    Costs an all-reduce of four numbers a parameter for each group.

    Args:
        parameters: All parameters, in the same order on all ranks.
        norm_sq: Squared norms ``[samples]`` by name.
        samples: Number of samples.
        groups: Of ranks that hold the same samples, one for each axis of the mesh.

    Raises:
        RuntimeError: On all ranks: some have measured others. It names the parameter.
    """
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    if not groups:
        return
    names = list(parameters)
    device = compute_device(parameters[names[0]])
    own = torch.zeros(len(names) + 1, 2, dtype=torch.float64, device=device)
    own[-1] = samples
    weights = torch.arange(1, samples + 1, dtype=torch.float64, device=device)
    for row, name in zip(own, names, strict=False):
        if name in norm_sq:  # the second sum tells the order of samples
            value = norm_sq[name].detach().to(own).nan_to_num(0.0, 0.0, 0.0)
            row.copy_(torch.stack([value.sum(), (value * weights).sum()]))
    both = torch.stack([own, -own])
    for group in groups:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    most, least = both[0].cpu(), -both[1].cpu()
    tolerance = max(_TOLERANCES.get(p.dtype, _HALF) for p in parameters.values())
    near = 2 * tolerance * most + _FLOOR**2 * most[:-1].sum(0)  # of squares
    near[-1] = 0.0
    if wrong := (most - least > near).any(1).nonzero().flatten().tolist():
        other_numbers = wrong[-1] == len(names)
        gradients = f"other norms of the gradients of '{names[wrong[0]]}'"
        raise _difference("other numbers of samples" if other_numbers else gradients)


def _difference(what: str) -> RuntimeError:
    return RuntimeError(
        f"ranks that hold the same samples by tensor parallelism have measured {what}, so that "
        "their models would drift apart, and the difference would have no noise. Likely causes: "
        "their batches differ; random numbers (dropout) do: call torch.manual_seed with the same "
        "number on these ranks; or a layer that is not split works on a part of a split tensor (a "
        "normalisation of heads or tokens): split it too (SequenceParallel), give it the whole "
        "tensor, or freeze it. Nothing of this batch was added to the model"
    )
