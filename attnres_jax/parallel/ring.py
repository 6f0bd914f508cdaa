"""What a stage of the ring keeps, and how it sends.

A stage caches the sources of each microbatch, in rows: those that it received and those that its
own chunks produced. The rows are all that a backward pass needs: it runs a chunk again from them.

Every function here runs inside a `jax.shard_map` that is manual over "stage" and over every axis
that splits the batch or time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax.parallel.cross_stage import Payload
from attnres_jax.parallel.layers import at_chunk
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
    return Place(
        *work,
        chunk=chunk,
        slot=work.microbatch % pipeline.schedule.cache_slots,
        is_first=chunk == 0,
        is_last=chunk == pipeline.partition.num_chunks - 1,
        before=at_chunk(pipeline.partition.sources_before, chunk),
        after=at_chunk(pipeline.partition.sources_after, chunk),
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
