"""Phase 2 of depth attention as kernels: one read of the open partial sum, forward and backward."""
