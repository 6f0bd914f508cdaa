"""What one grid step of the backward kernel of phase 2 does on a TPU."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.merge.mosaic_forward import INVERSE_RMS, LOGIT, LSE, READ_INVERSE_RMS
from pallas_kernels.merge.tiling import LANES, SUBLANES
from pallas_kernels.token_tiles import (
    LEFT,
    Taker,
    add_lanes,
    as_columns,
    as_row,
    bfloat16_parts,
    clear_padding,
    dot_float32,
    for_each,
    groups_of,
    pieces,
    sum_lanes,
    sum_sublanes,
    widen,
)

# Columns, each 128 lanes wide.
_REST, _GATE = _OF_SUMMED, _OF_FOLDED = slice(0, LANES), slice(LANES, 2 * LANES)


def backward_kernel(
    output_ref,
    summed_ref,
    dhidden_ref,
    dsummed_ref,
    statistics_ref,
    folded_ref,
    *refs,
    t,
    n_steps,
    with_norm,
    with_dgate,
):
    """See `mosaic_tpu.backward`, which lists the references in this order."""
    take = Taker(refs)
    dgate_ref, norm_gain_ref = take(with_dgate), take(with_norm)
    doutput_ref, dlse_ref, dsum_ref, dfolded_ref = take(), take(), take(), take()
    dnorm_gain_ref, dnormalised_ref, normalised_ref = [take(with_norm) for _ in range(3)]
    pulls_ref, means_ref, tilts_ref = take(), take(with_norm), take(with_norm)
    columns_ref, scales_ref = take(), take()
    tokens, d = output_ref.shape
    on_matrix_unit = summed_ref.dtype == jnp.bfloat16
    parts_ref, factors_ref = take(on_matrix_unit), take(on_matrix_unit)

    @pl.when(pl.program_id(1) == 0)
    def _():
        dfolded_ref[...] = jnp.zeros_like(dfolded_ref)
        if with_norm:
            dnorm_gain_ref[...] = jnp.zeros_like(dnorm_gain_ref)

    index = pl.program_id(0) * n_steps + pl.program_id(1)
    scalars = [statistics_ref, dgate_ref][: 1 + with_dgate]
    clear_padding(t, index, [output_ref, summed_ref, dhidden_ref], scalars)
    lse, r, logit = [statistics_ref[k : k + 1, :] for k in (LSE, INVERSE_RMS, LOGIT)]
    gate, rest = jax.nn.sigmoid(logit - lse), jax.nn.sigmoid(lse - logit)
    read_r = statistics_ref[READ_INVERSE_RMS:, :] if with_norm else jnp.ones_like(r)
    columns_ref[...] = as_columns(rest * read_r, gate * read_r)

    @for_each(tokens, 32)
    def _(group):
        rest, gate = columns_ref[group, _REST], columns_ref[group, _GATE]
        for along_d in pieces(d):
            output = output_ref[group, along_d].astype(jnp.float32)
            summed = summed_ref[group, along_d].astype(jnp.float32)
            dhidden = dhidden_ref[group, along_d].astype(jnp.float32)
            difference = summed - output
            if not with_norm:
                add_lanes(pulls_ref, group, along_d, dhidden * difference)
                continue
            dnormalised = dhidden * norm_gain_ref[:, along_d]
            normalised = widen(rest, output) * output + widen(gate, output) * summed
            dnormalised_ref[group, along_d] = dnormalised
            normalised_ref[group, along_d] = normalised
            add_lanes(pulls_ref, group, along_d, dnormalised * difference)
            add_lanes(means_ref, group, along_d, dnormalised * normalised)
            add_lanes(tilts_ref, group, along_d, normalised * difference)
            dnorm_gain_ref[:, along_d] += sum_sublanes(dhidden * normalised)

    pulls = pulls_ref[...]
    if with_norm:
        mean = jnp.broadcast_to(sum_lanes(means_ref[...]) / d, (tokens, LANES))
        means_ref[...] = mean
        pulls -= mean * tilts_ref[...]
    pull = read_r * as_row(sum_lanes(pulls))
    if with_dgate:
        pull += dgate_ref[...]
    dlogit = gate * rest * pull
    dlse_ref[...] = -dlogit
    of_folded, of_summed = dlogit * r, dlogit * logit * r * r / d
    if on_matrix_unit:
        scales_ref[...] = as_columns(of_summed)
        parts_ref[...] = bfloat16_parts(of_folded)
        factors = bfloat16_parts(of_folded, LEFT).astype(jnp.float32)
        for i in range(0, tokens, LANES):
            factors_ref[i : i + LANES, :SUBLANES] = factors[:, i : i + LANES].T.astype(jnp.bfloat16)
    else:
        scales_ref[...] = as_columns(of_summed, of_folded)

    @for_each(tokens, LANES)
    def _(register):
        for along_d in pieces(d):
            if on_matrix_unit:
                summed = summed_ref[register, along_d]
                dfolded_ref[:, along_d] += dot_float32(parts_ref[:, register], summed)
            for group in groups_of(register, LANES // 4):
                rest, gate = columns_ref[group, _REST], columns_ref[group, _GATE]
                of_summed = scales_ref[group, _OF_SUMMED]
                if with_norm:
                    dread = dnormalised_ref[group, along_d]
                    mean = widen(means_ref[group, :], dread)
                    dread -= mean * normalised_ref[group, along_d]
                else:
                    dread = dhidden_ref[group, along_d].astype(jnp.float32)
                doutput = widen(rest, dread) * dread
                doutput_ref[group, along_d] = doutput.astype(doutput_ref.dtype)
                summed = summed_ref[group, along_d].astype(jnp.float32)
                dsum = dsummed_ref[group, along_d].astype(jnp.float32)
                dsum += widen(gate, dread) * dread
                if on_matrix_unit:
                    dsum += dot_float32(factors_ref[group, :SUBLANES], folded_ref[:, along_d])
                else:
                    of_folded = widen(scales_ref[group, _OF_FOLDED], summed)
                    dfolded_ref[:, along_d] += sum_sublanes(of_folded * summed)
                    dsum += of_folded * folded_ref[:, along_d]
                dsum -= widen(of_summed, summed) * summed
                dsum_ref[group, along_d] = dsum.astype(dsum_ref.dtype)
