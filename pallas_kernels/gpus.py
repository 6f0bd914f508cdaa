"""What the launchers of Triton kernels must know of the GPU, and what rules them out."""

import importlib.util
from collections.abc import Mapping

import jax
import jax.numpy as jnp

OLDEST = 80
"""Least compute capability, 80 for 8.0: Ampere, the first with bfloat16."""
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def compute_capability() -> int | None:
    """Returns that of the GPU that the program in trace is for, 90 for 9.0.

    That is the GPU of the mesh in context, which may be a described one, or else the default
    device. None: it is no GPU, or an AMD or unknown one.
    """
    # Only here: a program without GPUs has no use for it.
    from jax.experimental.pallas import triton

    try:
        return triton.get_gpu_info().compute_capability or None
    except ValueError:
        return None


def unsupported(*arrays: jax.Array) -> str | None:
    """Returns why no Triton kernel can take these arrays here, or None if nothing is known."""
    if importlib.util.find_spec("jax_triton") is None:
        return 'jax-triton is not installed (pip install "attnres-jax[gpu]")'
    capability = compute_capability()
    if capability is None:
        return (
            "the program is not for an NVIDIA GPU: none is JAX's default device, and no mesh of"
            " them is in context"
        )
    if capability < OLDEST:
        return (
            f"the kernels need an NVIDIA GPU of compute capability {OLDEST / 10} or newer, and"
            f" this one has {capability / 10}"
        )
    for x in arrays:
        if x.dtype not in DTYPES:
            return f"GPU kernels take bfloat16, float16 and float32 arrays, and one is {x.dtype}"
    return None


def launches_for[T](table: Mapping[int, T], dtype, compute_capability: int) -> T:
    """Returns what a table of launches has for a GPU: that of the newest known one up to it.

    Raises:
        ValueError: A GPU older than the table's oldest, or an unsupported dtype.
    """
    if jnp.dtype(dtype) not in DTYPES:
        raise ValueError(
            f"triton_gpu: arrays are float32, bfloat16 or float16, got {dtype};"
            ' convert them, or use implementation="xla"'
        )
    known = [capability for capability in table if capability <= compute_capability]
    if not known:
        raise ValueError(
            f"triton_gpu: needs an NVIDIA GPU of compute capability {min(table) / 10} or newer, got"
            f' {compute_capability / 10}; use implementation="xla"'
        )
    return table[max(known)]
