"""Phase 1: S reads of the finished sources, with one read of their memory."""
