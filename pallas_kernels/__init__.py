"""Kernels for accelerators, below `attnres_jax.ops`: this package imports nothing of ours.

There are none yet. Every operation runs through XLA.
"""
