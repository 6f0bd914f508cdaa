"""Phase 1: S pseudo-queries read the finished sources, which are fetched from memory once."""
