"""A whole read in one Triton kernel on NVIDIA GPUs, where few sources are finished.

Add, read one or two finished sources and the sum, normalise: n + 4 rows of the width a token. Two
phases move fewer from three finished sources on. Its tiles are those of phase 2.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.merge.triton_tiling import Tiling
from pallas_kernels.single_phase import triton_kernels as kernels
from pallas_kernels.triton_launch import cdiv, launch, row_sums
from pallas_kernels.triton_tiles import NEVER, planes, unplanes

MAX_SOURCES = 2


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds, reads the finished sources and the sum, and normalises.

        summed = partial_sum + update, rounded to the dtype of partial_sum
        read = depth attention over (*values, summed)
        hidden = read rsqrt(mean(read^2) + norm_eps) gain     (read itself without a gain)

    Args:
        values: One or two finished sources `[t, d]`; float32, bfloat16 or float16.
        partial_sum_td: In the dtype of the sources or float32; None if there is only an update.
        update_td: In the dtype of the sources; None if there is only a partial sum.
        folded_d: float32 product of pseudo-query and key-norm gain.
        norm_gain_d: float32 gain of the norm that follows, or None.
        eps: Added to the mean square of every source.
        norm_eps: Added to the mean square of the read.
        tiling: How the kernel is launched, see `merge.triton_tiling`.

    Returns:
        The sum (the given array if there is only one term); hidden, in the dtype of the sources;
        float32 statistics `[k, t]` for `backward`: n + 1 inverse RMS, then as many logits.

    References:
        Attention Residuals, arXiv:2603.15031, equations 2 to 4.
    """
    _check(values)
    num_tokens, width = values[0].shape
    if partial_sum_td is None:
        partial_sum_td, update_td = update_td, None
    if partial_sum_td is None:
        raise ValueError("single_phase: pass partial_sum, update or both")
    num_statistics = 2 * len(values) + (2 if norm_gain_d is None else 3)
    outputs = {
        "summed": (partial_sum_td.shape, partial_sum_td.dtype),
        "hidden": (values[0].shape, values[0].dtype),
        "statistics": ((num_statistics, num_tokens), jnp.float32),
    }
    if update_td is None:
        del outputs["summed"]
    found = launch(
        kernels.forward_kernel,
        name="single_phase_forward",
        inputs={
            "values": values,
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
        constants=_constants(len(values), width, tiling),
        grid=(cdiv(num_tokens, tiling.tokens),),
        num_warps=tiling.num_warps,
        compute_capability=tiling.compute_capability,
    )
    summed = partial_sum_td if update_td is None else found["summed"]
    return summed, found["hidden"], found["statistics"]


def backward(
    values: tuple[jax.Array, ...],
    summed_td: jax.Array,
    folded_d: jax.Array,
    norm_gain_d: jax.Array | None,
    statistics_kt: jax.Array,
    dsummed_td: jax.Array | None,
    dhidden_td: jax.Array,
    *,
    dlogits_nt: jax.Array | None = None,
    dvalues: tuple[jax.Array, ...] | None = None,
    tiling: Tiling,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array | None]:
    """Gradients of `forward`.

    Args:
        values: As in `forward`.
        summed_td: As returned by `forward`.
        folded_d: As in `forward`.
        norm_gain_d: As in `forward`.
        statistics_kt: As returned by `forward`.
        dsummed_td: Cotangent of the sum, in its dtype; None is zero.
        dhidden_td: Cotangent of hidden, in its dtype.
        dlogits_nt: float32 cotangents of the n + 1 logits from elsewhere; None is zero.
        dvalues: Gradients of the sources to add to, in place; None starts from zero.
        tiling: How the kernel is launched.

    Returns:
        Gradients to the sources, to the sum, to the folded query, and to the norm's gain (None
        without one). Each is computed in float32 and rounded once; those of the parameters are
        float32, and the same bits every time.
    """
    _check(values)
    num_tokens, width = values[0].shape
    rows = cdiv(num_tokens, tiling.row_tokens)
    outputs = {
        **{f"g{n}": (x.shape, x.dtype) for n, x in enumerate(values)},
        "dsum": (summed_td.shape, summed_td.dtype),
        "dfolded": ((rows, width), jnp.float32),
        "dnorm_gain": ((rows, width), jnp.float32),
    }
    updated = {}
    if dvalues is not None:
        updated["accumulated"] = dvalues
        outputs = {key: shape for key, shape in outputs.items() if key[0] != "g"}
    if dsummed_td is not None:
        updated["dsummed"] = (dsummed_td,)
        del outputs["dsum"]
    if norm_gain_d is None:
        del outputs["dnorm_gain"]
    found = launch(
        kernels.backward_kernel,
        name="single_phase_backward",
        inputs={
            "values": values,
            "summed": summed_td,
            "folded": planes(folded_d, packed=tiling.packed),
            "norm_gain": None if norm_gain_d is None else planes(norm_gain_d, packed=tiling.packed),
            "statistics": statistics_kt,
            "dhidden": dhidden_td,
            "dlogits_ptr": dlogits_nt,
            **{key: None for key in ("dsummed", "accumulated") if key not in updated},
            "T": num_tokens,
            "never": NEVER,
        },
        outputs=outputs,
        updated=updated,
        unused=[key for key in ("g0", "g1", "dsum", "dnorm_gain") if key not in outputs],
        constants=_constants(len(values), width, tiling) | {"ROW_TOKENS": tiling.row_tokens},
        grid=(rows,),
        num_warps=tiling.num_warps,
        compute_capability=tiling.compute_capability,
    )

    def total(name):
        sums = row_sums(found[name], compute_capability=tiling.compute_capability)
        return unplanes(sums, packed=tiling.packed)

    fresh = tuple(found[f"g{n}"] for n in range(len(values))) if dvalues is None else ()
    return (
        fresh or found["accumulated"],
        found["dsum"] if dsummed_td is None else found["dsummed"][0],
        total("dfolded"),
        None if norm_gain_d is None else total("dnorm_gain"),
    )


def _check(values: tuple[jax.Array, ...]) -> None:
    if not 1 <= len(values) <= MAX_SOURCES:
        raise ValueError(
            f"single_phase: one or two finished sources, got {len(values)}; two phases move less"
        )


def _constants(num_sources: int, width: int, tiling: Tiling) -> dict[str, int]:
    return {
        "N": num_sources,
        "D": width,
        "TOKENS": tiling.tokens,
        "HALF": tiling.half,
        "CHUNKS": tiling.chunks,
        "PACKED": tiling.packed,
    }
