"""The pipeline as programs over ticks: three, with the same results and derivatives.

    autodiff       a scan over ticks that JAX differentiates. The plainest, to which the others are
                   held; keeps the sources of every tick.
    two_scan       the same scan, and a second one in reverse as its derivative. Keeps the sources
                   of every microbatch.
    one_f_one_b    both directions in one program, in which a microbatch goes back as soon as it
                   has arrived. Keeps the sources of at most two microbatches a stage.

The first two return what the last stage computes from all sources, for any loss to follow. In the
third the loss is part of the program, since gradients start there before all microbatches are in.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attnres_jax.parallel.ring import (
    STAGE,
    Params,
    Pipeline,
    empty_cache,
    empty_hop,
    place_of,
    read_rows,
    write_rows,
)
from attnres_jax.parallel.ticks import (
    backward_tick,
    empty_gradients,
    forward_tick,
    run_forward,
    whole_chunk,
)

EXECUTORS = ("autodiff", "two_scan", "one_f_one_b")

Finish = Callable[[Params, jax.Array], jax.Array]
"""`(parameters, sources [n, b, t, d]) -> [b, t, d]`: the final read."""
Loss = Callable[[Params, jax.Array, Any], jax.Array]
"""`(parameters, sources [n, b, t, d], targets of the microbatch) -> scalar`."""


def autodiff(
    pipeline: Pipeline, finish: Finish, params: Params, finish_params: Params, x_mbtd: jax.Array
) -> jax.Array:
    """Runs all chunks, then `finish`, in a form that JAX differentiates by itself.

    Args:
        pipeline: What is known when this is traced.
        finish: Applied to the sources of each microbatch.
        params: Parameters of this stage's chunks, `[c, ...]`.
        finish_params: Parameters of `finish`.
        x_mbtd: Embeddings of all microbatches, `[m, b, t, d]`; read on the first stage.

    Returns:
        The results of `finish`, `[m, ...]`, of meaning on the last stage only.
    """
    cache = run_forward(pipeline, params, x_mbtd, remat=True)
    return _finish_all(pipeline, finish, finish_params, cache)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def two_scan(
    pipeline: Pipeline, finish: Finish, params: Params, finish_params: Params, x_mbtd: jax.Array
) -> jax.Array:
    """The same as `autodiff`, with a backward pass of its own that keeps the cache alone."""
    return _two_scan_forward(pipeline, finish, params, finish_params, x_mbtd)[0]


def _two_scan_forward(pipeline, finish, params, finish_params, x_mbtd):
    cache = run_forward(pipeline, params, x_mbtd)
    finished = _finish_all(pipeline, finish, finish_params, cache)
    # The embeddings themselves are not needed again: their shape is.
    return finished, (params, finish_params, x_mbtd, cache)


def _two_scan_backward(pipeline, finish, kept, dfinished):
    params, finish_params, x_mbtd, cache = kept
    payload = pipeline.payload

    def unfinish(dfinish_params, microbatch):
        values = read_rows(cache.rows, microbatch, payload.padding, payload.num_sources)
        _, pullback = jax.vjp(finish, finish_params, values)
        more, dvalues = pullback(dfinished[microbatch])
        return jax.tree.map(jnp.add, dfinish_params, more), _pad_rows(pipeline, dvalues)

    microbatches = jnp.arange(pipeline.schedule.microbatches)
    zeros = jax.tree.map(jnp.zeros_like, finish_params)
    dfinish_params, drows = jax.lax.scan(unfinish, zeros, microbatches)

    def tick(carry, tick):
        return backward_tick(pipeline, params, tick, cache, *carry), None

    schedule = pipeline.schedule
    ticks = jnp.arange(schedule.first_backward_tick, schedule.num_ticks)
    start = empty_gradients(pipeline, params, x_mbtd, drows)
    (gradients, _), _ = jax.lax.scan(tick, start, ticks)
    return gradients.params, dfinish_params, gradients.x_mbtd


two_scan.defvjp(_two_scan_forward, _two_scan_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def one_f_one_b(
    pipeline: Pipeline,
    loss: Loss,
    params: Params,
    loss_params: Params,
    x_mbtd: jax.Array,
    targets: Any,
) -> jax.Array:
    """Sums `loss` over the microbatches, with a derivative computed along with it.

    Args:
        pipeline: What is known when this is traced; its schedule is an interleaved 1F1B.
        loss: Applied to the sources of each microbatch on the last stage.
        params: Parameters of this stage's chunks, `[c, ...]`.
        loss_params: Parameters of `loss`.
        x_mbtd: Embeddings of all microbatches, `[m, b, t, d]`; read on the first stage.
        targets: What else `loss` takes, `[m, ...]` each; gets no gradient.

    Returns:
        The sum on the last stage and zero elsewhere, float32.
    """
    # Without a derivative there is nothing to interleave.
    schedule = dataclasses.replace(pipeline.schedule, order="forward_then_backward")
    pipeline = pipeline._replace(schedule=schedule)
    payload = pipeline.payload
    cache = run_forward(pipeline, params, x_mbtd)

    def add(total, microbatch):
        values = read_rows(cache.rows, microbatch, payload.padding, payload.num_sources)
        return total + loss(loss_params, values, _at(targets, microbatch)), None

    total, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), jnp.arange(schedule.microbatches))
    is_last = jax.lax.axis_index(STAGE) == schedule.stages - 1
    return jnp.where(is_last, total, jnp.zeros_like(total))


def _one_f_one_b_forward(pipeline, loss, params, loss_params, x_mbtd, targets):
    payload, schedule = pipeline.payload, pipeline.schedule

    def add_loss(operands):
        here, values, total, dloss_params = operands
        value, pullback = jax.vjp(
            lambda p, v: loss(p, v, _at(targets, here.microbatch)), loss_params, values
        )
        more, dvalues = pullback(jnp.ones_like(value))
        return total + value, jax.tree.map(jnp.add, dloss_params, more), dvalues

    def no_loss(operands):
        _, values, total, dloss_params = operands
        return total, dloss_params, jnp.zeros_like(values)

    def tick(phase, carry, tick):
        cache, forward_hop, (gradients, backward_hop), sums = carry
        if phase.runs_forward:
            cache, forward_hop = forward_tick(
                pipeline, whole_chunk(pipeline), params, x_mbtd, tick, cache, forward_hop
            )
        if phase.runs_backward:
            here = place_of(pipeline, schedule.backward(tick, jax.lax.axis_index(STAGE)))
            values = read_rows(cache.rows, here.slot, payload.padding, payload.num_sources)
            ends = here.is_last & here.is_active
            operands = here, values, *sums
            if pipeline.communicates:  # Then every device of a group must take part.
                both = add_loss(operands), no_loss(operands)
                outcome = jax.tree.map(lambda a, b: jnp.where(ends, a, b), *both)
            else:
                outcome = jax.lax.cond(ends, add_loss, no_loss, operands)
            *sums, dvalues = outcome
            start = jnp.int32(payload.padding)
            dvalues += read_rows(gradients.rows, here.slot, start, payload.num_sources)
            rows = write_rows(gradients.rows, here.slot, start, dvalues, ends)
            gradients, backward_hop = backward_tick(
                pipeline, params, tick, cache, gradients._replace(rows=rows), backward_hop
            )
        return (cache, forward_hop, (gradients, backward_hop), tuple(sums)), None

    cache = empty_cache(pipeline, x_mbtd)
    carry = (
        cache,
        empty_hop(pipeline, x_mbtd),
        empty_gradients(pipeline, params, x_mbtd, jnp.zeros_like(cache.rows)),
        (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, loss_params)),
    )
    for phase in schedule.phases:
        ticks = jnp.arange(phase.start, phase.stop)
        carry, _ = jax.lax.scan(partial(tick, phase), carry, ticks)
    _, _, (gradients, _), (total, dloss_params) = carry
    return total, (gradients.params, dloss_params, gradients.x_mbtd)


def _one_f_one_b_backward(pipeline, loss, kept, dtotal):
    scaled = jax.tree.map(lambda leaf: dtotal.astype(leaf.dtype) * leaf, kept)
    return *scaled, None


one_f_one_b.defvjp(_one_f_one_b_forward, _one_f_one_b_backward)


def _finish_all(pipeline, finish, finish_params, cache):
    payload = pipeline.payload

    def one(microbatch):
        values = read_rows(cache.rows, microbatch, payload.padding, payload.num_sources)
        return finish(finish_params, values)

    return jax.lax.map(one, jnp.arange(pipeline.schedule.microbatches))


def _pad_rows(pipeline, dvalues):
    """Gradients of the sources, as rows of a cache."""
    payload = pipeline.payload
    around = (payload.padding, payload.finished), *((0, 0),) * (dvalues.ndim - 1)
    return jnp.pad(dvalues, around)


def _at(tree, microbatch):
    return jax.tree.map(lambda leaf: leaf[microbatch], tree)
