"""Who holds what: meshes, reductions, and ranks that must agree."""
