"""The Triton kernels of phase 1; `triton_gpu` launches them and says how they work.

Arrays of the tokens' width are [t, d], statistics [s, t], [n, t] or [s, n, t], float32. Pointers to
outputs are parameters of their own, because jax_triton takes tuples for inputs only; a launch with
fewer outputs leaves the last ones out.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_tiles import (
    halves,
    in_thread_sum,
    load_tile,
    pick,
    side_by_side,
    store_tile,
    take,
    vector_columns,
)

MAX_READS = 24
MAX_SOURCES = 16


@triton.jit
def _hold(
    values,
    count,
    tokens,
    in_range,
    T,
    N: tl.constexpr,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    HALF: tl.constexpr,
    PACKED: tl.constexpr,
    BANK: tl.constexpr,
    FIRST: tl.constexpr,
):
    """All tiles of all sources, source by source."""
    held = ()
    for n in tl.static_range(N):
        if BANK:
            source = values[0] + (FIRST + n) * T * D
            mask = tokens < tl.where(FIRST + n < count, T, 0)
        else:
            source = values[n]
            mask = in_range
        for chunk in tl.static_range(CHUNKS):
            held = held + (load_tile(source, tokens, mask, chunk, D, HALF, PACKED),)
    return held


@triton.jit
def _with_zeros(parts, N: tl.constexpr, N_PAD: tl.constexpr):
    """N tensors and zeros up to a power of two, side by side and summed over lanes: `[t, n]`."""
    padded = parts
    for _ in tl.static_range(N_PAD - N):
        padded = padded + (tl.zeros_like(parts[0]),)
    return tl.sum(side_by_side(padded, 0, N_PAD), 1)


@triton.jit
def forward_kernel(
    values,
    count_ptr,
    folded,
    known_inverse_rms,
    carried_outputs,
    carried_lse,
    T,
    never,
    eps,
    o0,
    o1,
    o2,
    o3,
    o4,
    o5,
    o6,
    o7,
    o8,
    o9,
    o10,
    o11,
    o12,
    o13,
    o14,
    o15,
    o16,
    o17,
    o18,
    o19,
    o20,
    o21,
    o22,
    o23,
    lse,
    logits,
    inverse_rms,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    KNOWN: tl.constexpr,
    N_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
    BANK: tl.constexpr,
    FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Logits, weights and outputs of all reads, see `triton_gpu.forward`."""
    # fmt: off
    outputs = (o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, o10, o11,
               o12, o13, o14, o15, o16, o17, o18, o19, o20, o21, o22, o23)
    # fmt: on
    DTYPE: tl.constexpr = values[0].dtype.element_ty
    LANES: tl.constexpr = HALF // 4
    T = tl.cast(T, tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_range = tokens < T
    n_axis = tl.arange(0, N_PAD)
    count = FIRST + N
    if BANK:
        count = tl.load(count_ptr)
    n_counts = n_axis < tl.minimum(count - FIRST, N)
    held = _hold(values, count, tokens, in_range, T, N, D, CHUNKS, HALF, PACKED, BANK, FIRST)

    # Inverse RMS of each source; those of the first KNOWN are given.
    squares = ()
    for n in tl.static_range(N):
        square = tl.zeros((TOKENS, LANES), tl.float32)
        if n >= KNOWN:
            for chunk in tl.static_range(CHUNKS):
                x, y = halves(held[n * CHUNKS + chunk], 16, DTYPE, PACKED)
                square += in_thread_sum(x * x + y * y, LANES)
        squares = squares + (square,)
    r = tl.rsqrt(_with_zeros(squares, N, N_PAD) / D + eps)
    n_offsets = n_axis[None, :] * T + tokens[:, None]
    n_mask = in_range[:, None] & (n_axis < N)[None, :]
    if KNOWN > 0:
        given = in_range[:, None] & (n_axis < KNOWN)[None, :]
        known = tl.load(known_inverse_rms + n_offsets, mask=given, other=0.0)
        r = tl.where((n_axis < KNOWN)[None, :], known, r)
    tl.store(inverse_rms + n_offsets, r, mask=n_mask)

    for s in tl.range(0, S, num_stages=STAGES):
        # 16 both times, see `halves`: for the logits, and for the weighted sums.
        sixteen = tl.where(s + 1 > never, 0, 16)
        again_sixteen = tl.where(s + 2 > never, 0, 16)
        dots = ()
        for _ in tl.static_range(N):
            dots = dots + (tl.zeros((TOKENS, LANES), tl.float32),)
        for chunk in tl.static_range(CHUNKS):
            x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
            w_x = tl.load(folded + s * D + x_column, mask=x_mask, other=0.0)
            w_y = tl.load(folded + s * D + y_column, mask=y_mask, other=0.0)
            longer = ()
            for n in tl.static_range(N):
                x, y = halves(held[n * CHUNKS + chunk], sixteen, DTYPE, PACKED)
                dot = in_thread_sum(x * w_x[None, :] + y * w_y[None, :], LANES)
                longer = longer + (dots[n] + dot,)
            dots = longer
        logit = _with_zeros(dots, N, N_PAD) * r
        logit = tl.where(n_counts[None, :], logit, float("-inf"))
        s_offset = s * T
        tl.store(logits + s_offset * N + n_offsets, logit, mask=n_mask)

        largest = tl.max(logit, 1)
        if BANK:
            # None of this launch's rows may count.
            largest = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp(logit - largest[:, None])
        total = tl.sum(weights, 1)
        safe = tl.where(total > 0, total, 1.0)
        log_sum = tl.where(total > 0, largest + tl.log(safe), float("-inf"))
        share = 1 / safe
        if carried_lse is not None:
            before = tl.load(carried_lse + s_offset + tokens, mask=in_range, other=0.0)
            top = tl.maximum(before, log_sum)
            joined = tl.exp(before - top) + tl.exp(log_sum - top)
            kept = tl.exp(before - top) / joined
            share = share * tl.exp(log_sum - top) / joined
            log_sum = top + tl.log(joined)
            carried = pick(carried_outputs, s, S)
        tl.store(lse + s_offset + tokens, log_sum, mask=in_range)
        weights = weights * share[:, None]

        output = pick(outputs, s, S)
        for chunk in tl.static_range(CHUNKS):
            o_x = tl.zeros((TOKENS, HALF), tl.float32)
            o_y = tl.zeros((TOKENS, HALF), tl.float32)
            if carried_lse is not None:
                tile = load_tile(carried, tokens, in_range, chunk, D, HALF, PACKED)
                x, y = halves(tile, 16, carried.dtype.element_ty, PACKED)
                o_x += kept[:, None] * x
                o_y += kept[:, None] * y
            for n in tl.static_range(N):
                weight = take(weights, n_axis, n)
                x, y = halves(held[n * CHUNKS + chunk], again_sixteen, DTYPE, PACKED)
                o_x += weight[:, None] * x
                o_y += weight[:, None] * y
            store_tile(output, tokens, in_range, chunk, o_x, o_y, D, HALF, PACKED)


@triton.jit
def backward_kernel(
    values,
    count_ptr,
    folded,
    lse,
    logits,
    inverse_rms,
    doutputs,
    dlse,
    dlogits,
    delta,
    accumulated,
    T,
    never,
    g0,
    g1,
    g2,
    g3,
    g4,
    g5,
    g6,
    g7,
    g8,
    g9,
    g10,
    g11,
    g12,
    g13,
    g14,
    g15,
    weights,
    coefficients,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    N_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
    BANK: tl.constexpr,
    FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    DELTA_ONLY: tl.constexpr,
    HOLD: tl.constexpr,
):
    """Gradients to the sources, and scalars for the queries', see `triton_gpu.backward`."""
    fresh = (g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11, g12, g13, g14, g15)
    DTYPE: tl.constexpr = values[0].dtype.element_ty
    LANES: tl.constexpr = HALF // 4
    T = tl.cast(T, tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_range = tokens < T
    n_axis = tl.arange(0, N_PAD)
    count = FIRST + N
    if BANK:
        count = tl.load(count_ptr)
    n_counts = n_axis < tl.minimum(count - FIRST, N)
    n_offsets = n_axis[None, :] * T + tokens[:, None]
    n_mask = in_range[:, None] & n_counts[None, :]
    n_exists = in_range[:, None] & (n_axis < N)[None, :]
    held = _hold(values, count, tokens, in_range, T, N, D, CHUNKS, HALF, PACKED, BANK, FIRST)
    r = tl.load(inverse_rms + n_offsets, mask=n_mask, other=0.0)

    # All scalars, read by read; pulls_n = sum_s dlogit_sn logit_sn.
    pulls = tl.zeros((TOKENS, N_PAD), tl.float32)
    for s in tl.range(0, S, num_stages=STAGES):
        sixteen = tl.where(s + 1 > never, 0, 16)
        doutput = pick(doutputs, s, S)
        dots = ()
        for _ in tl.static_range(N):
            dots = dots + (tl.zeros((TOKENS, LANES), tl.float32),)
        for chunk in tl.static_range(CHUNKS):
            tile = load_tile(doutput, tokens, in_range, chunk, D, HALF, PACKED)
            do_x, do_y = halves(tile, 16, DTYPE, PACKED)
            longer = ()
            for n in tl.static_range(N):
                x, y = halves(held[n * CHUNKS + chunk], sixteen, DTYPE, PACKED)
                longer = longer + (dots[n] + in_thread_sum(x * do_x + y * do_y, LANES),)
            dots = longer
        a = _with_zeros(dots, N, N_PAD)
        s_offset = s * T
        logit = tl.load(logits + s_offset * N + n_offsets, mask=n_mask, other=float("-inf"))
        log_sum = tl.load(lse + s_offset + tokens, mask=in_range, other=0.0)
        p = tl.exp(logit - log_sum[:, None])
        if DELTA_ONLY:
            partial_delta = tl.sum(p * a, 1)
            if delta is not None:
                partial_delta += tl.load(delta + s_offset + tokens, mask=in_range, other=0.0)
            tl.store(weights + s_offset + tokens, partial_delta, mask=in_range)
        else:
            if delta is not None:
                mean = tl.load(delta + s_offset + tokens, mask=in_range, other=0.0)
                dlogit = p * (a - mean[:, None])
            else:
                # p (a - sum p a), in differences to the heaviest source: where its weight is nearly
                # one, the two terms cancel. With one source this is zero exactly.
                heaviest = n_axis[None, :] == tl.argmax(p, 1)[:, None]
                others = tl.where(heaviest, 0.0, p)
                difference = a - tl.sum(tl.where(heaviest, a, 0.0), 1)[:, None]
                mean = tl.sum(others * difference, 1)
                dlogit = others * (difference - mean[:, None])
                dlogit = tl.where(heaviest, -tl.sum(dlogit, 1)[:, None], dlogit)
            if dlse is not None:
                pull = tl.load(dlse + s_offset + tokens, mask=in_range, other=0.0)
                dlogit += p * pull[:, None]
            if dlogits is not None:
                dlogit += tl.load(dlogits + s_offset * N + n_offsets, mask=n_mask, other=0.0)
            pulls += dlogit * tl.where(n_mask, logit, 0.0)
            tl.store(weights + s_offset * N + n_offsets, p, mask=n_exists)
            tl.store(coefficients + s_offset * N + n_offsets, dlogit * r, mask=n_exists)

    if not DELTA_ONLY:
        # The scalars of a token are read by all threads of the program.
        tl.debug_barrier()
        radial = pulls * r * r / D
        for chunk in tl.static_range(CHUNKS):
            x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
            dv_x = ()
            dv_y = ()
            for _ in tl.static_range(N):
                dv_x = dv_x + (tl.zeros((TOKENS, HALF), tl.float32),)
                dv_y = dv_y + (tl.zeros((TOKENS, HALF), tl.float32),)
            for s in tl.range(0, S, num_stages=STAGES):
                doutput = pick(doutputs, s, S)
                tile = load_tile(doutput, tokens, in_range, chunk, D, HALF, PACKED)
                do_x, do_y = halves(tile, 16, DTYPE, PACKED)
                w_x = tl.load(folded + s * D + x_column, mask=x_mask, other=0.0)[None, :]
                w_y = tl.load(folded + s * D + y_column, mask=y_mask, other=0.0)[None, :]
                s_offset = s * N * T
                more_x = ()
                more_y = ()
                for n in tl.static_range(N):
                    offsets = s_offset + n * T + tokens
                    p = tl.load(weights + offsets, mask=in_range, other=0.0)[:, None]
                    c = tl.load(coefficients + offsets, mask=in_range, other=0.0)[:, None]
                    more_x = more_x + (dv_x[n] + p * do_x + c * w_x,)
                    more_y = more_y + (dv_y[n] + p * do_y + c * w_y,)
                dv_x = more_x
                dv_y = more_y
            for n in tl.static_range(N):
                mask = in_range
                if HOLD:
                    tile = held[n * CHUNKS + chunk]
                else:
                    if BANK:
                        source = values[0] + (FIRST + n) * T * D
                        mask = tokens < tl.where(FIRST + n < count, T, 0)
                    else:
                        source = values[n]
                    tile = load_tile(source, tokens, mask, chunk, D, HALF, PACKED)
                v_x, v_y = halves(tile, 16, DTYPE, PACKED)
                pull = take(radial, n_axis, n)[:, None]
                x = dv_x[n] - pull * v_x
                y = dv_y[n] - pull * v_y
                gradients = fresh
                if accumulated is not None:
                    gradients = accumulated
                mask = in_range
                if BANK:
                    gradient = gradients[0] + (FIRST + n) * T * D
                    if accumulated is not None:
                        # Rows past the count keep what they have.
                        mask = tokens < tl.where(FIRST + n < count, T, 0)
                else:
                    gradient = gradients[n]
                if accumulated is not None:
                    tile = load_tile(gradient, tokens, mask, chunk, D, HALF, PACKED)
                    before_x, before_y = halves(tile, 16, DTYPE, PACKED)
                    x += before_x
                    y += before_y
                store_tile(gradient, tokens, mask, chunk, x, y, D, HALF, PACKED)


@triton.jit
def query_gradient_kernel(
    values,
    count_ptr,
    coefficients,
    T,
    partials,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    S_PAD: tl.constexpr,
    ROW_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BANK: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Partial row i of d: `sum_{n, t of i} coefficient_snt v_nt` for all s, ROW_TOKENS tokens."""
    T = tl.cast(T, tl.int64)
    first = tl.program_id(1).to(tl.int64) * ROW_TOKENS
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    s_axis = tl.arange(0, S_PAD)
    count = FIRST + N
    if BANK:
        count = tl.load(count_ptr)
    total = tl.zeros((S_PAD, COLUMNS), tl.float32)
    for step in range(N * (ROW_TOKENS // TOKENS)):
        n = step % N
        tokens = first + (step // N) * TOKENS + tl.arange(0, TOKENS)
        in_range = tokens < T
        if BANK:
            source = values[0] + (FIRST + n) * T * D
            mask = tokens < tl.where(FIRST + n < count, T, 0)
        else:
            source = pick(values, n, N)
            mask = in_range
        v = tl.load(
            source + tokens[:, None] * D + column[None, :],
            mask=mask[:, None] & (column < D)[None, :],
            other=0.0,
        )
        c = tl.load(
            coefficients + (s_axis[:, None] * N + n) * T + tokens[None, :],
            mask=(s_axis < S)[:, None] & in_range[None, :],
            other=0.0,
        )
        # Three products of tf32 are a float32 one; a value of 16 bits is a tf32 exactly.
        total = tl.dot(c, v.to(tl.float32), total, input_precision="tf32x3")
    row = tl.program_id(1).to(tl.int64) * S + s_axis[:, None]
    tl.store(
        partials + row * D + column[None, :],
        total,
        mask=(s_axis < S)[:, None] & (column < D)[None, :],
    )
