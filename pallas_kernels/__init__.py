"""Kernels for accelerators, below `attnres_jax.ops`: this package imports nothing of ours.

`inter_block` is phase 1, `merge` phase 2, and `single_phase` both at once for a read by itself. In
each, `op.py` joins forward and backward; `mosaic_tpu.py` has the Pallas kernels for TPUs, and
`tiling.py` chooses what fits in a chip's memory; `triton_gpu.py` launches the Triton kernels for
NVIDIA GPUs, and `triton_tiling.py` chooses how. `tpu_launch.py` and `gpu_launch.py` say what each
accelerator cannot do, and share work out over launches.
"""
