"""Torch and the machine: private parts of torch, timing, memory."""
