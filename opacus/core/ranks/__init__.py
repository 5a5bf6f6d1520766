"""The ranks: meshes, reductions, and agreement between ranks."""
