"""Checkpoints of a private run: one file, or a folder of shards to which a run resumes."""
