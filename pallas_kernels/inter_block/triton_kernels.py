"""The Triton kernels of phase 1; `triton_gpu` launches them and says how they work.

Arrays of the tokens' width are [t, d], statistics [s, t], [n, t] or [s, n, t], float32. A program
has tiles of a few tokens, all sources or all reads, and some columns: [t, n, c] or [t, s, c], whose
products over c, n or s the matrix units compute token by token; logits and sums over tokens are
products of all rows [(t, n), c] at once. Pointers to outputs are parameters of their own, because
jax_triton takes tuples for inputs only; a launch with fewer outputs leaves the last ones out.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_tiles import in_thread_sum


@triton.jit
def _pointers(arrays, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """A tensor of the pointers of a tuple, the first one again where there are no more."""
    index = tl.arange(0, PADDED)
    chosen = tl.where(index == 0, arrays[0], arrays[0])
    for i in tl.static_range(1, COUNT):
        chosen = tl.where(index == i, arrays[i], chosen)
    return chosen


@triton.jit
def _sources(
    arrays,
    T,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    D: tl.constexpr,
    BANK: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Pointers to the sources of a launch, in either form."""
    if BANK:
        return arrays[0] + (FIRST + tl.arange(0, N_PAD)) * T * D
    else:
        return _pointers(arrays, N, N_PAD)


@triton.jit
def _addresses(pointers, tokens, column, D: tl.constexpr):
    """Of the columns of the tokens' rows in several arrays: `[t, k, c]`."""
    addresses = pointers[None, :, None] + tokens[:, None, None] * D + column[None, None, :]
    if D % 8 == 0:
        # The compiler does not see through the choice of a pointer that 16 bytes are one access.
        addresses = tl.multiple_of(tl.max_contiguous(addresses, (1, 1, 8)), (1, 1, 16))
    return addresses


@triton.jit
def _mask(counts, in_range, column, D: tl.constexpr):
    """Which addresses exist."""
    return in_range[:, None, None] & counts[None, :, None] & (column < D)[None, None, :]


@triton.jit
def _leading_tf32(x):
    """The leading bits of float32 numbers, which tf32 holds exactly."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _exact_dot(a, b, total):
    """`total + a b` for float32 a, in which b keeps every bit of its own.

    A bfloat16 b takes a as the sum of two of its kind. A float16 is a tf32 exactly, so that two of
    those for a are enough; a float32 b takes three products.
    """
    if b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, b, tl.dot(high, b, total))
    elif b.dtype == tl.float16:
        high = _leading_tf32(a)
        b = b.to(tl.float32)
        total = tl.dot(high, b, total, input_precision="tf32")
        return tl.dot(a - high, b, total, input_precision="tf32")
    else:
        return tl.dot(a, b.to(tl.float32), total, input_precision="tf32x3")


@triton.jit
def forward_kernel(
    values,
    count_ptr,
    folded,
    carried_outputs,
    carried_lse,
    T,
    eps,
    logits,
    inverse_rms,
    lse,
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
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    N_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BANK: tl.constexpr,
    FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Logits and inverse RMS of some tokens, and then, unless lse is None, their outputs."""
    # fmt: off
    outputs = (o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, o10, o11,
               o12, o13, o14, o15, o16, o17, o18, o19, o20, o21, o22, o23)
    # fmt: on
    T = tl.cast(T, tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_range = tokens < T
    n_axis = tl.arange(0, N_PAD)
    s_axis = tl.arange(0, S_PAD)
    count = FIRST + N
    if BANK:
        count = tl.load(count_ptr)
    counts = n_axis < tl.minimum(count - FIRST, N)
    sources = _sources(values, T, N, N_PAD, D, BANK, FIRST)

    # Rows of a product are all sources of all tokens.
    products = tl.zeros((TOKENS * N_PAD, S_PAD), tl.float32)
    squares = tl.zeros((TOKENS * N_PAD, COLUMNS // 8), tl.float32)
    for chunk in tl.range(0, tl.cdiv(D, COLUMNS), num_stages=STAGES):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)
        v = tl.load(
            _addresses(sources, tokens, column, D),
            mask=_mask(counts, in_range, column, D),
            other=0.0,
        )
        v = tl.reshape(v, (TOKENS * N_PAD, COLUMNS))
        w_offsets = s_axis[:, None] * D + column[None, :]
        w_mask = (s_axis < S)[:, None] & (column < D)[None, :]
        w = tl.trans(tl.load(folded[0] + w_offsets, mask=w_mask, other=0.0))
        if len(folded) == 2:
            w_low = tl.trans(tl.load(folded[1] + w_offsets, mask=w_mask, other=0.0))
            products = tl.dot(v, w_low, tl.dot(v, w, products))
        elif v.dtype == tl.float16:
            high = _leading_tf32(w)
            x = v.to(tl.float32)
            products = tl.dot(x, high, products, input_precision="tf32")
            products = tl.dot(x, w - high, products, input_precision="tf32")
        else:
            products = tl.dot(v, w, products, input_precision="tf32x3")
        x = v.to(tl.float32)
        squares += in_thread_sum(x * x, COLUMNS // 8)
    r = tl.rsqrt(tl.sum(squares, 1) / D + eps)
    exists = in_range[:, None] & (n_axis < N)[None, :]
    n_offsets = n_axis[None, :] * T + tokens[:, None]
    tl.store(inverse_rms + n_offsets, tl.reshape(r, (TOKENS, N_PAD)), mask=exists)
    logit = tl.reshape(products * r[:, None], (TOKENS, N_PAD, S_PAD))
    logit = tl.where(counts[None, :, None], logit, float("-inf"))
    logit = tl.trans(logit, (0, 2, 1))
    s_offsets = s_axis[None, :] * T + tokens[:, None]
    s_mask = in_range[:, None] & (s_axis < S)[None, :]
    offsets = (s_axis[None, :, None] * N + n_axis[None, None, :]) * T + tokens[:, None, None]
    tl.store(logits + offsets, logit, mask=s_mask[:, :, None] & (n_axis < N)[None, None, :])

    if lse is not None:
        # A launch may have no source that counts; then the one before has some.
        heaviest = tl.maximum(tl.max(logit, 2), -1e38)
        total = tl.sum(tl.exp(logit - heaviest[:, :, None]), 2)
        log_sum = heaviest + tl.log(tl.maximum(total, 1e-37))
        if carried_lse is not None:
            before = tl.load(carried_lse + s_offsets, mask=s_mask, other=0.0)
            larger = tl.maximum(before, log_sum)
            log_sum = larger + tl.log(tl.exp(before - larger) + tl.exp(log_sum - larger))
            kept = tl.exp(before - log_sum)
            before_outputs = _pointers(carried_outputs, S, S_PAD)
        tl.store(lse + s_offsets, log_sum, mask=s_mask)
        p = tl.exp(logit - log_sum[:, :, None])
        targets = _pointers(outputs, S, S_PAD)
        for chunk in tl.range(0, tl.cdiv(D, COLUMNS), num_stages=STAGES):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)
            v = tl.load(
                _addresses(sources, tokens, column, D),
                mask=_mask(counts, in_range, column, D),
                other=0.0,
            )
            o = _exact_dot(p, v, tl.zeros((TOKENS, S_PAD, COLUMNS), tl.float32))
            mask = _mask(s_axis < S, in_range, column, D)
            if carried_outputs is not None:
                addresses = _addresses(before_outputs, tokens, column, D)
                o += kept[:, :, None] * tl.load(addresses, mask=mask, other=0.0)
            o = o.to(outputs[0].dtype.element_ty)
            tl.store(_addresses(targets, tokens, column, D), o, mask=mask)


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
    new_delta,
    coefficients,
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
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    N_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BANK: tl.constexpr,
    FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Coefficients and sources' gradients of some tokens, or their share of delta alone."""
    fresh = (g0, g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11, g12, g13, g14, g15)
    T = tl.cast(T, tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_range = tokens < T
    n_axis = tl.arange(0, N_PAD)
    s_axis = tl.arange(0, S_PAD)
    count = FIRST + N
    if BANK:
        count = tl.load(count_ptr)
    counts = n_axis < tl.minimum(count - FIRST, N)
    sources = _sources(values, T, N, N_PAD, D, BANK, FIRST)
    cotangents = _pointers(doutputs, S, S_PAD)

    # a_sn = <do_s, v_n>
    a = tl.zeros((TOKENS, S_PAD, N_PAD), tl.float32)
    for chunk in tl.range(0, tl.cdiv(D, COLUMNS), num_stages=STAGES):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)
        do = tl.load(
            _addresses(cotangents, tokens, column, D),
            mask=_mask(s_axis < S, in_range, column, D),
            other=0.0,
        )
        v = tl.load(
            _addresses(sources, tokens, column, D),
            mask=_mask(counts, in_range, column, D),
            other=0.0,
        )
        if v.dtype == tl.float32:
            a = tl.dot(do, tl.trans(v, (0, 2, 1)), a, input_precision="tf32x3")
        else:
            a = tl.dot(do, tl.trans(v, (0, 2, 1)), a)

    s_offsets = s_axis[None, :] * T + tokens[:, None]
    s_mask = in_range[:, None] & (s_axis < S)[None, :]
    offsets = (s_axis[None, :, None] * N + n_axis[None, None, :]) * T + tokens[:, None, None]
    mask = s_mask[:, :, None] & counts[None, None, :]
    logit = tl.load(logits + offsets, mask=mask, other=float("-inf"))
    log_sum = tl.load(lse + s_offsets, mask=s_mask, other=0.0)
    p = tl.exp(logit - log_sum[:, :, None])
    if new_delta is not None:
        mean = tl.sum(p * a, 2)
        if delta is not None:
            mean += tl.load(delta + s_offsets, mask=s_mask, other=0.0)
        tl.store(new_delta + s_offsets, mean, mask=s_mask)
    else:
        if delta is not None:
            mean = tl.load(delta + s_offsets, mask=s_mask, other=0.0)
            dlogit = p * (a - mean[:, :, None])
        else:
            # p (a - sum p a), in differences to the heaviest source: where its weight is nearly
            # one, the two terms cancel. With one source this is zero exactly.
            heaviest = n_axis[None, None, :] == tl.argmax(p, 2)[:, :, None]
            others = tl.where(heaviest, 0.0, p)
            difference = a - tl.sum(tl.where(heaviest, a, 0.0), 2)[:, :, None]
            mean = tl.sum(others * difference, 2)
            dlogit = others * (difference - mean[:, :, None])
            dlogit = tl.where(heaviest, -tl.sum(dlogit, 2)[:, :, None], dlogit)
        if dlse is not None:
            pull = tl.load(dlse + s_offsets, mask=s_mask, other=0.0)
            dlogit += p * pull[:, :, None]
        if dlogits is not None:
            dlogit += tl.load(dlogits + offsets, mask=mask, other=0.0)
        r = tl.load(
            inverse_rms + n_axis[None, :] * T + tokens[:, None],
            mask=in_range[:, None] & counts[None, :],
            other=0.0,
        )
        radial = tl.sum(dlogit * tl.where(mask, logit, 0.0), 1) * r * r / D
        # [t, n, s] from here on.
        p = tl.trans(p, (0, 2, 1))
        c = tl.trans(dlogit * r[:, None, :], (0, 2, 1))
        offsets = (tokens[:, None, None] * N + n_axis[None, :, None]) * S + s_axis[None, None, :]
        exists = s_mask[:, None, :] & (n_axis < N)[None, :, None]
        tl.store(coefficients + offsets, c, mask=exists)
        if accumulated is not None:
            gradients = _sources(accumulated, T, N, N_PAD, D, BANK, FIRST)
        else:
            gradients = _sources(fresh, T, N, N_PAD, D, BANK, FIRST)
        for chunk in tl.range(0, tl.cdiv(D, COLUMNS), num_stages=STAGES):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)
            do = tl.load(
                _addresses(cotangents, tokens, column, D),
                mask=_mask(s_axis < S, in_range, column, D),
                other=0.0,
            )
            v_mask = _mask(counts, in_range, column, D)
            v = tl.load(_addresses(sources, tokens, column, D), mask=v_mask, other=0.0)
            w_offsets = s_axis[:, None] * D + column[None, :]
            w_mask = (s_axis < S)[:, None] & (column < D)[None, :]
            w = tl.load(folded[0] + w_offsets, mask=w_mask, other=0.0)
            w = tl.broadcast_to(w[None, :, :], (TOKENS, S_PAD, COLUMNS))
            dv = _exact_dot(p, do, tl.zeros((TOKENS, N_PAD, COLUMNS), tl.float32))
            dv = _exact_dot(c, w, dv)
            if len(folded) == 2:
                w_low = tl.load(folded[1] + w_offsets, mask=w_mask, other=0.0)
                w_low = tl.broadcast_to(w_low[None, :, :], (TOKENS, S_PAD, COLUMNS))
                dv = tl.dot(c.to(tl.bfloat16), w_low, dv)
            dv -= radial[:, :, None] * v.to(tl.float32)
            addresses = _addresses(gradients, tokens, column, D)
            if accumulated is not None:
                # Rows past the count keep what they have.
                dv += tl.load(addresses, mask=v_mask, other=0.0).to(tl.float32)
                tl.store(addresses, dv.to(v.dtype), mask=v_mask)
            else:
                tl.store(addresses, dv.to(v.dtype), mask=_mask(n_axis < N, in_range, column, D))


@triton.jit
def query_gradients_kernel(
    values,
    count_ptr,
    coefficients,
    T,
    partials,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    N_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    ROW_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BANK: tl.constexpr,
    FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some columns of a partial row of the queries' gradients."""
    T = tl.cast(T, tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    n_axis = tl.arange(0, N_PAD)
    s_axis = tl.arange(0, S_PAD)
    s_mask = s_axis < S
    count = FIRST + N
    if BANK:
        count = tl.load(count_ptr)
    counts = n_axis < tl.minimum(count - FIRST, N)
    sources = _sources(values, T, N, N_PAD, D, BANK, FIRST)
    of_query = tl.zeros((S_PAD, COLUMNS), tl.float32)
    first = tl.program_id(1).to(tl.int64) * ROW_TOKENS
    for step in tl.range(0, ROW_TOKENS // TOKENS, num_stages=STAGES):
        tokens = first + step * TOKENS + tl.arange(0, TOKENS)
        v = tl.load(
            _addresses(sources, tokens, column, D),
            mask=_mask(counts, tokens < T, column, D),
            other=0.0,
        )
        # [s, (t, n)]
        row = tl.arange(0, TOKENS * N_PAD)
        row_token, row_n = first + step * TOKENS + row // N_PAD, row % N_PAD
        row_mask = (row_token < T) & (row_n < tl.minimum(count - FIRST, N))
        c = tl.load(
            coefficients + (row_token[None, :] * N + row_n[None, :]) * S + s_axis[:, None],
            mask=s_mask[:, None] & row_mask[None, :],
            other=0.0,
        )
        of_query = _exact_dot(c, tl.reshape(v, (TOKENS * N_PAD, COLUMNS)), of_query)
    row = tl.program_id(1).to(tl.int64) * S + s_axis[:, None]
    mask = s_mask[:, None] & (column < D)[None, :]
    tl.store(partials + row * D + column[None, :], of_query, mask=mask)
