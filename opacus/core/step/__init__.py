"""The step: modes, losses, and what goes on around a backward pass."""
