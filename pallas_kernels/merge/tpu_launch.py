"""Launches the Pallas kernels of phase 2."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import chips
from pallas_kernels.merge.call import Call
from pallas_kernels.merge.tiling import Tiling, choose_tiling


def unsupported(output: jax.Array, summed: jax.Array) -> str | None:
    """Returns why the kernels cannot merge these arrays, or None if they can."""
    for x in (output, summed):
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"TPU kernels take bfloat16 and float32 arrays, and one is {x.dtype}"
    if output.size and None in (_choose(kind, output, summed) for kind in ("forward", "backward")):
        return f"no tile of width {output.shape[-1]} fits in this TPU's vector memory"
    return None


def run_forward(call: Call, output_td, lse_t, partial_sum_td, update_td, folded_d, norm_gain_d):
    """Returns what `mosaic_tpu.forward` does."""
    from pallas_kernels.merge import mosaic_tpu

    summed = update_td if partial_sum_td is None else partial_sum_td
    return mosaic_tpu.forward(
        output_td,
        lse_t,
        partial_sum_td,
        update_td,
        folded_d,
        norm_gain_d,
        eps=call.eps,
        norm_eps=call.norm_eps,
        tiling=_tile(call, "forward", output_td, summed),
        interpret=call.interpret,
    )


def run_backward(call: Call, output_td, summed_td, *arguments):
    """Returns what `mosaic_tpu.backward` does, of the same arguments."""
    from pallas_kernels.merge import mosaic_tpu

    return mosaic_tpu.backward(
        output_td,
        summed_td,
        *arguments,
        tiling=_tile(call, "backward", output_td, summed_td),
        interpret=call.interpret,
    )


def _choose(
    kind: Literal["forward", "backward"], output: jax.Array, summed: jax.Array
) -> Tiling | None:
    return choose_tiling(
        kind,
        t=math.prod(output.shape[:-1]),
        d=output.shape[-1],
        dtype=max(output.dtype, summed.dtype, key=lambda dtype: dtype.itemsize),
        vmem_bytes=(chips.current() or chips.UNKNOWN).vmem_bytes,
    )


def _tile(call: Call, kind: Literal["forward", "backward"], output, summed) -> Tiling:
    tile = call.tiling or _choose(kind, output, summed)
    if tile is None:
        raise ValueError(unsupported(output, summed))
    return tile
