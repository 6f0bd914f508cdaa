"""Kernels as a model launches them, the bytes that they move, and the plain alternative."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chips
from pallas_kernels.inter_block import mosaic_tpu as inter_block
from pallas_kernels.inter_block import tiling as inter_block_tiling
from pallas_kernels.merge import mosaic_tpu as merge
from pallas_kernels.merge import tiling as merge_tiling
from pallas_kernels.merge.tiling import LANES, SUBLANES
from pallas_kernels.single_phase import mosaic_tpu as single_phase
from pallas_kernels.single_phase import tiling as single_phase_tiling

DTYPE = jnp.bfloat16
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sources (n), reads of them at once (s), width (d) and tokens (t)."""

    n: int
    s: int
    d: int
    t: int = 8192

    def __str__(self) -> str:
        return f"N={self.n} S={self.s} D={self.d}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile.

    Attributes:
        function: Takes `arguments`.
        arguments: Shapes and dtypes.
        rows: Rows of d a token that it moves at least.
        kernel: Name of the kernel in it, if there is one.
        tokens: Tokens of one grid step of that kernel.
    """

    function: Callable
    arguments: tuple
    rows: int
    kernel: str | None = None
    tokens: int = 0


def inter_block_forward(shape: Shape, chip: chips.Chip, *, known: bool) -> Program:
    """Phase 1; with `known`, the inverse RMS of all sources but the newest is at hand."""
    n, s, d, t = shape.n, shape.s, shape.d, shape.t
    tiling = _inter_block_tiling("forward", shape, chip)

    def run(values, folded_sd, inverse_rms_nt):
        return inter_block.forward(
            values, folded_sd, tiling=tiling, eps=EPS, inverse_rms_nt=inverse_rms_nt
        )

    arguments = (
        (_rows(t, d),) * n,
        _f32(s, d),
        _f32(n - 1, t) if known else None,
    )
    return Program(run, arguments, n + s, "attnres_inter_block_forward", tiling.tokens)


def inter_block_backward(shape: Shape, chip: chips.Chip, *, accumulate: bool) -> Program:
    """Transpose of phase 1, which adds to gradients of the sources or writes the first ones."""
    n, s, d, t = shape.n, shape.s, shape.d, shape.t
    tiling = _inter_block_tiling("backward", shape, chip)

    def run(values, folded_sd, lse_st, logits_snt, inverse_rms_nt, doutputs, dlse_st, dvalues):
        return inter_block.backward(
            values,
            folded_sd,
            lse_st,
            logits_snt,
            inverse_rms_nt,
            doutputs,
            dlse_st,
            tiling=tiling,
            cores=chip.cores,
            dvalues=dvalues,
        )

    arguments = (
        (_rows(t, d),) * n,
        _f32(s, d),
        _f32(s, t),
        _f32(s, n, t),
        _f32(n, t),
        (_rows(t, d),) * s,
        _f32(s, t),
        (_rows(t, d),) * n if accumulate else None,
    )
    rows = (3 if accumulate else 2) * n + s
    return Program(run, arguments, rows, "attnres_inter_block_backward", tiling.tokens)


def _inter_block_tiling(
    kind: Literal["forward", "backward"], shape: Shape, chip: chips.Chip
) -> inter_block_tiling.Tiling:
    launch = inter_block_tiling.Shape(shape.n, shape.s, shape.t, shape.d, jnp.dtype(DTYPE).itemsize)
    tiling = inter_block_tiling.choose(kind, launch, chip)
    if tiling is None:
        raise ValueError(f"no tile of the {kind} kernel fits in vector memory")
    return tiling


def merge_forward(shape: Shape, chip: chips.Chip) -> Program:
    """Phase 2."""
    tiling = _merge_tiling("forward", shape, chip)

    def run(output_td, lse_t, partial_sum_td, update_td, folded_d, norm_gain_d):
        return merge.forward(
            output_td,
            lse_t,
            partial_sum_td,
            update_td,
            folded_d,
            norm_gain_d,
            eps=EPS,
            norm_eps=EPS,
            tiling=tiling,
        )

    rows_td, vector_d = _rows(shape.t, shape.d), _f32(shape.d)
    arguments = (rows_td, _f32(shape.t), rows_td, rows_td, vector_d, vector_d)
    return Program(run, arguments, 5, "attnres_merge_forward", tiling.tokens)


def merge_backward(shape: Shape, chip: chips.Chip) -> Program:
    """Transpose of phase 2."""
    tiling = _merge_tiling("backward", shape, chip)

    def run(output_td, summed_td, folded_d, norm_gain_d, statistics_kt, dsummed_td, dhidden_td):
        return merge.backward(
            output_td,
            summed_td,
            folded_d,
            norm_gain_d,
            statistics_kt,
            dsummed_td,
            dhidden_td,
            tiling=tiling,
        )

    rows_td, vector_d = _rows(shape.t, shape.d), _f32(shape.d)
    kept_kt = jax.eval_shape(*_flat(merge_forward(shape, chip)))[3]
    arguments = (rows_td, rows_td, vector_d, vector_d, kept_kt, rows_td, rows_td)
    return Program(run, arguments, 6, "attnres_merge_backward", tiling.tokens)


def _flat(program: Program) -> tuple:
    return program.function, *program.arguments


def _merge_tiling(
    kind: Literal["forward", "backward"], shape: Shape, chip: chips.Chip
) -> merge_tiling.Tiling:
    tiling = merge_tiling.choose_tiling(kind, shape.t, shape.d, DTYPE, vmem_bytes=chip.vmem_bytes)
    if tiling is None:
        raise ValueError(f"no tile of the {kind} kernel fits in vector memory")
    return tiling


def single_phase_forward(shape: Shape, chip: chips.Chip) -> Program:
    """One read of two finished sources and the partial sum."""
    n, t, d = single_phase_tiling.MOST_SOURCES, shape.t, shape.d
    tiling = _single_phase_tiling("forward", shape, chip)

    def run(values, partial_sum_td, update_td, folded_d, norm_gain_d):
        return single_phase.forward(
            values,
            partial_sum_td,
            update_td,
            folded_d,
            norm_gain_d,
            eps=EPS,
            norm_eps=EPS,
            tiling=tiling,
        )

    rows_td, vector_d = _rows(t, d), _f32(d)
    arguments = ((rows_td,) * n, rows_td, rows_td, vector_d, vector_d)
    return Program(run, arguments, n + 4, "attnres_single_phase_forward", tiling.tokens)


def single_phase_backward(shape: Shape, chip: chips.Chip, *, accumulate: bool) -> Program:
    """Its transpose, which adds to gradients of the sources or writes the first ones."""
    n, t, d = single_phase_tiling.MOST_SOURCES, shape.t, shape.d
    tiling = _single_phase_tiling("backward", shape, chip)

    def run(values, summed, folded_d, norm_gain_d, statistics_kt, dsummed, dhidden, dvalues):
        return single_phase.backward(
            values,
            summed,
            folded_d,
            norm_gain_d,
            statistics_kt,
            dsummed,
            dhidden,
            dvalues=dvalues,
            tiling=tiling,
        )

    rows_td, vector_d = _rows(t, d), _f32(d)
    values = (rows_td,) * n
    kept_kt = jax.eval_shape(*_flat(single_phase_forward(shape, chip)))[3]
    arguments = (
        values,
        rows_td,
        vector_d,
        vector_d,
        kept_kt,
        rows_td,
        rows_td,
        values if accumulate else None,
    )
    rows = (3 if accumulate else 2) * n + 4
    return Program(run, arguments, rows, "attnres_single_phase_backward", tiling.tokens)


def _single_phase_tiling(
    kind: Literal["forward", "backward"], shape: Shape, chip: chips.Chip
) -> merge_tiling.Tiling:
    tiling = single_phase_tiling.choose_tiling(
        kind,
        single_phase_tiling.MOST_SOURCES,
        shape.t,
        shape.d,
        DTYPE,
        vmem_bytes=chip.vmem_bytes,
    )
    if tiling is None:
        raise ValueError(f"no tile of the {kind} kernel fits in vector memory")
    return tiling


def batched_forward(shape: Shape) -> Program:
    """Phase 1 as plain array operations: a stack of the sources, and products over it."""
    arguments = ((_rows(shape.t, shape.d),) * shape.n, _f32(shape.s, shape.d))
    return Program(_batched, arguments, shape.n + shape.s)


def batched_value_and_gradients(shape: Shape) -> Program:
    """The same with its gradients, as JAX derives them."""

    def run(values, folded_sd, cotangents):
        results, transpose = jax.vjp(_batched, values, folded_sd)
        return results, transpose(cotangents)

    forward = batched_forward(shape)
    cotangents = jax.eval_shape(*_flat(forward))
    return Program(run, (*forward.arguments, cotangents), 3 * shape.n + 2 * shape.s)


def _batched(values, folded_sd):
    values_ntd = jnp.stack(values)
    exact_ntd = values_ntd.astype(jnp.float32)
    inverse_rms_nt = jax.lax.rsqrt(jnp.mean(jnp.square(exact_ntd), axis=-1) + EPS)
    logits_snt = jnp.einsum("sd,ntd->snt", folded_sd, exact_ntd) * inverse_rms_nt
    weights_snt = jax.nn.softmax(logits_snt, axis=1).astype(values_ntd.dtype)
    outputs_std = jnp.einsum(
        "snt,ntd->std", weights_snt, values_ntd, preferred_element_type=jnp.float32
    )
    return outputs_std.astype(values_ntd.dtype), jax.nn.logsumexp(logits_snt, axis=1)


KERNELS: dict[str, Callable[[Shape, chips.Chip], Program]] = {
    "inter_block forward": partial(inter_block_forward, known=True),
    "inter_block forward, no RMS known": partial(inter_block_forward, known=False),
    "inter_block backward": partial(inter_block_backward, accumulate=True),
    "inter_block backward, first": partial(inter_block_backward, accumulate=False),
    "merge forward": merge_forward,
    "merge backward": merge_backward,
    "single_phase forward, N=2": single_phase_forward,
    "single_phase backward, N=2": partial(single_phase_backward, accumulate=True),
    "single_phase backward, N=2, first": partial(single_phase_backward, accumulate=False),
}
PLAIN = {
    "forward": (batched_forward, ["inter_block forward, no RMS known"]),
    "value and gradients": (
        batched_value_and_gradients,
        ["inter_block forward, no RMS known", "inter_block backward, first"],
    ),
}
"""Plain programs, and the kernels that do the same."""


def tile(shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Returns the rows and columns of which a TPU's memory holds whole multiples of an array.

    That is of its last two axes, and for arrays of two axes or more that are not transposed:
    kernels take no others.
    """
    rows = shape[-2]
    return min(SUBLANES, max(1 << (rows - 1).bit_length(), 4 // itemsize)), LANES


def moved_bytes(program: Program) -> tuple[int, int]:
    """Counts the bytes that a kernel's windows move between memory and the chip.

    A window is moved when it is another one than in the step before, and only the part of it that
    lies in its array, in whole tiles of memory: a row of 1168 numbers moves as 1280. Rows that a
    kernel reads and overwrites are moved twice.

    Args:
        program: Launches its kernel once.

    Returns:
        Bytes of all windows over the grid, and the number of its steps.
    """
    jaxpr = jax.make_jaxpr(program.function)(*program.arguments).jaxpr
    launches = [
        equation.params["grid_mapping"]
        for equation in _equations(jaxpr)
        if equation.primitive.name == "pallas_call"
    ]
    if len(launches) != 1:
        raise ValueError(f"{program.kernel}: expected one launch, found {len(launches)}")
    steps = jnp.stack([x.ravel() for x in jnp.indices(launches[0].grid, dtype=jnp.int32)])
    total = 0
    for window in launches[0].block_mappings:
        index_map = jax.vmap(partial(jax.core.eval_jaxpr, window.index_map_jaxpr.jaxpr, ()))
        block = np.stack([np.asarray(x) for x in index_map(*steps)], axis=1)
        moves = np.append(True, (block[1:] != block[:-1]).any(axis=1))
        size = np.array([getattr(x, "block_size", 1) for x in window.block_shape])
        shape, itemsize = window.array_aval.shape, window.array_aval.dtype.itemsize
        inside = np.minimum(size, np.array(shape) - block[moves] * size)
        whole = np.array([1] * (len(shape) - 2) + list(tile(shape, itemsize)))
        total += int((-(-inside // whole) * whole).prod(axis=1).sum()) * itemsize
    return total, steps.shape[1]


def _rows(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, DTYPE)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _equations(jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                yield from _equations(inner)
