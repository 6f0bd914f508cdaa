"""What one stage does in a tick, forward and backward. It hands over with `lax.ppermute` alone.

Gradients of sources travel as the sources did, in the opposite direction. Each stage sums, in rows
like those of the cache, what its chunks say about each source. The gradients of the sources that
came with a chunk's window leave with the window of that chunk's backward pass. Those of the blocks
that a chunk produced stay until that chunk's backward pass needs them: then all later chunks, here
and elsewhere, have added theirs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax.parallel.ring import (
    STAGE,
    Cache,
    Hop,
    Params,
    Pipeline,
    empty_cache,
    empty_hop,
    params_of,
    place_of,
    read_rows,
    send,
    write_rows,
    zeros_like,
)


def whole_chunk(pipeline: Pipeline):
    """`(params of the stage, values, partial_sum, place) -> ...`: the chunk, with its parameters.

    They are cut out in here because JAX would keep what is cut out before, a copy for each tick.
    """

    def chunk(params, values, partial_sum, here):
        one = params_of(params, here.virtual_stage)
        return pipeline.chunk(one, values, partial_sum, here.chunk)

    return chunk


def forward_tick(
    pipeline: Pipeline,
    chunk: Callable,
    params: Params,
    x_mbtd: jax.Array,
    tick: jax.Array,
    cache: Cache,
    arrived: Hop,
) -> tuple[Cache, Hop]:
    """Runs what the schedule has for this stage forward, and exchanges with its neighbours.

    Args:
        pipeline: What is known when this is traced.
        chunk: `whole_chunk(pipeline)`, or that rematerialised.
        params: Parameters of the stage's chunks, stacked.
        x_mbtd: Embeddings of all microbatches.
        tick: int32.
        cache: As the tick before left it.
        arrived: What the stage before sent in the tick before.

    Returns:
        The cache, and what arrives for the next tick.
    """
    payload = pipeline.payload
    here = place_of(pipeline, pipeline.schedule.forward(tick, jax.lax.axis_index(STAGE)))
    # Sources are numbered from the embedding, which lies in row `padding`; the window before the
    # chunk is sources before - window to before - 1 and so starts in row before - 1.
    embedding = x_mbtd[here.microbatch]
    at_start = jnp.concatenate([zeros_like(embedding, (payload.window - 1,)), embedding[None]])
    window = jnp.where(here.is_first, at_start, jnp.concatenate([arrived.early, arrived.late]))
    rows = write_rows(cache.rows, here.slot, here.before - 1, window, here.is_active)
    # The older part of what the next stage needs is known already: it travels during the compute.
    early = send(read_rows(rows, here.slot, here.after - 1, payload.early), pipeline, 1)

    partial_sums, partial_sum = cache.partial_sums, arrived.partial_sum
    if partial_sums is not None and partial_sum is not None:
        # Even with a gradient of zero, JAX's derivative of an idle chunk would multiply by a NaN.
        partial_sum = jnp.where(here.is_active, partial_sum, jnp.zeros_like(partial_sum))
        partial_sums = write_rows(
            partial_sums, here.slot, here.virtual_stage, partial_sum[None], here.is_active
        )
    values = read_rows(rows, here.slot, payload.padding, payload.num_sources)
    new, partial_sum = chunk(params, values, partial_sum, here)
    rows = write_rows(rows, here.slot, here.before + payload.padding, new, here.is_active)
    newest = here.after - payload.late + payload.padding
    late = send(read_rows(rows, here.slot, newest, payload.late), pipeline, 1)
    return Cache(rows, partial_sums), Hop(early, late, send(partial_sum, pipeline, 1))


def run_forward(
    pipeline: Pipeline, params: Params, x_mbtd: jax.Array, *, remat: bool = False
) -> Cache:
    """Runs all microbatches forward; returns what each stage then has of them.

    Args:
        pipeline: What is known when this is traced.
        params: Parameters of the stage's chunks, stacked.
        x_mbtd: Embeddings of all microbatches.
        remat: Whether a derivative by JAX runs chunks again instead of keeping their insides.
    """
    chunk = whole_chunk(pipeline)
    if remat:
        chunk = jax.checkpoint(chunk)

    def tick(carry, tick):
        return forward_tick(pipeline, chunk, params, x_mbtd, tick, *carry), None

    start = empty_cache(pipeline, x_mbtd), empty_hop(pipeline, x_mbtd)
    ticks = jnp.arange(pipeline.schedule.ticks_each_way)
    (cache, _), _ = jax.lax.scan(tick, start, ticks)
    return cache


class Gradients(NamedTuple):
    """What a stage sums in the backward pass.

    Attributes:
        rows: Of the cached sources, `[slots, rows, b, t, d]`.
        params: Of the parameters of the stage's chunks.
        x_mbtd: Of the embeddings; on the first stage only.
    """

    rows: jax.Array
    params: Params
    x_mbtd: jax.Array


def backward_tick(
    pipeline: Pipeline,
    params: Params,
    tick: jax.Array,
    cache: Cache,
    gradients: Gradients,
    arrived: tuple[jax.Array, jax.Array | None],
) -> tuple[Gradients, tuple[jax.Array, jax.Array | None]]:
    """Runs what the schedule has for this stage backward, and exchanges with its neighbours.

    Args:
        pipeline: What is known when this is traced.
        params: Parameters of the stage's chunks, stacked.
        tick: int32.
        cache: From the forward pass; not changed.
        gradients: As the tick before left them. Rows of the last stage also hold the gradients of
            the final read.
        arrived: What the next stage sent in the tick before: gradients of the window that it got
            from here, and of the open block's sum.

    Returns:
        The gradients, and what arrives for the next tick.
    """
    payload = pipeline.payload
    here = place_of(pipeline, pipeline.schedule.backward(tick, jax.lax.axis_index(STAGE)))
    # After the last chunk nothing was sent: what arrives there is no gradient.
    sent = here.is_active & ~here.is_last
    window, dpartial_sum = arrived
    window = jnp.where(sent, window, jnp.zeros_like(window))
    rows = gradients.rows
    window += read_rows(rows, here.slot, here.after - 1, payload.window)
    rows = write_rows(rows, here.slot, here.after - 1, window, here.is_active)

    first_own = here.before + payload.padding
    own = jnp.arange(payload.finished) < here.after - here.before
    own &= here.is_active
    dnew = read_rows(rows, here.slot, first_own, payload.finished)
    zeros = jnp.zeros_like(dnew)
    dnew = jnp.where(own.reshape(-1, *(1,) * (dnew.ndim - 1)), dnew, zeros)
    rows = write_rows(rows, here.slot, first_own, zeros, own)

    values = read_rows(cache.rows, here.slot, payload.padding, payload.num_sources)
    partial_sum = None
    if cache.partial_sums is not None and dpartial_sum is not None:
        partial_sum = cache.partial_sums[here.slot, here.virtual_stage]
        dpartial_sum = jnp.where(sent, dpartial_sum, jnp.zeros_like(dpartial_sum))

    def chunk(params, values, partial_sum):
        return pipeline.chunk(params, values, partial_sum, here.chunk)

    one = params_of(params, here.virtual_stage)
    _, pullback = jax.vjp(chunk, one, values, partial_sum)
    dparams, dvalues, dpartial_sum = pullback((dnew, dpartial_sum))

    dvalues += read_rows(rows, here.slot, payload.padding, payload.num_sources)
    rows = write_rows(rows, here.slot, jnp.int32(payload.padding), dvalues, here.is_active)
    window = read_rows(rows, here.slot, here.before - 1, payload.window)
    # Else the compiler reads the window again where it is used, from a copy of all the rows.
    window, rows = jax.lax.optimization_barrier((window, rows))
    rows = write_rows(rows, here.slot, here.before - 1, jnp.zeros_like(window), here.is_active)
    dembedding = jnp.where(
        here.is_first & here.is_active, window[-1], gradients.x_mbtd[here.microbatch]
    )
    summed = Gradients(
        rows,
        jax.tree.map(
            lambda total, new: total.at[here.virtual_stage].add(new), gradients.params, dparams
        ),
        gradients.x_mbtd.at[here.microbatch].set(dembedding),
    )
    return summed, send((window, dpartial_sum), pipeline, -1)


def empty_gradients(
    pipeline: Pipeline, params: Params, x_mbtd: jax.Array, rows: jax.Array
) -> tuple[Gradients, tuple[jax.Array, jax.Array | None]]:
    """Gradients before the first backward tick, given those of the rows, and what arrives then."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    hop = empty_hop(pipeline, x_mbtd)
    window = jnp.concatenate([hop.early, hop.late])
    return Gradients(rows, zeros, jnp.zeros_like(x_mbtd)), (window, hop.partial_sum)
