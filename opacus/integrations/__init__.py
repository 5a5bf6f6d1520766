"""Private training in the tools that people train with."""
