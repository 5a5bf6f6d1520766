"""Weighted sums of per-sample gradients, and rows times clipping factors."""
