"""Kernels for accelerators, below `attnres_jax.ops`: this package imports nothing of ours.

`inter_block` is phase 1, `merge` phase 2, `single_phase` a whole read in one kernel.
"""
