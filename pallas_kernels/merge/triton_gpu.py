"""Phase 2 on NVIDIA GPUs: add, merge and normalise in one Triton kernel, and its gradient.

Five rows of the width a token move forward (output, partial sum and update in; sum and hidden out)
and six backward (output, sum and two cotangents in; two gradients out). Everything else about a
token stays in registers. Backward, a program runs through many tokens, so that it can sum its share
of the parameters' gradients there; a last kernel adds these shares in a fixed order.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.merge import triton_kernels as kernels
from pallas_kernels.merge.triton_tiling import Tiling
from pallas_kernels.triton_launch import cdiv, launch, row_sums
from pallas_kernels.triton_tiles import NEVER, planes, unplanes


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
    if partial_sum_td is None:
        raise ValueError("merge: pass partial_sum, update or both")
    outputs = {
        "summed": (output_td.shape, partial_sum_td.dtype),
        "hidden": (output_td.shape, output_td.dtype),
        "gate": ((num_tokens,), jnp.float32),
        "statistics": ((3 if norm_gain_d is None else 4, num_tokens), jnp.float32),
    }
    if update_td is None:
        del outputs["summed"]
    found = launch(
        kernels.forward_kernel,
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
        kernels.backward_kernel,
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
            "STAGES": tiling.num_stages,
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
