"""Gaussian noise for many tensors at once."""
