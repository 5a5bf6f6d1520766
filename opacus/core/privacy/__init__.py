"""What is promised: the parameters of privacy, clipping, noise."""
