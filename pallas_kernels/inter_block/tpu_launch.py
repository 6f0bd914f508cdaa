"""Launches the Pallas kernels of phase 1, on as many sources at a time as vector memory holds."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import chips
from pallas_kernels.inter_block import tiling
from pallas_kernels.inter_block.call import Call, Values


def unsupported(values: Values, num_reads: int) -> str | None:
    """Returns why the kernels cannot read these sources, or None if they can."""
    dtype = values[0].dtype
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"TPU kernels take bfloat16 and float32 sources, and these are {dtype}"
    if not isinstance(values, tuple) and len(values) > tiling.MAX_SOURCES:
        return f"TPU kernels take banks of up to {tiling.MAX_SOURCES} rows, got {len(values)}"
    if values[0].size and num_chunks(values, num_reads) is None:
        return (
            f"no tile of {len(values)} sources, {num_reads} reads and width {values[0].shape[-1]}"
            " fits in this TPU's vector memory; read fewer at a time"
        )
    return None


def run_forward(call, values, folded_sd, count, inverse_rms_nt):
    """Reads as many sources at a time as fit; each launch joins what the one before has found.

    Returns:
        What `mosaic_tpu.forward` returns; float32 outputs where it took several launches.
    """
    from pallas_kernels.inter_block import mosaic_tpu

    s, chunks = folded_sd.shape[0], source_chunks(call, values, folded_sd.shape[0])
    carry: Any = None
    outputs: Any = ()
    lse_st: Any = None
    all_logits, all_known = [], []
    for chunk in chunks:
        known = None if inverse_rms_nt is None else inverse_rms_nt[chunk.start : chunk.stop]
        outputs, lse_st, logits_snt, known = mosaic_tpu.forward(
            values if count is not None else values[chunk.start : chunk.stop],
            folded_sd,
            tiling=_tile(call, "forward", values, len(chunk), s, len(chunks) > 1),
            eps=call.eps,
            count=count,
            inverse_rms_nt=known if known is not None and len(known) else None,
            carry=carry,
            out_dtype=jnp.float32 if len(chunks) > 1 else None,
            interpret=call.interpret,
        )
        carry = outputs, lse_st
        all_logits.append(logits_snt)
        all_known.append(known)
    return outputs, lse_st, jnp.concatenate(all_logits, axis=1), jnp.concatenate(all_known)


def run_backward(
    call,
    values,
    folded_sd,
    count,
    statistics,
    outputs,
    doutputs,
    dvalues,
):
    """Walks over the sources as the forward did.

    Args:
        call: What is static.
        values: n arrays `[t, d]`, or a bank `[n, t, d]`.
        folded_sd: As the forward took it.
        count: As the forward took it.
        statistics: Log-sum-exp, logits and inverse RMS, and the cotangents of the first two.
        outputs: Where the forward took several launches, its rounded outputs, and the rest.
        doutputs: S cotangents of the outputs.
        dvalues: Cotangents to add to, or None.

    Returns:
        dv in the form of `values`, and dw `[s, d]`.
    """
    lse_st, logits_snt, inverse_rms_nt, dlse_st, dlogits_snt = statistics
    from pallas_kernels.inter_block import mosaic_tpu

    s, chunks = folded_sd.shape[0], source_chunks(call, values, folded_sd.shape[0])
    delta_st = None
    if len(chunks) > 1:
        parts = zip(doutputs, *outputs, strict=True)
        delta_st = jnp.stack(
            [jnp.sum(_f32(do) * (_f32(o) + _f32(low)), -1) for do, o, low in parts]
        )
    chip = chips.current() or chips.UNKNOWN
    all_dvalues, dfolded_sd = [], 0.0
    for chunk in chunks:
        part = slice(chunk.start, chunk.stop)
        dpart, dfolded = mosaic_tpu.backward(
            values if count is not None else values[part],
            folded_sd,
            lse_st,
            logits_snt[:, part],
            inverse_rms_nt[part],
            doutputs,
            dlse_st,
            tiling=_tile(call, "backward", values, len(chunk), s, False),
            cores=chip.cores,
            count=count,
            dlogits_snt=None if dlogits_snt is None else dlogits_snt[:, part],
            delta_st=delta_st,
            dvalues=dvalues if count is not None or dvalues is None else dvalues[part],
            interpret=call.interpret,
        )
        all_dvalues.append(dpart)
        dfolded_sd += dfolded
    if count is not None:
        return all_dvalues[0], dfolded_sd
    return tuple(x for part in all_dvalues for x in part), dfolded_sd


def needs_outputs(call: Call, values: Values, num_reads: int) -> bool:
    """Whether `run_backward` wants the outputs: each of several launches sees part of a softmax."""
    return len(source_chunks(call, values, num_reads)) > 1


def source_chunks(call: Call, values: Values, s: int) -> list[range]:
    """The sources of each launch."""
    n = len(values)
    chunks = 1 if call.tiling or n == 0 else num_chunks(values, s)
    size = -(-n // (chunks or 1))
    return [range(first, min(first + size, n)) for first in range(0, n, size)]


def num_chunks(values: Values, s: int) -> int | None:
    """In how many launches the sources fit into vector memory, in both directions."""
    n = len(values)
    chip = chips.current() or chips.UNKNOWN
    shape = partial(tiling.Shape, t=math.prod(values[0].shape[:-1]), d=values[0].shape[-1])
    itemsize = values[0].dtype.itemsize
    for chunks in range(1, n + 1 if isinstance(values, tuple) else 2):
        size = -(-n // chunks)
        both = (
            tiling.choose("forward", shape(size, s, itemsize=itemsize, carried=chunks > 1), chip),
            tiling.choose(
                "backward",
                shape(size, s, itemsize=itemsize),
                chip,
            ),
        )
        if all(both):
            return chunks
    return None


def _tile(call: Call, kind, values: Values, n: int, s: int, carried: bool) -> tiling.Tiling:
    t, d = values[0].shape
    shape = tiling.Shape(n, s, t, d, values[0].dtype.itemsize, carried)
    tile = call.tiling or tiling.choose(kind, shape, chips.current() or chips.UNKNOWN)
    if tile is None:
        raise ValueError(
            f"no tile of {n} sources, {s} reads and width {d} fits; pass fewer at a time"
        )
    return tile


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
