"""Torch and the machine: what is private to torch, times, memory."""
