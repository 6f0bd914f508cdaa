"""Phase 2: the open partial sum joins what phase 1 read, and the norm that follows."""
