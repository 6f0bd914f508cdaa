"""Phase 2 on NVIDIA GPUs: add, merge and normalise in one Triton kernel, and its gradient.

Five rows of the width a token move forward (output, partial sum and update in; sum and hidden out)
and six backward (output, sum and two cotangents in; two gradients out). Everything else about a
token stays in registers. Backward, a program runs through many tokens, so that it can sum its share
of the parameters' gradients there; a last kernel adds these shares in a fixed order.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.merge.triton_tiling import Tiling
from pallas_kernels.triton_launch import cdiv, launch, row_sums
from pallas_kernels.triton_tiles import (
    NEVER,
    halves,
    load_tile,
    planes,
    store_tile,
    unplanes,
    vector_columns,
)

# Rows of the statistics.
INVERSE_RMS = tl.constexpr(0)
LOGIT = tl.constexpr(1)
LSE = tl.constexpr(2)
READ_INVERSE_RMS = tl.constexpr(3)


@triton.jit
def _forward_kernel(
    output,
    lse,
    partial_sum,
    update,
    folded,
    norm_gain,
    T,
    never,
    eps,
    norm_eps,
    summed,
    hidden,
    gate,
    statistics,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
):
    T = tl.cast(T, tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_range = tokens < T

    # The sum, rounded before it is read, with its square and its product with the query.
    outputs = ()
    sums_x = ()
    sums_y = ()
    square = tl.zeros((TOKENS, HALF), tl.float32)
    dot = tl.zeros((TOKENS, HALF), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        outputs = outputs + (load_tile(output, tokens, in_range, chunk, D, HALF, PACKED),)
        tile = load_tile(partial_sum, tokens, in_range, chunk, D, HALF, PACKED)
        x, y = halves(tile, 16, partial_sum.dtype.element_ty, PACKED)
        if update is not None:
            tile = load_tile(update, tokens, in_range, chunk, D, HALF, PACKED)
            more_x, more_y = halves(tile, 16, update.dtype.element_ty, PACKED)
            dtype = summed.dtype.element_ty
            x = (x + more_x).to(dtype).to(tl.float32)
            y = (y + more_y).to(dtype).to(tl.float32)
            store_tile(summed, tokens, in_range, chunk, x, y, D, HALF, PACKED)
        x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
        w_x = tl.load(folded + x_column, mask=x_mask, other=0.0)[None, :]
        w_y = tl.load(folded + y_column, mask=y_mask, other=0.0)[None, :]
        square += x * x + y * y
        dot += x * w_x + y * w_y
        sums_x = sums_x + (x,)
        sums_y = sums_y + (y,)
    r = tl.rsqrt(tl.sum(square, 1) / D + eps)
    logit = tl.sum(dot, 1) * r
    log_sum = tl.load(lse + tokens, mask=in_range, other=0.0)
    # One minus a gate near one has few accurate bits; the sigmoid of the opposite has them all.
    share = tl.sigmoid(logit - log_sum)
    rest = tl.sigmoid(log_sum - logit)
    tl.store(gate + tokens, share, mask=in_range)
    tl.store(statistics + INVERSE_RMS * T + tokens, r, mask=in_range)
    tl.store(statistics + LOGIT * T + tokens, logit, mask=in_range)
    tl.store(statistics + LSE * T + tokens, log_sum, mask=in_range)

    if norm_gain is not None:
        square = tl.zeros((TOKENS, HALF), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            o_x, o_y = halves(outputs[chunk], 16, output.dtype.element_ty, PACKED)
            x = rest[:, None] * o_x + share[:, None] * sums_x[chunk]
            y = rest[:, None] * o_y + share[:, None] * sums_y[chunk]
            square += x * x + y * y
        read_r = tl.rsqrt(tl.sum(square, 1) / D + norm_eps)
        tl.store(statistics + READ_INVERSE_RMS * T + tokens, read_r, mask=in_range)
    again_sixteen = tl.where(tl.program_id(0) > never, 0, 16)
    for chunk in tl.static_range(CHUNKS):
        o_x, o_y = halves(outputs[chunk], again_sixteen, output.dtype.element_ty, PACKED)
        x = rest[:, None] * o_x + share[:, None] * sums_x[chunk]
        y = rest[:, None] * o_y + share[:, None] * sums_y[chunk]
        if norm_gain is not None:
            x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
            g_x = tl.load(norm_gain + x_column, mask=x_mask, other=0.0)[None, :]
            g_y = tl.load(norm_gain + y_column, mask=y_mask, other=0.0)[None, :]
            x = x * read_r[:, None] * g_x
            y = y * read_r[:, None] * g_y
        store_tile(hidden, tokens, in_range, chunk, x, y, D, HALF, PACKED)


@triton.jit
def _backward_kernel(
    output,
    summed,
    folded,
    norm_gain,
    statistics,
    dsummed,
    dhidden,
    dgate,
    T,
    never,
    doutput,
    dlse,
    dsum,
    dfolded,
    dnorm_gain,
    D: tl.constexpr,
    ROW_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
):
    T = tl.cast(T, tl.int64)
    OUTPUT: tl.constexpr = output.dtype.element_ty
    SUM: tl.constexpr = summed.dtype.element_ty
    # Gradients of the query and of the norm's gain, halves x and y of each chunk.
    of_query = ()
    of_gain = ()
    for _ in tl.static_range(2 * CHUNKS):
        of_query = of_query + (tl.zeros((TOKENS, HALF), tl.float32),)
        of_gain = of_gain + (tl.zeros((TOKENS, HALF), tl.float32),)

    for step in range(ROW_TOKENS // TOKENS):
        # 16 each time, see `halves`.
        sixteen = tl.where(step + 1 > never, 0, 16)
        again_sixteen = tl.where(step + 2 > never, 0, 16)
        start = tl.program_id(0).to(tl.int64) * ROW_TOKENS + step * TOKENS
        tokens = start + tl.arange(0, TOKENS)
        in_range = tokens < T
        r = tl.load(statistics + INVERSE_RMS * T + tokens, mask=in_range, other=0.0)
        logit = tl.load(statistics + LOGIT * T + tokens, mask=in_range, other=0.0)
        log_sum = tl.load(statistics + LSE * T + tokens, mask=in_range, other=0.0)
        share = tl.sigmoid(logit - log_sum)
        rest = tl.sigmoid(log_sum - logit)

        # With dn = dhidden * gain and the difference of the two that are merged, the sums over d of
        # dn * read, dn * difference and read * difference give all scalars.
        outputs = ()
        sums = ()
        dhiddens = ()
        dn_read = tl.zeros((TOKENS, HALF), tl.float32)
        dn_difference = tl.zeros((TOKENS, HALF), tl.float32)
        read_difference = tl.zeros((TOKENS, HALF), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            outputs = outputs + (load_tile(output, tokens, in_range, chunk, D, HALF, PACKED),)
            sums = sums + (load_tile(summed, tokens, in_range, chunk, D, HALF, PACKED),)
            dhiddens = dhiddens + (load_tile(dhidden, tokens, in_range, chunk, D, HALF, PACKED),)
        for chunk in tl.static_range(CHUNKS):
            o_x, o_y = halves(outputs[chunk], sixteen, OUTPUT, PACKED)
            s_x, s_y = halves(sums[chunk], sixteen, SUM, PACKED)
            dn_x, dn_y = halves(dhiddens[chunk], sixteen, OUTPUT, PACKED)
            difference_x = s_x - o_x
            difference_y = s_y - o_y
            if norm_gain is not None:
                x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
                dn_x *= tl.load(norm_gain + x_column, mask=x_mask, other=0.0)[None, :]
                dn_y *= tl.load(norm_gain + y_column, mask=y_mask, other=0.0)[None, :]
                read_x = rest[:, None] * o_x + share[:, None] * s_x
                read_y = rest[:, None] * o_y + share[:, None] * s_y
                dn_read += dn_x * read_x + dn_y * read_y
                product = read_x * difference_x + read_y * difference_y
                read_difference += product
            product = dn_x * difference_x + dn_y * difference_y
            dn_difference += product
        if norm_gain is not None:
            read_r = tl.load(statistics + READ_INVERSE_RMS * T + tokens, mask=in_range, other=0.0)
            radial = tl.sum(dn_read, 1) * read_r * read_r * read_r / D
            pull = tl.sum(dn_difference, 1) * read_r - radial * tl.sum(read_difference, 1)
        else:
            pull = tl.sum(dn_difference, 1)
        if dgate is not None:
            pull += tl.load(dgate + tokens, mask=in_range, other=0.0)
        dlogit = share * rest * pull
        tl.store(dlse + tokens, -dlogit, mask=in_range)

        key_pull = dlogit * r * r * logit / D
        query_pull = dlogit * r
        more_query = ()
        more_gain = ()
        for chunk in tl.static_range(CHUNKS):
            o_x, o_y = halves(outputs[chunk], again_sixteen, OUTPUT, PACKED)
            s_x, s_y = halves(sums[chunk], again_sixteen, SUM, PACKED)
            dread_x, dread_y = halves(dhiddens[chunk], again_sixteen, OUTPUT, PACKED)
            x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
            if norm_gain is not None:
                read_x = rest[:, None] * o_x + share[:, None] * s_x
                read_y = rest[:, None] * o_y + share[:, None] * s_y
                normalised_x = dread_x * read_x * read_r[:, None]
                normalised_y = dread_y * read_y * read_r[:, None]
                more_gain = more_gain + (of_gain[2 * chunk] + normalised_x,)
                more_gain = more_gain + (of_gain[2 * chunk + 1] + normalised_y,)
                g_x = tl.load(norm_gain + x_column, mask=x_mask, other=0.0)[None, :]
                g_y = tl.load(norm_gain + y_column, mask=y_mask, other=0.0)[None, :]
                dread_x = dread_x * g_x * read_r[:, None] - read_x * radial[:, None]
                dread_y = dread_y * g_y * read_r[:, None] - read_y * radial[:, None]
            do_x = rest[:, None] * dread_x
            do_y = rest[:, None] * dread_y
            store_tile(doutput, tokens, in_range, chunk, do_x, do_y, D, HALF, PACKED)
            w_x = tl.load(folded + x_column, mask=x_mask, other=0.0)[None, :]
            w_y = tl.load(folded + y_column, mask=y_mask, other=0.0)[None, :]
            ds_x = share[:, None] * dread_x + query_pull[:, None] * w_x - key_pull[:, None] * s_x
            ds_y = share[:, None] * dread_y + query_pull[:, None] * w_y - key_pull[:, None] * s_y
            if dsummed is not None:
                gradient = dsummed[0]
                tile = load_tile(gradient, tokens, in_range, chunk, D, HALF, PACKED)
                x, y = halves(tile, 16, SUM, PACKED)
                ds_x += x
                ds_y += y
            else:
                gradient = dsum
            store_tile(gradient, tokens, in_range, chunk, ds_x, ds_y, D, HALF, PACKED)
            more_query = more_query + (of_query[2 * chunk] + query_pull[:, None] * s_x,)
            more_query = more_query + (of_query[2 * chunk + 1] + query_pull[:, None] * s_y,)
        of_query = more_query
        if norm_gain is not None:
            of_gain = more_gain

    row = tl.program_id(0).to(tl.int64) * D
    for chunk in tl.static_range(CHUNKS):
        x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
        tl.store(dfolded + row + x_column, tl.sum(of_query[2 * chunk], 0), mask=x_mask)
        tl.store(dfolded + row + y_column, tl.sum(of_query[2 * chunk + 1], 0), mask=y_mask)
        if norm_gain is not None:
            tl.store(dnorm_gain + row + x_column, tl.sum(of_gain[2 * chunk], 0), mask=x_mask)
            tl.store(dnorm_gain + row + y_column, tl.sum(of_gain[2 * chunk + 1], 0), mask=y_mask)


# --- Launches ------------------------------------------------------------------------------------


def forward(
    output_td: jax.Array,
    lse_t: jax.Array,
    partial_sum_td: jax.Array | None,
    update_td: jax.Array | None,
    folded_d: jax.Array,
    norm_gain_d: jax.Array | None,
    *,
    eps: float,
    norm_eps: float,
    tiling: Tiling,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds, merges with what phase 1 found, and normalises.

        summed = partial_sum + update, rounded to the dtype of partial_sum
        gate = sigmoid(<w, summed> r - lse)                   r = rsqrt(mean(summed^2) + eps)
        read = (1 - gate) output + gate summed
        hidden = read rsqrt(mean(read^2) + norm_eps) gain     (read itself without a gain)

    Args:
        output_td: Phase-1 output of this read; float32, bfloat16 or float16.
        lse_t: Its log-sum-exp, float32.
        partial_sum_td: In the dtype of `output_td` or float32; None if there is only an update.
        update_td: In the dtype of `output_td`; None if there is only a partial sum.
        folded_d: float32 product of pseudo-query and key-norm gain.
        norm_gain_d: float32 gain of the norm that follows, or None.
        eps: Added to the mean square of the sum.
        norm_eps: Added to the mean square of the read.
        tiling: How the kernel is launched, see `triton_tiling`.

    Returns:
        The sum (the given array if there is only one term); hidden, in the dtype of `output_td`;
        the gate `[t]`; statistics `[k, t]` for `backward`. The last two are float32.

    References:
        Attention Residuals, arXiv:2603.15031, algorithm 1, phase 2.
    """
    num_tokens, width = output_td.shape
    if partial_sum_td is None:
        partial_sum_td, update_td = update_td, None
    outputs = {
        "summed": (output_td.shape, partial_sum_td.dtype),
        "hidden": (output_td.shape, output_td.dtype),
        "gate": ((num_tokens,), jnp.float32),
        "statistics": ((3 if norm_gain_d is None else 4, num_tokens), jnp.float32),
    }
    if update_td is None:
        del outputs["summed"]
    found = launch(
        _forward_kernel,
        name="merge_forward",
        inputs={
            "output": output_td,
            "lse": lse_t,
            "partial_sum": partial_sum_td,
            "update": update_td,
            "folded": planes(folded_d, packed=tiling.packed),
            "norm_gain": None if norm_gain_d is None else planes(norm_gain_d, packed=tiling.packed),
            "T": num_tokens,
            "never": NEVER,
            "eps": eps,
            "norm_eps": norm_eps,
        },
        outputs=outputs,
        unused=["summed"] if update_td is None else [],
        constants={
            "D": width,
            "TOKENS": tiling.tokens,
            "HALF": tiling.half,
            "CHUNKS": tiling.chunks,
            "PACKED": tiling.packed,
        },
        grid=(cdiv(num_tokens, tiling.tokens),),
        num_warps=tiling.num_warps,
        compute_capability=tiling.compute_capability,
    )
    summed = partial_sum_td if update_td is None else found["summed"]
    return summed, found["hidden"], found["gate"], found["statistics"]


def backward(
    output_td: jax.Array,
    summed_td: jax.Array,
    folded_d: jax.Array,
    norm_gain_d: jax.Array | None,
    statistics_kt: jax.Array,
    dsummed_td: jax.Array | None,
    dhidden_td: jax.Array,
    dgate_t: jax.Array | None,
    *,
    tiling: Tiling,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of `forward`.

    Args:
        output_td: As in `forward`.
        summed_td: As returned by `forward`.
        folded_d: As in `forward`.
        norm_gain_d: As in `forward`.
        statistics_kt: As returned by `forward`.
        dsummed_td: Cotangent of the sum, in its dtype; None is zero.
        dhidden_td: Cotangent of hidden, in its dtype.
        dgate_t: float32 cotangent of the gate; None is zero.
        tiling: How the kernel is launched.

    Returns:
        Gradients to output, to the log-sum-exp, to the sum (which is that to the partial sum and to
        the update alike, in the dtype of the sum), to the folded query, and to the norm's gain
        (None without one). Each is computed in float32 and rounded once; those of the parameters
        are float32, and the same bits every time.
    """
    num_tokens, width = output_td.shape
    rows = cdiv(num_tokens, tiling.row_tokens)
    outputs = {
        "doutput": (output_td.shape, output_td.dtype),
        "dlse": ((num_tokens,), jnp.float32),
        "dsum": (summed_td.shape, summed_td.dtype),
        "dfolded": ((rows, width), jnp.float32),
        "dnorm_gain": ((rows, width), jnp.float32),
    }
    unused = []
    if norm_gain_d is None:
        unused.append("dnorm_gain")
    if dsummed_td is not None:
        unused.append("dsum")  # It is written over dsummed.
    found = launch(
        _backward_kernel,
        name="merge_backward",
        inputs={
            "output": output_td,
            "summed": summed_td,
            "folded": planes(folded_d, packed=tiling.packed),
            "norm_gain": None if norm_gain_d is None else planes(norm_gain_d, packed=tiling.packed),
            "statistics": statistics_kt,
            **({"dsummed": None} if dsummed_td is None else {}),
            "dhidden": dhidden_td,
            "dgate": dgate_t,
            "T": num_tokens,
            "never": NEVER,
        },
        outputs={key: shape for key, shape in outputs.items() if key not in unused},
        updated={} if dsummed_td is None else {"dsummed": (dsummed_td,)},
        unused=unused,
        constants={
            "D": width,
            "ROW_TOKENS": tiling.row_tokens,
            "TOKENS": tiling.tokens,
            "HALF": tiling.half,
            "CHUNKS": tiling.chunks,
            "PACKED": tiling.packed,
        },
        grid=(rows,),
        num_warps=tiling.num_warps,
        compute_capability=tiling.compute_capability,
    )
    parameters = [found["dfolded"]] + ([] if norm_gain_d is None else [found["dnorm_gain"]])
    sums = [
        unplanes(row_sums(x, compute_capability=tiling.compute_capability), packed=tiling.packed)
        for x in parameters
    ]
    dnorm_gain_d = None if norm_gain_d is None else sums[1]
    dsum_td = found["dsum"] if dsummed_td is None else found["dsummed"][0]
    return found["doutput"], found["dlse"], dsum_td, sums[0], dnorm_gain_d
