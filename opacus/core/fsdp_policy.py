"""The one place that reads what FSDP2 keeps private: the dtype in which it sums gradients."""

from __future__ import annotations

import torch
from torch import nn

from opacus.core.sharded import is_fsdp


def reduce_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Parameter name -> ``reduce_dtype`` of the mixed-precision policy that it is under.

    Parameters without one are left out, and so are all if this version of torch keeps its
    policies elsewhere: gradients are then summed in fp32, which is never less exact.
    """
    names = {id(p): n for n, p in model.named_parameters()}
    found: dict[str, torch.dtype] = {}
    for module in model.modules():
        if not is_fsdp(module):
            continue
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        group = getattr(state, "_fsdp_param_group", None)
        dtype = getattr(getattr(group, "mp_policy", None), "reduce_dtype", None)
        if dtype is None:
            continue
        for parameter in getattr(group, "fsdp_params", ()):
            name = names.get(id(getattr(parameter, "sharded_param", None)))
            if name is not None:
                found[name] = dtype
    return found
