"""Depth attention in a single phase: one read of finished sources and the open partial sum.

A forward pass that drives its reads one at a time reads the finished sources anew each time. With
one or two of them a single kernel does both phases at once, and no output of phase 1 is stored.
"""

from typing import Any

import jax
import jax.numpy as jnp

from attnres_jax.ops.block import join_weights
from attnres_jax.ops.depth_attention import fold
from attnres_jax.ops.implementation import Implementation, choose_implementation
from attnres_jax.ops.sources import FinishedSources, Sources, check_sources, check_vectors
from attnres_jax.ops.two_phase import inter_block, merge


def single_phase(
    sources: Sources,
    partial_sum: jax.Array | None,
    update: jax.Array | None,
    query_d: jax.Array,
    gain_d: jax.Array,
    *,
    norm_gain_d: jax.Array | None = None,
    eps: float = 1e-6,
    norm_eps: float | None = None,
    implementation: Implementation | None = None,
    return_weights: bool = False,
    return_sources: bool = False,
) -> tuple[Any, ...]:
    """Adds a sub-layer's output to the open block, reads it with the sources, and normalises.

        p = partial_sum + update
        h = sum_i softmax_i(<w, RMSNorm(x_i)>) x_i        over x = v_0, ..., v_(n-1), p
        hidden = h / sqrt(mean_d(h**2) + norm_eps) * norm_gain        (h itself without norm_gain)

    This is for a forward pass that drives its reads one at a time, as `BlockState` is for: where
    kernels compute it, a read of n <= 2 finished sources moves n + 4 rows of d a token, and in
    two phases n + 6. Where all S reads of a block are known together, `inter_block` for all of them
    and `merge` for each but the first are better: n + 6 S - 5 rows for the block, and not n + 4 for
    every read. More sources, a `Bank`, or XLA: `inter_block` with one query, then `merge`.

    Args:
        sources: Finished sources: arrays `[..., d]` of one shape and floating dtype, or a `Bank`.
        partial_sum: Sum of the block's earlier outputs, `[..., d]`; its dtype, which may be wider
            than that of the sources, is the dtype of the sum. None: the block has one output so
            far.
        update: The last sub-layer's output, `[..., d]`. None: it is in `partial_sum` already.
        query_d: Pseudo-query w, `[d]`.
        gain_d: Gain g of the key norm, `[d]`.
        norm_gain_d: Gain of the norm that follows the read, `[d]`; None skips that norm.
        eps: Added to the mean square of each source and of p.
        norm_eps: Added to the mean square of h; None means `eps`.
        implementation: "xla", "mosaic_tpu" or "triton_gpu"; None takes the kernels of the
            accelerator where they can, and else XLA. Kernels differentiate in reverse mode only.
        return_weights: Whether to return the depth weights too.
        return_sources: Whether to return the sources too, for the next read.

    Returns:
        p `[..., d]`, rounded before it is read; hidden `[..., d]` in the dtype of the sources; with
        `return_weights` also float32 depth weights `[n + 1, ...]`, the last of p (of a bank: of all
        its rows, zero past the count, and p); with `return_sources` also the sources, as a `Bank`
        or `FinishedSources`. Reading those from then on saves kernels memory traffic: see there.

    Raises:
        ValueError: No source, neither partial sum nor update, shapes or dtypes that do not fit, or
            an implementation that cannot compute this.

    References:
        Attention Residuals, arXiv:2603.15031, equations 2 to 4.
    """
    values, _ = check_sources(sources)
    shape = values[0].shape
    if partial_sum is None and update is None:
        raise ValueError(
            "single_phase: pass partial_sum, update or both; with neither, depth_attention reads"
            " the finished sources alone"
        )
    for name, array in (("partial_sum", partial_sum), ("update", update)):
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name}: expected the shape of each source, {list(shape)}, got {list(array.shape)}"
            )
    for name, vector in (("query_d", query_d), ("gain_d", gain_d), ("norm_gain_d", norm_gain_d)):
        if vector is not None:
            check_vectors(name, vector, shape[-1:])
    if partial_sum is None:
        partial_sum, update = update, None
    norm_eps = eps if norm_eps is None else norm_eps
    chosen = _choose(implementation, values, partial_sum)
    if (
        chosen != "xla"
        and isinstance(values, tuple)
        and _takes_one_kernel(chosen, values, partial_sum)
    ):
        from pallas_kernels.single_phase import op

        summed, hidden, weights, values = op.single_phase(
            values,
            partial_sum,
            update,
            fold(query_d, gain_d),
            None if norm_gain_d is None else norm_gain_d.astype(jnp.float32),
            eps=eps,
            norm_eps=norm_eps,
            implementation=chosen,
        )
        known = sources.inverse_rms if isinstance(sources, FinishedSources) else None
        following = FinishedSources(values, known)
    else:
        (output,), (lse,), (finished,), following = inter_block(
            sources,
            query_d[None],
            gain_d[None],
            eps=eps,
            implementation=chosen,
            return_weights=True,
            return_sources=True,
        )
        summed, hidden, gate = merge(
            output,
            lse,
            partial_sum,
            update,
            query_d,
            gain_d,
            norm_gain_d=norm_gain_d,
            eps=eps,
            norm_eps=norm_eps,
            implementation=chosen,
            return_gate=True,
        )
        weights = join_weights(finished, gate)
    results = (summed, hidden, *((weights,) if return_weights else ()))
    return (*results, following) if return_sources else results


def _choose(implementation, values, partial_sum) -> Implementation:
    """One implementation for both phases, also where a single kernel takes their place."""

    def reason_against(name: str) -> str | None:
        from pallas_kernels.inter_block import op as phase_1
        from pallas_kernels.merge import op as phase_2

        return phase_1.unsupported(values, 1, name) or phase_2.unsupported(
            values[0], partial_sum, name
        )

    return choose_implementation(implementation, reason_against)


def _takes_one_kernel(implementation: Implementation, values, partial_sum) -> bool:
    from pallas_kernels.single_phase.op import unsupported

    return unsupported(values, partial_sum, implementation) is None
