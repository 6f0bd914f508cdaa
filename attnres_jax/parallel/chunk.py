"""One chunk of sub-layers as a pure function of its parameters, the sources and the open sum.

All stages run this one program at once, each for a chunk of its own, so the chunk's number is
traced: the sources are a bank whose count differs from stage to stage, and so may the places where
blocks begin and end. Sub-layers are grouped so that no chunk begins a block within a group; then
all reads of a group share phase 1, as the reads of a block do. Where every chunk has its blocks in
the same places, the groups are those blocks and nothing is decided at run time.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.models.sublayers import Run, split_leading
from attnres_jax.ops import Bank, inter_block, merge, rms_norm
from attnres_jax.parallel.layers import (
    Program,
    apply_layer,
    at_chunk,
    run_layers,
    select,
    split_layers,
)
from attnres_jax.parallel.partition import Partition

_NO_SHARE = float(np.finfo(np.float32).max)
"""A log-sum-exp beside which the partial sum's gate is exactly zero."""


class _Read(NamedTuple):
    """Phase 1 of one read, and what the rest of its sub-layer needs."""

    output: jax.Array
    lse: jax.Array
    query_d: jax.Array
    gain_d: jax.Array
    num_sources: jax.Array
    is_used: jax.Array


def run_chunk(
    program: Program,
    params: dict[str, Any],
    values: jax.Array,
    partial_sum: jax.Array | None,
    chunk: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the sub-layers of one chunk.

    Args:
        program: What is known when this is traced.
        params: "attention", "feed_forward" and their norms, stacked over the chunk's layers, and
            "reads", stacked over its sub-layers; anything finite where it is shorter than others.
        values: `[n_max, b, t, d]`; rows that are not finished before the chunk are not read.
        partial_sum: Sum of the open block's outputs, `[b, t, d]`, not read where the chunk begins a
            block; None if every chunk does.
        chunk: Number of the chunk, int32.

    Returns:
        The sums of the blocks that the chunk finished, `[n, b, t, d]` with n the most of any chunk,
        of no meaning beyond its own; and the partial sum after the chunk, None if none was given.
        Of a standard residual stream, the stream after the chunk, `[1, b, t, d]`, and None.
    """
    config, partition = program.config, program.partition
    count = at_chunk(partition.sources_before, chunk)
    if partition.block_size is None:
        residual = jax.lax.dynamic_index_in_dim(values, count - 1, keepdims=False)
        return _run_standard(program, params, residual, chunk)[None], None
    bank = Bank(values, count)
    total = partial_sum
    if total is None:
        total = jnp.zeros_like(values[0], program.sum_dtype)
    groups = _groups(partition, config.reads_per_group)
    sizes = [group.stop - group.start for group in groups]
    vectors = split_leading((params["reads"]["query"], params["reads"]["gain"]), sizes)
    runs = [run for group in groups for run in _runs(group)]
    layers = iter(split_layers(program, params, runs, chunk))
    step = _make_step(program, chunk)
    for group, (query_sd, gain_sd) in zip(groups, vectors, strict=True):
        begins = _flag(partition.begins_block, chunk, group.start)
        outputs, lse, bank = inter_block(
            bank,
            query_sd,
            gain_sd,
            eps=config.norm_eps,
            implementation=config.implementation,
            return_sources=True,
        )
        lse_s = [
            # A block's first read has no partial sum: it is empty, and its gate is zero.
            select(begins, jnp.full_like(lse[0], _NO_SHARE), lse[0]),
            *lse[1:],
        ]
        num_sources = [bank.count + jnp.where(begins, 0, 1)] + (len(outputs) - 1) * [bank.count + 1]
        is_used = [
            jnp.asarray(_flag(partition.is_used, chunk, i)) for i in range(group.start, group.stop)
        ]
        reads = list(map(_Read, outputs, lse_s, query_sd, gain_sd, num_sources, is_used))
        total = select(begins, jnp.zeros_like(total), total)
        carry: Any = None if begins is True else (total, None)
        for run in _runs(group):
            offset = run.start - group.start
            reads_of_run = reads[offset : offset + run.stop - run.start]
            carry = run_layers(step, carry, run, next(layers), reads_of_run)
        total = carry[0] + carry[1].astype(program.sum_dtype)
        bank = _append(bank, total, _flag(partition.ends_block, chunk, group.stop - 1))
    # Rows one by one: a slice past the end of the bank would start earlier instead.
    own = count + jnp.arange(max(partition.blocks_finished))
    new = bank.values[jnp.minimum(own, len(bank.values) - 1)]
    return new, None if partial_sum is None else total


def _run_standard(program: Program, params, residual_btd, chunk):
    """The same sub-layers around a plain residual stream."""
    config, partition = program.config, program.partition

    def sublayer(kind, residual_btd, layer, is_used):
        normed_btd = rms_norm(residual_btd, layer.norm_gain, eps=config.norm_eps)
        update = apply_layer(program, kind, chunk, layer.state, normed_btd)
        return residual_btd + jnp.where(is_used, update, jnp.zeros_like(update)), None

    everything = Run(0, partition.num_slots)
    (layers,) = split_layers(program, params, [everything], chunk)
    is_used = [jnp.asarray(_flag(partition.is_used, chunk, i)) for i in range(everything.stop)]
    step = _rematerialise(program, sublayer)
    return run_layers(step, residual_btd, everything, layers, is_used)


def _make_step(program: Program, chunk: jax.Array):
    """What `run_layers` folds over the sub-layers of a group."""
    config, sum_dtype = program.config, program.sum_dtype

    def sublayer(kind, carry, layer, read):
        if config.retrofit:  # The number of sources is traced; see `_scaled_norm`.
            norm_gain, eps = None, None
        else:
            norm_gain, eps = layer.norm_gain, config.norm_eps
        if carry is None:
            total, hidden = jnp.zeros_like(read.output, sum_dtype), read.output
            if norm_gain is not None:
                hidden = rms_norm(hidden, norm_gain, eps=config.norm_eps)
        else:
            total, update = carry
            total, hidden = merge(
                read.output,
                read.lse,
                total,
                update,
                read.query_d,
                read.gain_d,
                norm_gain_d=norm_gain,
                eps=config.norm_eps,
                norm_eps=eps,
                implementation=config.implementation,
            )
        if config.retrofit:
            hidden = _scaled_norm(hidden, layer.norm_gain, read.num_sources, config.norm_eps)
        update = apply_layer(program, kind, chunk, layer.state, hidden)
        return (total, jnp.where(read.is_used, update, jnp.zeros_like(update))), None

    return _rematerialise(program, sublayer)


def _rematerialise(program: Program, sublayer):
    # A pipeline runs each chunk again, whatever the setting, as remat="block" does a block.
    if program.config.remat != "full":
        return sublayer
    return jax.checkpoint(sublayer, static_argnums=(0,))


def _scaled_norm(hidden, gain_d, num_sources, eps):
    """RMSNorm with `eps / n**2`, for a traced n: that of n times the read with `eps`."""
    scaled = hidden.astype(jnp.float32) * num_sources.astype(jnp.float32)
    return rms_norm(scaled, gain_d, eps=eps).astype(hidden.dtype)


def _groups(partition: Partition, reads_per_group: int | None) -> list[Run]:
    """Cuts slots wherever some chunk begins or has ended a block, and after `reads_per_group`."""
    cuts = {0, partition.num_slots}
    for begins, ends in zip(partition.begins_block, partition.ends_block, strict=True):
        cuts |= {slot for slot, here in enumerate(begins) if here}
        cuts |= {slot + 1 for slot, here in enumerate(ends) if here}
    groups = []
    for start, stop in itertools.pairwise(sorted(cuts)):
        size = reads_per_group or stop - start
        groups += [Run(a, min(a + size, stop)) for a in range(start, stop, size)]
    return groups


def _runs(group: Run) -> list[Run]:
    """A group's first sub-layer may differ from the others, which may be scanned."""
    runs = [Run(group.start, group.start + 1), Run(group.start + 1, group.stop)]
    return [run for run in runs if run.start < run.stop]


def _flag(table: Sequence[Sequence[bool]], chunk: jax.Array, slot: int) -> bool | jax.Array:
    """A chunk's entry for a slot: a python bool where all chunks agree."""
    column = [flags[slot] for flags in table]
    return column[0] if len(set(column)) == 1 else at_chunk(column, chunk)


def _append(bank: Bank, total: jax.Array, ends: bool | jax.Array) -> Bank:
    """Adds the block's sum where the block ends here."""
    if ends is False:
        return bank
    total = total.astype(bank.values.dtype)
    if ends is True:
        return bank.append(total)
    # Where no block ends, the row may be the last of a full bank, which must stay as it is.
    row = jax.lax.dynamic_index_in_dim(bank.values, bank.count, keepdims=False)
    return Bank(
        bank.append(jnp.where(ends, total, row)).values, bank.count + ends.astype(jnp.int32)
    )
