"""Launches the Triton kernels of phase 2.

Triton is imported where a kernel is launched, as it is missing where no GPU is used.
"""

import math

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from pallas_kernels import gpus
from pallas_kernels.merge import triton_tiling
from pallas_kernels.merge.call import Call


def unsupported(output: jax.Array, summed: jax.Array) -> str | None:
    """Returns why the kernels cannot merge these arrays, or None if they can."""
    if reason := gpus.unsupported(output, summed):
        return reason
    if summed.dtype not in (output.dtype, jnp.float32):
        return (
            f"partial sums have the dtype of the output, {output.dtype}, or float32, and this one"
            f" is {summed.dtype}"
        )
    if output.size:
        try:
            choose_tiling(output, backward=False), choose_tiling(output, backward=True)
        except ValueError:
            d, dtype = output.shape[-1], output.dtype
            return f"rows of {d} elements of {dtype} do not fit in the registers of a GPU"
    return None


def run_forward(call: Call, output_td, lse_t, partial_sum_td, update_td, folded_d, norm_gain_d):
    """Returns what `triton_gpu.forward` does."""

    # Examples of a vmap are computed one after another: the kernels have no axis for them.
    @sequential_vmap
    def run(output_td, *arguments):
        from pallas_kernels.merge import triton_gpu

        return triton_gpu.forward(
            output_td,
            *arguments,
            eps=call.eps,
            norm_eps=call.norm_eps,
            tiling=call.tiling or choose_tiling(output_td, backward=False),
        )

    update_td = loadable(update_td, output_td.dtype)
    return run(output_td, lse_t, partial_sum_td, update_td, folded_d, norm_gain_d)


def run_backward(call: Call, output_td, *arguments):
    """Returns what `triton_gpu.backward` does, of the same arguments."""

    @sequential_vmap
    def run(output_td, *arguments):
        from pallas_kernels.merge import triton_gpu

        tiling = call.tiling or choose_tiling(output_td, backward=True)
        return triton_gpu.backward(output_td, *arguments, tiling=tiling)

    return run(output_td, *arguments)


def loadable(update: jax.Array | None, dtype: jnp.dtype) -> jax.Array | None:
    """An update as the kernels take it: in the dtype of the output, or float32."""
    if update is None or update.dtype in (dtype, jnp.float32):
        return update
    return update.astype(jnp.float32)


def choose_tiling(
    output: jax.Array, *, backward: bool, single_phase: bool = False
) -> triton_tiling.Tiling:
    """Returns the launch for an array `[..., d]` on the GPU that the program is for."""
    capability = gpus.compute_capability()
    assert capability is not None, "checked by unsupported"
    return triton_tiling.choose_tiling(
        math.prod(output.shape[:-1]),
        output.shape[-1],
        output.dtype,
        compute_capability=capability,
        backward=backward,
        single_phase=single_phase,
    )
