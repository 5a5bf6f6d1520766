"""Squared norms of per-sample gradients: references, kernels, and the choice between them."""
