"""A single read of one or two finished sources and the open partial sum, as one pair of kernels."""
