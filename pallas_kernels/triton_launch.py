"""Launching Triton kernels from JAX, and the sum over rows that ends every parameter gradient."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.triton_tiles import sum_rows

Shape = tuple[tuple[int, ...], Any]
"""Shape and dtype of an output."""


def launch(
    kernel,
    *,
    name: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Shape],
    constants: Mapping[str, Any],
    grid: tuple[int, ...],
    num_warps: int,
    compute_capability: int,
    num_stages: int = 1,
    updated: Mapping[str, tuple[jax.Array, ...]] | None = None,
    unused: Sequence[str] = (),
) -> dict[str, Any]:
    """Calls a Triton kernel inside a JAX program.

    Args:
        kernel: The kernel. Each of its parameters is in exactly one of the mappings below.
        name: What the compiled program calls it.
        inputs: Arrays, tuples of arrays, numbers, or None for what the kernel does not get.
        outputs: Shapes and dtypes of the arrays that it returns, in the order of its parameters.
        constants: Values of its `tl.constexpr` parameters.
        grid: Number of programs along each axis.
        num_warps: Warps of a program.
        compute_capability: Of the GPU that it is compiled for, 90 for 9.0.
        num_stages: Depth to which Triton pipelines loads in loops.
        updated: Tuples of arrays that the kernel reads and overwrites in place.
        unused: Names of further outputs that this call does without.

    Returns:
        The outputs, and the updated arrays, by name.
    """
    # Only here: jax_triton is not installed where no NVIDIA GPU is used.
    import jax_triton

    updated = updated or {}
    refs = {key: tuple(jax.new_ref(x) for x in arrays) for key, arrays in updated.items()}
    found = jax_triton.triton_call(
        kernel=kernel,
        name=name,
        out_type=tuple(jax.ShapeDtypeStruct(*shape) for shape in outputs.values()),
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=compute_capability,
        **inputs,
        **dict.fromkeys(unused),
        **refs,
        **constants,
    )
    after = {key: tuple(jax.freeze(ref) for ref in group) for key, group in refs.items()}
    return dict(zip(outputs, found, strict=True)) | after


def row_sums(partials_rd: jax.Array, *, compute_capability: int) -> jax.Array:
    """Sums float32 `[r, ...]` over r in a fixed order: the same bits every time."""
    rows, shape = partials_rd.shape[0], partials_rd.shape[1:]
    if rows == 1:
        return partials_rd[0]
    width = partials_rd[0].size
    columns = 64
    sums = launch(
        sum_rows,
        name="sum_rows",
        inputs={"partials": partials_rd},
        outputs={"sums": ((width,), jnp.float32)},
        constants={"COUNT": rows, "WIDTH": width, "ROWS": 32, "COLUMNS": columns},
        grid=(cdiv(width, columns),),
        num_warps=4,
        compute_capability=compute_capability,
    )["sums"]
    return sums.reshape(shape)


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)
