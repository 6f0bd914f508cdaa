"""The Triton kernels of phase 2; `triton_gpu` launches them and says how they work."""

import triton
import triton.language as tl

from pallas_kernels.triton_tiles import halves, load_tile, store_tile, vector_columns

# Rows of the statistics.
INVERSE_RMS = tl.constexpr(0)
LOGIT = tl.constexpr(1)
LSE = tl.constexpr(2)
READ_INVERSE_RMS = tl.constexpr(3)


@triton.jit
def forward_kernel(
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
    """Sum, hidden, gate and statistics, see `triton_gpu.forward`."""
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
def backward_kernel(
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
    STAGES: tl.constexpr,
):
    """All gradients, those of the parameters as partial rows, see `triton_gpu.backward`."""
    T = tl.cast(T, tl.int64)
    OUTPUT: tl.constexpr = output.dtype.element_ty
    SUM: tl.constexpr = summed.dtype.element_ty
    # Gradients of the query and of the norm's gain, halves x and y of each chunk.
    of_query = ()
    of_gain = ()
    for _ in tl.static_range(2 * CHUNKS):
        of_query = of_query + (tl.zeros((TOKENS, HALF), tl.float32),)
        of_gain = of_gain + (tl.zeros((TOKENS, HALF), tl.float32),)

    for step in tl.range(0, ROW_TOKENS // TOKENS, num_stages=STAGES):
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
