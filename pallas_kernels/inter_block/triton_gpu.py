"""Phase 1 on NVIDIA GPUs: S reads of the finished sources in Triton kernels, and their gradient.

All products run on the matrix units. A program has a few tokens. Forward, it finds their logits, of
all sources and reads in one product, and then reads the sources again for the outputs. Backward, it
finds every scalar of a token, in products of its sources and cotangents, and reads both again for
the sources' gradients. The second time they should come from the second-level cache: a launch takes
no more tokens than it holds on average, see `triton_tiling`. Gradients of the queries sum over
tokens, so a second kernel backward owns some columns of many of them, and computes one float32 row;
a last one adds these rows in a fixed order.

A program that keeps a token's rows would have to multiply them by all queries in its vector units,
which takes longer than to read them again.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.inter_block import triton_kernels as kernels
from pallas_kernels.inter_block.triton_tiling import MAX_READS, MAX_SOURCES, Step, Tiling
from pallas_kernels.triton_launch import cdiv, launch, row_sums


def forward(
    values: tuple[jax.Array, ...] | jax.Array,
    folded_sd: jax.Array,
    *,
    count: jax.Array | None = None,
    eps: float,
    carry: tuple[tuple[jax.Array, ...], jax.Array] | None = None,
    tiling: Tiling,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array]:
    """Reads the sources with S folded queries: `o_s = sum_n softmax_n(<w_s, v_n> r_n) v_n`.

    Sources beyond `tiling.sources_per_launch` are read by further launches, which join what the
    earlier ones found through log-sum-exp, with float32 outputs in between.

    Args:
        values: n arrays `[t, d]`, or a bank `[n, t, d]`; float32, bfloat16 or float16.
        folded_sd: float32 products of pseudo-query and key-norm gain, at most 24 of them.
        count: int32 scalar, how many rows of the bank are sources; the others are not fetched.
        eps: Added to the mean square of each source.
        carry: Outputs and log-sum-exp of the same reads of other sources, to be joined.
        tiling: How the kernel is launched, see `triton_tiling`.

    Returns:
        S outputs `[t, d]` in the sources' dtype, rounded once; their log-sum-exp `[s, t]`; logits
        `[s, n, t]`, minus infinity past a bank's count; inverse RMS `[n, t]`. Statistics are
        float32. A read of a single array is that array, uncopied.

    References:
        Attention Residuals, arXiv:2603.15031, algorithm 1, phase 1.
    """
    num_reads, width = folded_sd.shape
    dtype, num_tokens = values[0].dtype, values[0].shape[0]
    if num_reads > MAX_READS:
        raise ValueError(f"triton_gpu: at most {MAX_READS} reads a launch, got {num_reads}")
    # One source weighs one: all there is to compute is its logit.
    identity = len(values) == 1 and count is None and carry is None
    outputs, lse, logits, inverse_rms = (), folded_sd, [], []
    for start, stop in _groups(len(values), tiling.sources_per_launch):
        n = stop - start
        statistics = {
            "logits": ((num_reads, n, num_tokens), jnp.float32),
            "inverse_rms": ((n, num_tokens), jnp.float32),
        }
        output_dtype = dtype if stop == len(values) else jnp.float32
        read = {
            "lse": ((num_reads, num_tokens), jnp.float32),
            **{f"o{s}": ((num_tokens, width), output_dtype) for s in range(num_reads)},
        }
        found = launch(
            kernels.forward_kernel,
            name="inter_block_forward",
            inputs={
                "values": _of_launch(values, start, stop),
                "count_ptr": count,
                "folded": _parts(folded_sd, dtype),
                "carried_outputs": None if carry is None else carry[0],
                "carried_lse": None if carry is None else carry[1],
                "T": num_tokens,
                "eps": eps,
            },
            outputs=statistics if identity else statistics | read,
            unused=[*(read if identity else ()), *(f"o{s}" for s in range(num_reads, MAX_READS))],
            constants={
                **_constants(n, num_reads, width, count, start),
                **_padded(n, num_reads),
                **_step(tiling.forward),
            },
            grid=(cdiv(num_tokens, tiling.forward.tokens),),
            num_warps=tiling.forward.num_warps,
            compute_capability=tiling.compute_capability,
        )
        logits.append(found["logits"])
        inverse_rms.append(found["inverse_rms"])
        if identity:
            return tuple(values) * num_reads, logits[0][:, 0], logits[0], inverse_rms[0]
        outputs, lse = tuple(found[f"o{s}"] for s in range(num_reads)), found["lse"]
        carry = outputs, lse
    return outputs, lse, _join(logits, axis=1), _join(inverse_rms, axis=0)


def backward(
    values: tuple[jax.Array, ...] | jax.Array,
    folded_sd: jax.Array,
    lse_st: jax.Array,
    logits_snt: jax.Array,
    inverse_rms_nt: jax.Array,
    doutputs: tuple[jax.Array, ...],
    dlse_st: jax.Array | None,
    *,
    count: jax.Array | None = None,
    dlogits_snt: jax.Array | None = None,
    delta_st: jax.Array | None = None,
    dvalues: tuple[jax.Array, ...] | jax.Array | None = None,
    eps: float,
    tiling: Tiling,
) -> tuple[tuple[jax.Array, ...] | jax.Array, jax.Array]:
    """Gradients of `forward` to the sources and to the folded queries.

    With p the weights and a_sn = <do_s, v_n>:

        dlogit_sn = p_sn (a_sn - sum_m p_sm a_sm + dlse_s) + dlogits_sn
        dv_n = sum_s p_sn do_s + r_n sum_s dlogit_sn w_s - v_n r_n^2 / d sum_s dlogit_sn logit_sn
        dw_s = sum_{n, t} dlogit_sn r_n v_n

    Args:
        values: As in `forward`.
        folded_sd: As in `forward`.
        lse_st: As returned by `forward`; of all sources, if these are not all of them.
        logits_snt: As returned by `forward`.
        inverse_rms_nt: As returned by `forward`.
        doutputs: Cotangents of the outputs, S arrays `[t, d]` in the sources' dtype.
        dlse_st: Cotangent of the log-sum-exp, or None.
        count: As in `forward`.
        dlogits_snt: Cotangent of the logits, or None; ignored past a bank's count.
        delta_st: float32 `sum_n p_sn a_sn` over all sources, if these are not all of them.
        dvalues: Gradients to add to, in place: arrays like `values`. None starts from zero.
        eps: As in `forward`.
        tiling: How the kernels are launched.

    Returns:
        Gradients to the sources, summed over the reads (and to what `dvalues` held) in float32 and
        rounded once; float32 gradients to the folded queries, the same bits every time. Rows past
        a bank's count get zero, or keep what `dvalues` held.
    """
    del eps  # It is inside inverse_rms_nt.
    num_reads, width = folded_sd.shape
    num_tokens = values[0].shape[0]
    if num_reads > MAX_READS:
        raise ValueError(f"triton_gpu: at most {MAX_READS} reads a launch, got {num_reads}")
    groups = _groups(len(values), tiling.sources_per_launch)
    if isinstance(values, jax.Array) and len(groups) > 1 and dvalues is None:
        dvalues = jnp.zeros_like(values)  # Each launch adds to its own rows of the one array.
    capability = {"compute_capability": tiling.compute_capability}

    def launch_backward(start, stop, *, delta, delta_only):
        n, updated = stop - start, {}
        outputs: dict[str, Any] = {"coefficients": ((num_tokens, n, num_reads), jnp.float32)}
        if delta_only:
            outputs = {"new_delta": ((num_reads, num_tokens), jnp.float32)}
        elif dvalues is not None:
            updated["accumulated"] = _of_launch(dvalues, start, stop)
        elif isinstance(values, jax.Array):
            outputs["g0"] = (values.shape, values.dtype)
        else:
            outputs |= {f"g{i}": (x.shape, x.dtype) for i, x in enumerate(values[start:stop])}
        optional = ("new_delta", "coefficients", *(f"g{i}" for i in range(MAX_SOURCES)))
        return launch(
            kernels.backward_kernel,
            name="inter_block_delta" if delta_only else "inter_block_backward",
            inputs={
                "values": _of_launch(values, start, stop),
                "count_ptr": count,
                "folded": _parts(folded_sd, values[0].dtype),
                "lse": lse_st,
                "logits": logits_snt[:, start:stop],
                "inverse_rms": inverse_rms_nt[start:stop],
                "doutputs": doutputs,
                "dlse": dlse_st,
                "dlogits": None if dlogits_snt is None else dlogits_snt[:, start:stop],
                "delta": delta,
                "T": num_tokens,
                **({} if updated else {"accumulated": None}),
            },
            outputs=outputs,
            updated=updated,
            unused=[name for name in optional if name not in outputs],
            constants={
                **_constants(n, num_reads, width, count, start),
                **_padded(n, num_reads),
                **_step(tiling.backward),
            },
            grid=(cdiv(num_tokens, tiling.backward.tokens),),
            num_warps=tiling.backward.num_warps,
            **capability,
        )

    def launch_query_gradients(start, stop, coefficients):
        n, step, rows = stop - start, tiling.query_gradients, cdiv(num_tokens, tiling.row_tokens)
        found = launch(
            kernels.query_gradients_kernel,
            name="inter_block_query_gradients",
            inputs={
                "values": _of_launch(values, start, stop),
                "count_ptr": count,
                "coefficients": coefficients,
                "T": num_tokens,
            },
            outputs={"partials": ((rows, num_reads, width), jnp.float32)},
            constants={
                **_constants(n, num_reads, width, count, start),
                **_padded(n, num_reads),
                "ROW_TOKENS": tiling.row_tokens,
                **_step(step),
            },
            grid=(cdiv(width, step.columns), rows),
            num_warps=step.num_warps,
            **capability,
        )
        return found["partials"]

    if delta_st is None and len(groups) > 1:
        for start, stop in groups:
            found = launch_backward(start, stop, delta=delta_st, delta_only=True)
            delta_st = found["new_delta"]

    gradients, partials = [], []
    for start, stop in groups:
        found = launch_backward(start, stop, delta=delta_st, delta_only=False)
        partials.append(launch_query_gradients(start, stop, found["coefficients"]))
        if dvalues is not None:
            gradients += found["accumulated"]
            if count is not None:
                (dvalues,) = found["accumulated"]
        else:
            gradients += [found[f"g{i}"] for i in range(stop - start) if f"g{i}" in found]
    dfolded_sd = row_sums(_join(partials, axis=0), **capability)
    dvalues = gradients[-1] if count is not None else tuple(gradients)
    # Together, or a compiler puts off the queries' gradients and keeps all sources for them.
    return jax.lax.optimization_barrier((dvalues, dfolded_sd))


def _constants(n: int, s: int, d: int, count: jax.Array | None, start: int) -> dict[str, int]:
    return {
        "N": n,
        "S": s,
        "D": d,
        "BANK": count is not None,
        "FIRST": start if count is not None else 0,
    }


def _padded(n: int, s: int) -> dict[str, int]:
    """Sizes that matrix units take."""
    return {"N_PAD": max(16, _power_of_two(n)), "S_PAD": max(16, _power_of_two(s))}


def _step(step: Step) -> dict[str, int]:
    return {"TOKENS": step.tokens, "COLUMNS": step.columns, "STAGES": step.num_stages}


def _parts(folded_sd: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """The queries as matrix units take them beside sources of a dtype: bfloat16 in two parts."""
    if dtype != jnp.bfloat16:
        return (folded_sd,)
    # Not a conversion and its inverse, which XLA may take to cancel.
    high = jax.lax.reduce_precision(folded_sd, exponent_bits=8, mantissa_bits=7)
    return high.astype(dtype), (folded_sd - high).astype(dtype)


def _power_of_two(n: int) -> int:
    """The next one."""
    return 1 << (n - 1).bit_length()


def _groups(num_sources: int, largest: int) -> list[tuple[int, int]]:
    """Splits n sources into the fewest runs of at most `largest`, of nearly equal lengths."""
    number = cdiv(num_sources, largest)
    edges = [round(i * num_sources / number) for i in range(number + 1)]
    return list(itertools.pairwise(edges))


def _of_launch(values, start: int, stop: int) -> tuple[jax.Array, ...]:
    """The arrays of a launch; a bank is passed whole, as slicing would copy it."""
    return values[start:stop] if isinstance(values, tuple) else (values,)


def _join(arrays: list[jax.Array], axis: int) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)
