"""Helpers: modules, tensors, packed sequences, sampling, losses, sharding."""

from opacus.utils import module_utils, packed_sequences, tensor_utils

__all__ = ["module_utils", "packed_sequences", "tensor_utils"]
