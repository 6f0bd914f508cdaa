"""What one stage does in a tick, forward and backward, and what it keeps and sends.

Every function here runs inside a `jax.shard_map` that is manual over "stage" and over every axis
that splits the batch or time. It sees one stage's chunks, and hands over with `lax.ppermute` alone.

A stage caches the sources of each microbatch, in rows: those that it received and those that its
own chunks produced. The rows are all that a backward pass needs: it runs a chunk again from them.

Gradients of sources travel as the sources did, in the opposite direction. Each stage sums, in rows
like those of the cache, what its chunks say about each source. The gradients of the sources that
came with a chunk's window leave with the window of that chunk's backward pass. Those of the blocks
that a chunk produced stay until that chunk's backward pass needs them: then all later chunks, here
and elsewhere, have added theirs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax.parallel.chunk import at_chunk
from attnres_jax.parallel.cross_stage import Payload
from attnres_jax.parallel.partition import Partition
from attnres_jax.parallel.schedules import Schedule, Work

STAGE = "stage"

Params = Any
Chunk = Callable[
    [Params, jax.Array, jax.Array | None, jax.Array], tuple[jax.Array, jax.Array | None]
]
"""`(params, values, partial_sum, chunk) -> (new blocks, partial_sum)`; see `run_chunk`."""


class Pipeline(NamedTuple):
    """What the programs know when they are traced.

    Attributes:
        partition: Which chunk has which blocks.
        schedule: Who does what at each tick.
        payload: What each hop carries.
        chunk: Runs one chunk.
        sum_dtype: Dtype of an open block's partial sum.
        communicates: Whether the loss of a microbatch does, and so must run on all devices at once.
    """

    partition: Partition
    schedule: Schedule
    payload: Payload
    chunk: Chunk
    sum_dtype: Any
    communicates: bool = False


class Cache(NamedTuple):
    """What a stage keeps of the microbatches in its slots.

    Attributes:
        rows: `[slots, rows, b, t, d]`, as `Payload` lays them out.
        partial_sums: What came with the sources of each of the stage's chunks,
            `[slots, chunks, b, t, d]`; None where no chunk starts inside a block.
    """

    rows: jax.Array
    partial_sums: jax.Array | None


class Hop(NamedTuple):
    """Arrays on their way: sources sent before and after the compute, and the open block's sum."""

    early: jax.Array
    late: jax.Array
    partial_sum: jax.Array | None


class Place(NamedTuple):
    """Where one piece of work is: its chunk, its slot, and its rows of the cache."""

    microbatch: jax.Array
    virtual_stage: jax.Array
    is_active: jax.Array
    chunk: jax.Array
    slot: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    before: jax.Array  # Sources finished before the chunk,
    after: jax.Array  # and after it.


def place_of(pipeline: Pipeline, work: Work) -> Place:
    """Finds chunk, slot and rows of this stage's work."""
    chunk = work.virtual_stage * pipeline.schedule.stages + jax.lax.axis_index(STAGE)
    counts = pipeline.partition.sources_before
    return Place(
        *work,
        chunk=chunk,
        slot=work.microbatch % pipeline.schedule.cache_slots,
        is_first=chunk == 0,
        is_last=chunk == pipeline.partition.num_chunks - 1,
        before=at_chunk(counts[:-1], chunk),
        after=at_chunk(counts[1:], chunk),
    )


def empty_cache(pipeline: Pipeline, x_mbtd: jax.Array) -> Cache:
    """Returns a cache without sources, for microbatches like those of `x_mbtd`."""
    schedule, slots = pipeline.schedule, pipeline.schedule.cache_slots
    one = x_mbtd[0]
    partial_sums = None
    if pipeline.payload.carries_partial_sum:
        partial_sums = zeros_like(one, (slots, schedule.virtual_stages), pipeline.sum_dtype)
    return Cache(zeros_like(one, (slots, pipeline.payload.cache_rows)), partial_sums)


def empty_hop(pipeline: Pipeline, x_mbtd: jax.Array) -> Hop:
    """What arrives at the first tick: nothing, whatever its values."""
    payload, one = pipeline.payload, x_mbtd[0]
    return Hop(
        zeros_like(one, (payload.early,)),
        zeros_like(one, (payload.late,)),
        zeros_like(one, (), pipeline.sum_dtype) if payload.carries_partial_sum else None,
    )


def zeros_like(array: jax.Array, leading: tuple[int, ...], dtype: Any = None) -> jax.Array:
    """Zeros like `array`, with further axes in front."""
    return jnp.zeros((*leading, *array.shape), dtype or array.dtype)


def send(hop: Any, pipeline: Pipeline, step: int) -> Any:
    """Passes arrays on along the ring: `step` 1 to the next stage, -1 to the one before."""
    stages = pipeline.schedule.stages
    if stages == 1:
        return hop
    ring = [(stage, (stage + step) % stages) for stage in range(stages)]
    return jax.tree.map(lambda array: jax.lax.ppermute(array, STAGE, ring), hop)


def read_rows(rows: jax.Array, slot: jax.Array, start: jax.Array | int, count: int) -> jax.Array:
    """`rows[slot, start : start + count]`."""
    begin = (slot, start) + (0,) * (rows.ndim - 2)
    return jax.lax.dynamic_slice(rows, begin, (1, count, *rows.shape[2:]))[0]


def write_rows(
    rows: jax.Array, slot: jax.Array, start: jax.Array, new: jax.Array, where: jax.Array
) -> jax.Array:
    """Writes `new` to `rows[slot, start:]` where the flag says so; one for each row, or for all."""
    flags = jnp.broadcast_to(where, new.shape[:1]).reshape(-1, *(1,) * (new.ndim - 1))
    kept = jnp.where(flags, new, read_rows(rows, slot, start, new.shape[0]))
    return jax.lax.dynamic_update_slice(rows, kept[None], (slot, start) + (0,) * (rows.ndim - 2))


def params_of(params: Params, virtual_stage: jax.Array) -> Params:
    """Parameters of one of the stage's chunks."""
    return jax.tree.map(lambda leaf: leaf[virtual_stage], params)


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
