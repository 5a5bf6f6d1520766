"""What data loaders are made of: collating, empty batches, rates, the parts of ranks."""
