"""One read on TPUs, in a single phase: kernels that touch every row once, forward and backward.

Of n finished sources, the forward reads each, the partial sum and the update, and writes the new
sum and the normalised read: n + 4 rows of d a token. The backward reads the sources, the sum and
both cotangents and writes n + 1 gradients: 2 n + 4 rows, and n more where it adds to gradients of
the sources. All arithmetic is float32.

A grid step takes a tile of tokens down in passes, as phase 2 does: one over d for the inner
products of every token, then the scalars of all tokens at once, then a pass over d for what they
scale. Inner products of bfloat16 rows with the query go to the matrix unit, exact as the query is
split into three bfloat16 parts; what is summed over tokens never mixes into a token's row.

Names: t tokens, d width, n finished sources, k statistics; a row is `[d]`, and a suffix names the
axes of an array.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.merge.tiling import LANES, SUBLANES, Tiling
from pallas_kernels.token_tiles import (
    Taker,
    add_lanes,
    add_rounded,
    as_columns,
    as_row,
    bfloat16_parts,
    clear_padding,
    dot_float32,
    for_each,
    groups_of,
    pieces,
    store_lane_sums,
    sum_lanes,
    sum_sublanes,
    whole,
    widen,
)

FORWARD_NAME = "attnres_single_phase_forward"
BACKWARD_NAME = "attnres_single_phase_backward"


def forward(
    values: tuple[jax.Array, ...],
    partial_sum_td: jax.Array | None,
    update_td: jax.Array | None,
    folded_d: jax.Array,
    norm_gain_d: jax.Array | None,
    *,
    eps: float,
    norm_eps: float,
    tiling: Tiling,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds the update to the partial sum, reads it beside the sources, and normalises the read.

        x_n = p = partial_sum + update,    x_i = v_i for i < n
        logit_i = <folded, x_i> r_i,    r_i = 1 / sqrt(mean_d(x_i**2) + eps)
        read = sum_i weight_i x_i,    weight = softmax_i(logit_i)
        hidden = read / sqrt(mean_d(read**2) + norm_eps) * norm_gain

    Args:
        values: n finished sources, `[t, d]` of one dtype.
        partial_sum_td: Sum of the block's earlier outputs, `[t, d]`, or None.
        update_td: The last sub-layer's output, `[t, d]`, or None; one of the two is given.
        folded_d: Pseudo-query times key-norm gain, float32 `[d]`.
        norm_gain_d: Gain of the norm that follows, float32 `[d]`; None: hidden is the read.
        eps: Added to the mean square of each x.
        norm_eps: Added to the mean square of the read.
        tiling: Tokens of a grid step, and the VMEM that it may use.
        interpret: Passed to `pallas_call`.

    Returns:
        p `[t, d]` in the dtype of the partial sum, rounded before it is read (where one of the two
        is None, the other one itself); hidden `[t, d]` in the dtype of the sources; the weights,
        float32 `[n + 1, t]`, the last of p; and for the backward float32 statistics `[k, t]`:
        n + 1 logits, n + 1 r, and the inverse RMS of the read if a norm follows it.

    References:
        Attention Residuals, arXiv:2603.15031, equations 2 to 4.
    """
    (t, d), n, tokens = values[0].shape, len(values), tiling.tokens
    parts = [x for x in (partial_sum_td, update_td) if x is not None]
    with_norm = norm_gain_d is not None
    k = 2 * (n + 1) + with_norm
    if t == 0:
        empty = jnp.zeros((k, 0), jnp.float32)
        return parts[0], values[0], empty[: n + 1], empty

    rows = pl.BlockSpec((tokens, d), lambda i: (i, 0))
    on_matrix_unit = _are_bfloat16(values[0], parts[0])
    folded = bfloat16_parts(folded_d[None]) if on_matrix_unit else folded_d[None]
    arguments = [*values, *parts, folded]
    in_specs = [*[rows] * (n + len(parts)), whole(folded)]
    out_shape = [
        jax.ShapeDtypeStruct((t, d), values[0].dtype),
        jax.ShapeDtypeStruct((n + 1, t), jnp.float32),
        jax.ShapeDtypeStruct((k, t), jnp.float32),
    ]
    out_specs = [rows, *[pl.BlockSpec((size, tokens), lambda i: (0, i)) for size in (n + 1, k)]]
    if with_norm:
        arguments.append(norm_gain_d[None])
        in_specs.append(whole(norm_gain_d[None]))
    if len(parts) == 2:
        out_shape.append(jax.ShapeDtypeStruct((t, d), parts[0].dtype))
        out_specs.append(rows)
    dots = (SUBLANES, tokens) if on_matrix_unit else (tokens, LANES)

    hidden_td, weights_nt, statistics_kt, *summed = pl.pallas_call(
        partial(
            _forward_kernel,
            n=n,
            n_parts=len(parts),
            with_norm=with_norm,
            eps=eps,
            norm_eps=norm_eps,
        ),
        grid=(pl.cdiv(t, tokens),),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((n + 1, tokens, LANES), jnp.float32),
            pltpu.VMEM((n + 1, *dots), jnp.float32),
            pltpu.VMEM((tokens, (n + 1) * LANES), jnp.float32),
            pltpu.VMEM((tokens, d), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=tiling.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=(6 * (n + 1) + 5) * t * d,
            transcendentals=(2 * (n + 1) + 2) * t,
            bytes_accessed=_total_bytes(arguments, out_shape),
        ),
        interpret=interpret,
        name=FORWARD_NAME,
    )(*arguments)
    return (summed[0] if summed else parts[0]), hidden_td, weights_nt, statistics_kt


def _forward_kernel(*refs, n, n_parts, with_norm, eps, norm_eps):
    take = Taker(refs)
    values_refs, parts_refs = [take() for _ in range(n)], [take() for _ in range(n_parts)]
    folded_ref, norm_gain_ref = take(), take(with_norm)
    hidden_ref, weights_ref, statistics_ref = take(), take(), take()
    summed_ref = take() if n_parts == 2 else parts_refs[0]
    squares_ref, dots_ref, columns_ref, rows_ref = take(), take(), take(), take()
    sources = [*values_refs, summed_ref]
    tokens, d = hidden_ref.shape
    on_matrix_unit = _are_bfloat16(*sources)

    @for_each(tokens, LANES)
    def _(group):
        for along_d in pieces(d) if n_parts == 2 else []:
            total = add_rounded(*[ref[group, along_d] for ref in parts_refs])
            summed_ref[group, along_d] = total
        for i, ref in enumerate(sources):
            squares, dots, dot_parts = [], [], jnp.zeros((SUBLANES, LANES), jnp.float32)
            for along_d in pieces(d):
                stored = ref[group, along_d]
                row = stored.astype(jnp.float32)
                if i == n:
                    rows_ref[group, along_d] = row
                squares.append(row * row)
                if on_matrix_unit:
                    dot_parts += dot_float32(folded_ref[:, along_d], stored, contract=(1, 1))
                else:
                    dots.append(row * folded_ref[:, along_d])
            store_lane_sums(squares_ref.at[i], group, squares)
            if on_matrix_unit:
                dots_ref[i, :, group] = dot_parts
            else:
                store_lane_sums(dots_ref.at[i], group, dots)

    logits = []
    for i in range(n + 1):
        if on_matrix_unit:
            dot = jnp.sum(dots_ref[i], axis=0, keepdims=True)
        else:
            dot = as_row(sum_lanes(dots_ref[i]))
        r = jax.lax.rsqrt(as_row(sum_lanes(squares_ref[i])) / d + eps)
        logits.append(dot * r)
        statistics_ref[i : i + 1, :] = logits[i]
        statistics_ref[n + 1 + i : n + 2 + i, :] = r
    weights = _softmax(logits)
    for i, weight in enumerate(weights):
        weights_ref[i : i + 1, :] = weight
    columns_ref[...] = as_columns(*weights)

    @for_each(tokens, 32)
    def _(group):
        columns = [columns_ref[group, column] for column in _lanes(n + 1)]
        squares = []
        for along_d in pieces(d):
            read = _weighted_sum(columns, [ref[group, along_d] for ref in (*values_refs, rows_ref)])
            if with_norm:
                rows_ref[group, along_d] = read
                squares.append(read * read)
            else:
                hidden_ref[group, along_d] = read.astype(hidden_ref.dtype)
        if with_norm:
            store_lane_sums(squares_ref.at[0], group, squares)

    if not with_norm:
        return
    read_r = jax.lax.rsqrt(sum_lanes(squares_ref[0]) / d + norm_eps)
    statistics_ref[2 * (n + 1) :, :] = as_row(read_r)
    columns_ref[:, :LANES] = jnp.broadcast_to(read_r, (tokens, LANES))

    @for_each(tokens, LANES)
    def _(group):
        read_r = columns_ref[group, :LANES]
        for along_d in pieces(d):
            read = rows_ref[group, along_d]
            hidden = read * widen(read_r, read) * norm_gain_ref[:, along_d]
            hidden_ref[group, along_d] = hidden.astype(hidden_ref.dtype)


def backward(
    values: tuple[jax.Array, ...],
    summed_td: jax.Array,
    folded_d: jax.Array,
    norm_gain_d: jax.Array | None,
    statistics_kt: jax.Array,
    dsummed_td: jax.Array,
    dhidden_td: jax.Array,
    dweights_nt: jax.Array | None = None,
    *,
    dvalues: tuple[jax.Array, ...] | None = None,
    tiling: Tiling,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array | None]:
    """Transposes `forward`; every gradient is summed in float32 and rounded once.

        dread = read_r (dhidden norm_gain - m <dhidden norm_gain, m> / d),    m = read_r read
        dlogit_i = weight_i sum_j weight_j (pull_i - pull_j),    pull_i = <dread, x_i> + dweight_i
        dx_i = weight_i dread + dlogit_i (r_i folded - x_i logit_i r_i**2 / d)
        dsum = dsummed + dx_n,    dfolded = sum_{i,t} dlogit_i r_i x_i
        dnorm_gain = sum_t dhidden m

    Args:
        values: n finished sources, `[t, d]`.
        summed_td: p = x_n as `forward` returned it, `[t, d]`.
        folded_d: Pseudo-query times key-norm gain, float32 `[d]`.
        norm_gain_d: Gain of the norm that follows, float32 `[d]`, or None.
        statistics_kt: What `forward` returned, float32 `[k, t]`.
        dsummed_td: Cotangent of p, `[t, d]` in its dtype. Its memory is reused for dsum where the
            tiles come out even.
        dhidden_td: Cotangent of hidden, `[t, d]`.
        dweights_nt: Cotangent of the weights, float32 `[n + 1, t]`; None is zero.
        dvalues: Gradients of the sources so far, `[t, d]` each, to which those of this read are
            added, in place where the tiles come out even; None writes the first ones.
        tiling: Tokens of a grid step, and the VMEM that it may use.
        interpret: Passed to `pallas_call`.

    Returns:
        dvalues, n arrays `[t, d]`; dsum `[t, d]`, the gradient to the partial sum and to the update
        alike; dfolded, float32 `[d]`; dnorm_gain, float32 `[d]`, or None. The last two are summed
        over tokens in a fixed order.
    """
    (t, d), n, tokens = summed_td.shape, len(values), tiling.tokens
    with_norm = norm_gain_d is not None
    if t == 0:
        zeros_d = jnp.zeros(d, jnp.float32)
        return dvalues or values, dsummed_td, zeros_d, zeros_d if with_norm else None

    n_tiles = pl.cdiv(t, tokens)
    # One sum over tokens for each half of the tiles: a chip that joins two cores gives one to each.
    n_halves = 2 if n_tiles % 2 == 0 else 1
    n_steps = n_tiles // n_halves

    def of_tokens(n_rows):
        return pl.BlockSpec((n_rows, tokens), lambda half, i: (0, half * n_steps + i))

    rows = pl.BlockSpec((tokens, d), lambda half, i: (half * n_steps + i, 0))
    accumulator = pl.BlockSpec((SUBLANES, d), lambda half, i: (half, 0))
    accumulated = jax.ShapeDtypeStruct((n_halves * SUBLANES, d), jnp.float32)
    sources = [*values, summed_td]
    on_matrix_unit = _are_bfloat16(*sources)
    arguments = [*sources, dhidden_td, dsummed_td, *(dvalues or ())]
    aliases = {n + 2 + i: (n + i) % (n + 1) for i in range(len(arguments) - n - 2)}
    in_specs = [rows] * len(arguments)
    out_shape = [jax.ShapeDtypeStruct((t, d), x.dtype) for x in sources]
    out_specs = [*[rows] * (n + 1), accumulator]
    arguments += [statistics_kt, folded_d[None]]
    in_specs += [of_tokens(statistics_kt.shape[0]), whole(folded_d[None])]
    out_shape.append(accumulated)
    if dweights_nt is not None:
        arguments.append(dweights_nt)
        in_specs.append(of_tokens(n + 1))
    if with_norm:
        arguments.append(norm_gain_d[None])
        in_specs.append(whole(norm_gain_d[None]))
        out_shape.append(accumulated)
        out_specs.append(accumulator)
    columns = pltpu.VMEM((tokens, (n + 1) * LANES), jnp.float32)

    results = pl.pallas_call(
        partial(
            _backward_kernel,
            n=n,
            t=t,
            n_steps=n_steps,
            accumulate=dvalues is not None,
            with_norm=with_norm,
            with_dweights=dweights_nt is not None,
        ),
        grid=(n_halves, n_steps),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((n, tokens, LANES), jnp.float32),
            *[columns] * 3,
            *[pltpu.VMEM((n + 1, SUBLANES, tokens), jnp.bfloat16)] * on_matrix_unit,
            *[pltpu.VMEM((n, tokens, LANES), jnp.float32)] * with_norm,
            *[pltpu.VMEM((tokens, LANES), jnp.float32)] * with_norm,
            *[pltpu.VMEM((tokens, d), jnp.float32)] * (2 * with_norm),
        ],
        # The interpreter for TPUs cannot alias what a last tile pads.
        input_output_aliases=aliases if t % tokens == 0 else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tiling.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=(17 * (n + 1) + 8) * t * d,
            transcendentals=(n + 2) * t,
            bytes_accessed=_total_bytes(arguments, out_shape),
        ),
        interpret=interpret,
        name=BACKWARD_NAME,
    )(*arguments)
    dvectors = [jnp.sum(x, axis=0) for x in results[n + 1 :]]
    return tuple(results[:n]), results[n], dvectors[0], dvectors[1] if with_norm else None


def _backward_kernel(*refs, n, t, n_steps, accumulate, with_norm, with_dweights):
    take = Taker(refs)
    sources, dhidden_ref = [take() for _ in range(n + 1)], take()
    dsummed_ref = take()
    before_refs = [*[take(accumulate) for _ in range(n)], dsummed_ref]
    statistics_ref, folded_ref = take(), take()
    dweights_ref, norm_gain_ref = take(with_dweights), take(with_norm)
    dsources, dfolded_ref = [take() for _ in range(n + 1)], take()
    dnorm_gain_ref = take(with_norm)
    on_matrix_unit = _are_bfloat16(*sources)
    pulls_ref, weights_ref, of_folded_ref, of_source_ref = [take() for _ in range(4)]
    parts_ref, tilts_ref = take(on_matrix_unit), take(with_norm)
    mean_ref, dnormalised_ref, normalised_ref = [take(with_norm) for _ in range(3)]
    tokens, d = dhidden_ref.shape

    @pl.when(pl.program_id(1) == 0)
    def _():
        dfolded_ref[...] = jnp.zeros_like(dfolded_ref)
        if with_norm:
            dnorm_gain_ref[...] = jnp.zeros_like(dnorm_gain_ref)

    index = pl.program_id(0) * n_steps + pl.program_id(1)
    scalars = [statistics_ref, dweights_ref][: 1 + with_dweights]
    clear_padding(t, index, [*sources, dhidden_ref], scalars)
    logits = [statistics_ref[i : i + 1, :] for i in range(n + 1)]
    weights = _softmax(logits)
    read_r = statistics_ref[2 * (n + 1) :, :] if with_norm else jnp.ones_like(logits[0])
    weights_ref[...] = as_columns(*[weight * read_r for weight in weights])

    # Pulls are differences to that of the sum: no cancellation where sources are nearly equal.
    @for_each(tokens, 32)
    def _(group):
        columns = [weights_ref[group, column] for column in _lanes(n + 1)]
        for along_d in pieces(d):
            rows = [ref[group, along_d].astype(jnp.float32) for ref in sources]
            dhidden = dhidden_ref[group, along_d].astype(jnp.float32)
            differences = [row - rows[n] for row in rows[:n]]
            if not with_norm:
                for i, difference in enumerate(differences):
                    add_lanes(pulls_ref.at[i], group, along_d, dhidden * difference)
                continue
            dnormalised = dhidden * norm_gain_ref[:, along_d]
            normalised = _weighted_sum(columns, rows)
            dnormalised_ref[group, along_d] = dnormalised
            normalised_ref[group, along_d] = normalised
            for i, difference in enumerate(differences):
                add_lanes(pulls_ref.at[i], group, along_d, dnormalised * difference)
                add_lanes(tilts_ref.at[i], group, along_d, normalised * difference)
            add_lanes(mean_ref, group, along_d, dnormalised * normalised)
            dnorm_gain_ref[:, along_d] += sum_sublanes(dhidden * normalised)

    pulls = [as_row(sum_lanes(pulls_ref[i])) for i in range(n)]
    if with_norm:
        mean = sum_lanes(mean_ref[...]) / d
        mean_ref[...] = jnp.broadcast_to(mean, (tokens, LANES))
        mean = as_row(mean)
        tilts = [as_row(sum_lanes(tilts_ref[i])) for i in range(n)]
        pulls = [read_r * (pull - mean * tilt) for pull, tilt in zip(pulls, tilts, strict=True)]
    pulls.append(jnp.zeros_like(pulls[0]))
    if with_dweights:
        pulls = [pull + dweights_ref[i : i + 1, :] for i, pull in enumerate(pulls)]
    of_folded, of_source = [], []
    for i, (weight, logit) in enumerate(zip(weights, logits, strict=True)):
        others = [w * (pulls[i] - pull) for w, pull in zip(weights, pulls, strict=True)]
        dlogit = weight * sum(x for j, x in enumerate(others) if j != i)
        r = statistics_ref[n + 1 + i : n + 2 + i, :]
        of_folded.append(dlogit * r)
        of_source.append(dlogit * logit * r * r / d)
        if on_matrix_unit:
            parts_ref[i] = bfloat16_parts(dlogit * r)
    of_folded_ref[...] = as_columns(*of_folded)
    of_source_ref[...] = as_columns(*of_source)

    @for_each(tokens, LANES)
    def _(register):
        for along_d in pieces(d):
            for i, ref in enumerate(sources if on_matrix_unit else []):
                product = dot_float32(parts_ref[i, :, register], ref[register, along_d])
                dfolded_ref[:, along_d] += product
            for group in groups_of(register, 32):
                if with_norm:
                    dread = dnormalised_ref[group, along_d]
                    dread -= widen(mean_ref[group, :], dread) * normalised_ref[group, along_d]
                else:
                    dread = dhidden_ref[group, along_d].astype(jnp.float32)
                folded = folded_ref[:, along_d]
                for i, column in enumerate(_lanes(n + 1)):
                    row = sources[i][group, along_d].astype(jnp.float32)
                    of_folded = widen(of_folded_ref[group, column], row)
                    if not on_matrix_unit:
                        dfolded_ref[:, along_d] += sum_sublanes(of_folded * row)
                    dsource = widen(weights_ref[group, column], row) * dread + of_folded * folded
                    dsource -= widen(of_source_ref[group, column], row) * row
                    if before_refs[i] is not None:
                        dsource += before_refs[i][group, along_d].astype(jnp.float32)
                    dsources[i][group, along_d] = dsource.astype(dsources[i].dtype)


def _are_bfloat16(*arrays) -> bool:
    return all(x.dtype == jnp.bfloat16 for x in arrays)


def _softmax(logits: list[jax.Array]) -> list[jax.Array]:
    highest = logits[0]
    for logit in logits[1:]:
        highest = jnp.maximum(highest, logit)
    powers = [jnp.exp(logit - highest) for logit in logits]
    total = sum(powers[1:], powers[0])
    return [power / total for power in powers]


def _weighted_sum(columns: list[jax.Array], rows: list[jax.Array]) -> jax.Array:
    products = [
        widen(column, row) * row.astype(jnp.float32)
        for column, row in zip(columns, rows, strict=True)
    ]
    return sum(products[1:], products[0])


def _lanes(count: int) -> list[slice]:
    """The lanes of each of so many columns side by side."""
    return [slice(i * LANES, (i + 1) * LANES) for i in range(count)]


def _total_bytes(*lists: list) -> int:
    return sum(x.size * x.dtype.itemsize for arrays in lists for x in arrays)
