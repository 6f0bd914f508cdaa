"""A whole read in one kernel, for one or two finished sources."""
