"""Launches the Triton kernels of single reads, whose tiles are those of phase 2.

Triton is imported where a kernel is launched, as it is missing where no GPU is used.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from pallas_kernels.merge import gpu_launch as merge
from pallas_kernels.merge.call import Call


def unsupported(values: tuple[jax.Array, ...], summed: jax.Array) -> str | None:
    """Returns why the kernels cannot read these arrays, or None if they can."""
    return merge.unsupported(values[0], summed)


def run_forward(call: Call, values, partial_sum_td, update_td, folded_d, norm_gain_d):
    """Returns the new sum, hidden, float32 weights `[n + 1, t]`, and statistics `[k, t]`."""

    # Examples of a vmap are computed one after another: the kernels have no axis for them.
    @sequential_vmap
    def run(values, *arguments):
        from pallas_kernels.single_phase import triton_gpu

        return triton_gpu.forward(
            values,
            *arguments,
            eps=call.eps,
            norm_eps=call.norm_eps,
            tiling=call.tiling or merge.choose_tiling(values[0], backward=False),
        )

    update_td = merge.loadable(update_td, values[0].dtype)
    summed, hidden, statistics_kt = run(values, partial_sum_td, update_td, folded_d, norm_gain_d)
    return summed, hidden, _weights(statistics_kt, len(values)), statistics_kt


def run_backward(
    call: Call,
    values,
    summed_td,
    folded_d,
    norm_gain_d,
    statistics_kt,
    dsummed_td,
    dhidden_td,
    dweights_nt,
    dvalues,
):
    """Returns what `triton_gpu.backward` does."""

    @sequential_vmap
    def run(values, dlogits_nt, dvalues, *arguments):
        from pallas_kernels.single_phase import triton_gpu

        return triton_gpu.backward(
            values,
            *arguments,
            dlogits_nt=dlogits_nt,
            dvalues=dvalues,
            tiling=call.tiling or merge.choose_tiling(values[0], backward=True, single_phase=True),
        )

    dlogits_nt = None
    if dweights_nt is not None:
        weights_nt = _weights(statistics_kt, len(values))
        # Differences: no cancellation where one weight is nearly one.
        differences = dweights_nt[:, None] - dweights_nt[None]
        dlogits_nt = weights_nt * jnp.sum(weights_nt[None] * differences, axis=1)
    return run(
        values,
        dlogits_nt,
        dvalues,
        summed_td,
        folded_d,
        norm_gain_d,
        statistics_kt,
        dsummed_td,
        dhidden_td,
    )


def _weights(statistics_kt: jax.Array, n: int) -> jax.Array:
    logits = statistics_kt[n + 1 : 2 * n + 2]
    return jax.nn.softmax(logits, axis=0)
