"""Cross-entropy of a linear head, a part of the vocabulary at a time."""
