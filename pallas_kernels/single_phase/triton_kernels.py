"""The Triton kernels of the single-phase read; `triton_gpu` launches them and says how they work.

Source N is the open partial sum; statistics are N + 1 inverse RMS, N + 1 logits, and the inverse
RMS of the read.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_tiles import halves, load_tile, store_tile, vector_columns


@triton.jit
def _weights(logits, N: tl.constexpr):
    """Softmax over a tuple of N + 1 tensors [t]."""
    largest = logits[0]
    for n in tl.static_range(1, N + 1):
        largest = tl.maximum(largest, logits[n])
    exponentials = ()
    total = tl.zeros_like(largest)
    for n in tl.static_range(N + 1):
        exponentials = exponentials + (tl.exp(logits[n] - largest),)
        total += exponentials[n]
    weights = ()
    for n in tl.static_range(N + 1):
        weights = weights + (exponentials[n] / total,)
    return weights


@triton.jit
def forward_kernel(
    values,
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
    statistics,
    N: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Sum, hidden and statistics, see `triton_gpu.forward`."""
    T = tl.cast(T, tl.int64)
    DTYPE: tl.constexpr = values[0].dtype.element_ty
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_range = tokens < T
    # 16 again, see `halves`.
    sixteen = tl.where(tl.program_id(0) > never, 0, 16)

    held = ()
    for n in tl.static_range(N):
        for chunk in tl.static_range(CHUNKS):
            held = held + (load_tile(values[n], tokens, in_range, chunk, D, HALF, PACKED),)
    sums_x = ()
    sums_y = ()
    squares = ()
    dots = ()
    for _ in tl.static_range(N + 1):
        squares = squares + (tl.zeros((TOKENS, HALF), tl.float32),)
        dots = dots + (tl.zeros((TOKENS, HALF), tl.float32),)
    for chunk in tl.static_range(CHUNKS):
        tile = load_tile(partial_sum, tokens, in_range, chunk, D, HALF, PACKED)
        s_x, s_y = halves(tile, 16, partial_sum.dtype.element_ty, PACKED)
        if update is not None:
            tile = load_tile(update, tokens, in_range, chunk, D, HALF, PACKED)
            more_x, more_y = halves(tile, 16, update.dtype.element_ty, PACKED)
            dtype = summed.dtype.element_ty
            s_x = (s_x + more_x).to(dtype).to(tl.float32)
            s_y = (s_y + more_y).to(dtype).to(tl.float32)
            store_tile(summed, tokens, in_range, chunk, s_x, s_y, D, HALF, PACKED)
        sums_x = sums_x + (s_x,)
        sums_y = sums_y + (s_y,)
        x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
        w_x = tl.load(folded + x_column, mask=x_mask, other=0.0)[None, :]
        w_y = tl.load(folded + y_column, mask=y_mask, other=0.0)[None, :]
        more_squares = ()
        more_dots = ()
        for n in tl.static_range(N + 1):
            x = s_x
            y = s_y
            if n < N:
                x, y = halves(held[n * CHUNKS + chunk], 16, DTYPE, PACKED)
            more_squares = more_squares + (squares[n] + x * x + y * y,)
            more_dots = more_dots + (dots[n] + x * w_x + y * w_y,)
        squares = more_squares
        dots = more_dots
    logits = ()
    for n in tl.static_range(N + 1):
        r = tl.rsqrt(tl.sum(squares[n], 1) / D + eps)
        logits = logits + (tl.sum(dots[n], 1) * r,)
        tl.store(statistics + n * T + tokens, r, mask=in_range)
        tl.store(statistics + (N + 1 + n) * T + tokens, logits[n], mask=in_range)
    weights = _weights(logits, N)

    square = tl.zeros((TOKENS, HALF), tl.float32)
    reads_x = ()
    reads_y = ()
    for chunk in tl.static_range(CHUNKS):
        x = weights[N][:, None] * sums_x[chunk]
        y = weights[N][:, None] * sums_y[chunk]
        for n in tl.static_range(N):
            v_x, v_y = halves(held[n * CHUNKS + chunk], sixteen, DTYPE, PACKED)
            x += weights[n][:, None] * v_x
            y += weights[n][:, None] * v_y
        square += x * x + y * y
        reads_x = reads_x + (x,)
        reads_y = reads_y + (y,)
    if norm_gain is not None:
        read_r = tl.rsqrt(tl.sum(square, 1) / D + norm_eps)
        tl.store(statistics + (2 * N + 2) * T + tokens, read_r, mask=in_range)
    for chunk in tl.static_range(CHUNKS):
        x = reads_x[chunk]
        y = reads_y[chunk]
        if norm_gain is not None:
            x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
            g_x = tl.load(norm_gain + x_column, mask=x_mask, other=0.0)[None, :]
            g_y = tl.load(norm_gain + y_column, mask=y_mask, other=0.0)[None, :]
            x = x * read_r[:, None] * g_x
            y = y * read_r[:, None] * g_y
        store_tile(hidden, tokens, in_range, chunk, x, y, D, HALF, PACKED)


@triton.jit
def backward_kernel(
    values,
    summed,
    folded,
    norm_gain,
    statistics,
    dhidden,
    dlogits_ptr,
    dsummed,
    accumulated,
    T,
    never,
    g0,
    g1,
    dsum,
    dfolded,
    dnorm_gain,
    N: tl.constexpr,
    D: tl.constexpr,
    ROW_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """All gradients, those of the parameters as partial rows, see `triton_gpu.backward`."""
    T = tl.cast(T, tl.int64)
    DTYPE: tl.constexpr = values[0].dtype.element_ty
    SUM: tl.constexpr = summed.dtype.element_ty
    fresh = (g0, g1)
    of_query = ()
    of_gain = ()
    for _ in tl.static_range(2 * CHUNKS):
        of_query = of_query + (tl.zeros((TOKENS, HALF), tl.float32),)
        of_gain = of_gain + (tl.zeros((TOKENS, HALF), tl.float32),)

    # Nothing is moved out of the loop, as there are no registers to keep it in.
    for step in tl.range(0, ROW_TOKENS // TOKENS, disable_licm=True):
        # 16 each time, see `halves`.
        sixteen = tl.where(step + 1 > never, 0, 16)
        again_sixteen = tl.where(step + 2 > never, 0, 16)
        # The same for all threads, whose own offsets from there fit in 32 bits.
        first = tl.program_id(0).to(tl.int64) * ROW_TOKENS + step * TOKENS
        rows = first * D
        tokens = tl.arange(0, TOKENS)
        in_range = tokens < tl.minimum(T - first, TOKENS).to(tl.int32)
        held = ()
        dhiddens = ()
        for n in tl.static_range(N + 1):
            source = summed
            if n < N:
                source = values[n]
            for chunk in tl.static_range(CHUNKS):
                tile = load_tile(source + rows, tokens, in_range, chunk, D, HALF, PACKED)
                held = held + (tile,)
        for chunk in tl.static_range(CHUNKS):
            tile = load_tile(dhidden + rows, tokens, in_range, chunk, D, HALF, PACKED)
            dhiddens = dhiddens + (tile,)
        inverse_rms = ()
        logits = ()
        for n in tl.static_range(N + 1):
            at = first + n * T + tokens
            inverse_rms = inverse_rms + (tl.load(statistics + at, mask=in_range, other=0.0),)
            at = first + (N + 1 + n) * T + tokens
            logits = logits + (tl.load(statistics + at, mask=in_range, other=0.0),)
        weights = _weights(logits, N)

        # With dn = dhidden * gain: sums over d of dn * v_n and of read * v_n.
        dn_v = ()
        read_v = ()
        for _ in tl.static_range(N + 1):
            dn_v = dn_v + (tl.zeros((TOKENS, HALF), tl.float32),)
            read_v = read_v + (tl.zeros((TOKENS, HALF), tl.float32),)
        for chunk in tl.static_range(CHUNKS):
            dn_x, dn_y = halves(dhiddens[chunk], sixteen, DTYPE, PACKED)
            read_x = tl.zeros((TOKENS, HALF), tl.float32)
            read_y = tl.zeros((TOKENS, HALF), tl.float32)
            if norm_gain is not None:
                x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
                dn_x *= tl.load(norm_gain + x_column, mask=x_mask, other=0.0)[None, :]
                dn_y *= tl.load(norm_gain + y_column, mask=y_mask, other=0.0)[None, :]
                for n in tl.static_range(N):
                    x, y = halves(held[n * CHUNKS + chunk], sixteen, DTYPE, PACKED)
                    read_x += weights[n][:, None] * x
                    read_y += weights[n][:, None] * y
                x, y = halves(held[N * CHUNKS + chunk], sixteen, SUM, PACKED)
                read_x += weights[N][:, None] * x
                read_y += weights[N][:, None] * y
            more_dn = ()
            more_read = ()
            for n in tl.static_range(N + 1):
                if n < N:
                    x, y = halves(held[n * CHUNKS + chunk], sixteen, DTYPE, PACKED)
                else:
                    x, y = halves(held[n * CHUNKS + chunk], sixteen, SUM, PACKED)
                more_dn = more_dn + (dn_v[n] + dn_x * x + dn_y * y,)
                more_read = more_read + (read_v[n] + read_x * x + read_y * y,)
            dn_v = more_dn
            read_v = more_read
        pulls = ()
        for n in tl.static_range(N + 1):
            pulls = pulls + (tl.sum(dn_v[n], 1),)
        radial = tl.zeros_like(pulls[0])
        if norm_gain is not None:
            at = first + (2 * N + 2) * T + tokens
            read_r = tl.load(statistics + at, mask=in_range, other=0.0)
            for n in tl.static_range(N + 1):
                radial += weights[n] * pulls[n]
            radial = radial * read_r * read_r * read_r / D
            of_read = ()
            for n in tl.static_range(N + 1):
                pull = pulls[n] * read_r - radial * tl.sum(read_v[n], 1)
                of_read = of_read + (pull,)
            pulls = of_read
        # p_n sum_m p_m (a_n - a_m): no cancellation where one weight is nearly one.
        dlogits = ()
        for n in tl.static_range(N + 1):
            difference = tl.zeros_like(pulls[0])
            for m in tl.static_range(N + 1):
                difference += weights[m] * (pulls[n] - pulls[m])
            dlogit = weights[n] * difference
            if dlogits_ptr is not None:
                dlogit += tl.load(dlogits_ptr + (first + n * T) + tokens, mask=in_range, other=0.0)
            dlogits = dlogits + (dlogit,)

        more_query = ()
        more_gain = ()
        for chunk in tl.static_range(CHUNKS):
            dread_x, dread_y = halves(dhiddens[chunk], again_sixteen, DTYPE, PACKED)
            x_column, y_column, x_mask, y_mask = vector_columns(chunk, D, HALF, PACKED)
            if norm_gain is not None:
                read_x = tl.zeros((TOKENS, HALF), tl.float32)
                read_y = tl.zeros((TOKENS, HALF), tl.float32)
                for n in tl.static_range(N):
                    x, y = halves(held[n * CHUNKS + chunk], again_sixteen, DTYPE, PACKED)
                    read_x += weights[n][:, None] * x
                    read_y += weights[n][:, None] * y
                x, y = halves(held[N * CHUNKS + chunk], again_sixteen, SUM, PACKED)
                read_x += weights[N][:, None] * x
                read_y += weights[N][:, None] * y
                normalised_x = dread_x * read_x * read_r[:, None]
                normalised_y = dread_y * read_y * read_r[:, None]
                more_gain = more_gain + (of_gain[2 * chunk] + normalised_x,)
                more_gain = more_gain + (of_gain[2 * chunk + 1] + normalised_y,)
                g_x = tl.load(norm_gain + x_column, mask=x_mask, other=0.0)[None, :]
                g_y = tl.load(norm_gain + y_column, mask=y_mask, other=0.0)[None, :]
                dread_x = dread_x * g_x * read_r[:, None] - read_x * radial[:, None]
                dread_y = dread_y * g_y * read_r[:, None] - read_y * radial[:, None]
            w_x = tl.load(folded + x_column, mask=x_mask, other=0.0)[None, :]
            w_y = tl.load(folded + y_column, mask=y_mask, other=0.0)[None, :]
            query_x = of_query[2 * chunk]
            query_y = of_query[2 * chunk + 1]
            for n in tl.static_range(N + 1):
                if n < N:
                    x, y = halves(held[n * CHUNKS + chunk], again_sixteen, DTYPE, PACKED)
                else:
                    x, y = halves(held[n * CHUNKS + chunk], again_sixteen, SUM, PACKED)
                query_pull = (dlogits[n] * inverse_rms[n])[:, None]
                key_pull = query_pull * (inverse_rms[n] * logits[n] / D)[:, None]
                query_x += query_pull * x
                query_y += query_pull * y
                d_x = weights[n][:, None] * dread_x + query_pull * w_x - key_pull * x
                d_y = weights[n][:, None] * dread_y + query_pull * w_y - key_pull * y
                if n < N:
                    if accumulated is not None:
                        gradient = accumulated[n] + rows
                        tile = load_tile(gradient, tokens, in_range, chunk, D, HALF, PACKED)
                        before_x, before_y = halves(tile, 16, DTYPE, PACKED)
                        d_x += before_x
                        d_y += before_y
                    else:
                        gradient = fresh[n] + rows
                else:
                    if dsummed is not None:
                        gradient = dsummed[0] + rows
                        tile = load_tile(gradient, tokens, in_range, chunk, D, HALF, PACKED)
                        before_x, before_y = halves(tile, 16, SUM, PACKED)
                        d_x += before_x
                        d_y += before_y
                    else:
                        gradient = dsum + rows
                store_tile(gradient, tokens, in_range, chunk, d_x, d_y, D, HALF, PACKED)
            more_query = more_query + (query_x,)
            more_query = more_query + (query_y,)
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
