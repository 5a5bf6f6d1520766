"""Launches of Triton kernels: what the host does."""
