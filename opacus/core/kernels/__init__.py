"""Computations that a rule hands over: a PyTorch reference beside each faster version."""
