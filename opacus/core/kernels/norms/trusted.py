"""When a norm by Gram matrices is trusted; used by the reference and the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

# It is trusted above this share of the sum of its terms' absolute values. Below it, terms of both
# signs have cancelled and rounding errors remain.
TRUSTED = 2.0**-7
# The same where products keep 11 bits of fp32.
TRUSTED_IN_TF32 = 2.0**-2


def in_tf32(tensor: Tensor) -> bool:
    """Whether products with this tensor keep 11 bits of fp32, as the program allows (TF32).

    Where terms cancel, as in Gram matrices' products, what is lost can be percents of a norm.
    """
    wide = tensor.is_cuda and tensor.dtype == torch.float32
    return wide and torch.backends.cuda.matmul.fp32_precision == "tf32"


def trusted(tensor: Tensor) -> float:
    """The share of its terms' absolute values above which a sum of products is trusted."""
    return TRUSTED_IN_TF32 if in_tf32(tensor) else TRUSTED
