"""The privacy guarantee: its parameters, clipping, noise, keys."""
