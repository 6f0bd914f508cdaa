"""Launches the Pallas kernels of single reads."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import chips
from pallas_kernels.merge.call import Call
from pallas_kernels.merge.tiling import Tiling
from pallas_kernels.single_phase.tiling import choose_tiling


def unsupported(values: tuple[jax.Array, ...], summed: jax.Array) -> str | None:
    """Returns why the kernels cannot read these arrays, or None if they can."""
    for x in (values[0], summed):
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"TPU kernels take bfloat16 and float32 arrays, and one is {x.dtype}"
    if summed.size and None in (_choose(kind, values, summed) for kind in ("forward", "backward")):
        return f"no tile of width {summed.shape[-1]} fits in this TPU's vector memory"
    return None


def run_forward(call: Call, values, partial_sum_td, update_td, folded_d, norm_gain_d):
    """Returns what `mosaic_tpu.forward` does."""
    from pallas_kernels.single_phase import mosaic_tpu

    return mosaic_tpu.forward(
        values,
        partial_sum_td,
        update_td,
        folded_d,
        norm_gain_d,
        eps=call.eps,
        norm_eps=call.norm_eps,
        tiling=_tile(
            call, "forward", values, update_td if partial_sum_td is None else partial_sum_td
        ),
        interpret=call.interpret,
    )


def run_backward(call: Call, values, summed_td, *arguments):
    """Returns what `mosaic_tpu.backward` does; the last argument is `dvalues`."""
    from pallas_kernels.single_phase import mosaic_tpu

    *arguments, dvalues = arguments
    return mosaic_tpu.backward(
        values,
        summed_td,
        *arguments,
        dvalues=dvalues,
        tiling=_tile(call, "backward", values, summed_td),
        interpret=call.interpret,
    )


def _choose(
    kind: Literal["forward", "backward"], values: tuple[jax.Array, ...], summed: jax.Array
) -> Tiling | None:
    return choose_tiling(
        kind,
        n=len(values),
        t=math.prod(summed.shape[:-1]),
        d=summed.shape[-1],
        dtype=max(values[0].dtype, summed.dtype, key=lambda dtype: dtype.itemsize),
        vmem_bytes=(chips.current() or chips.UNKNOWN).vmem_bytes,
    )


def _tile(call: Call, kind: Literal["forward", "backward"], values, summed) -> Tiling:
    tile = call.tiling or _choose(kind, values, summed)
    if tile is None:
        raise ValueError(unsupported(values, summed))
    return tile
