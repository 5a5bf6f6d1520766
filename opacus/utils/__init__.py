"""Helpers: samplers, batch splitting, sharding, module and tensor utilities."""
