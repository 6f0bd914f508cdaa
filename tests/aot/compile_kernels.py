"""Compiles every TPU kernel, forward and backward, for one described chip.

    python -m tests.aot.compile_kernels v5p:2x2x1

Prints a JSON line for each program: its name, and how often it launches which kernel or why it does
not compile. Run by `tests/test_aot.py`, in a process of its own because libtpu reads its settings
when it is loaded.
"""

import collections
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import chips
from pallas_kernels.inter_block import mosaic_tpu, tiling
from pallas_kernels.inter_block import op as inter_block
from pallas_kernels.merge import op as merge
from pallas_kernels.single_phase import op as single_phase

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sources (n), reads of them at once (s), width (d), tokens (t), and their dtype."""

    n: int
    s: int
    d: int
    t: int = 1024
    dtype: str = "bfloat16"

    def rows(self, *leading: int, dtype: str | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*leading, self.t, self.d), dtype or self.dtype)

    def sources(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (self.rows(),) * self.n

    def scalars(self, *leading: int) -> jax.ShapeDtypeStruct:
        return _f32(*leading, self.t)


# Of the paper and of Kimi K3. More tokens make more grid steps, and no other kernel.
PUBLISHED = [Shape(9, 12, 2048), Shape(10, 6, 2304), Shape(9, 8, 7168), Shape(9, 4, 1168)]
ODD = [
    Shape(3, 2, 100, 7, "float32"),
    Shape(2, 3, 1, 5, "float32"),
    Shape(9, 4, 1168, 129, "float32"),
    Shape(1, 4, 256, 256),
    Shape(4, 24, 256, 256),
    Shape(16, 4, 512, 1),
    Shape(50, 2, 256, 256),
]
"""Widths and token counts that fill no register, one source, many reads, and more sources than a
launch takes."""


def programs() -> Iterator[tuple[str, Callable, tuple]]:
    """Yields a name, a function, and the shapes of its arguments."""
    for shape in PUBLISHED:
        yield f"inter_block {shape}", *read(shape)
        yield f"inter_block, RMS known, gradients added {shape}", *read(shape, later=True)
        yield f"inter_block of a bank {shape}", *read(shape, bank=True, with_logits=True)
        yield f"inter_block joined to earlier sources {shape}", *joined_read(shape)
        yield f"merge {shape}", *merged(shape)
        yield (
            f"merge without norm, float32 sum {shape}",
            *merged(shape, with_norm=False, sum_dtype="float32"),
        )
    for shape in ODD:
        yield f"inter_block {shape}", *read(shape, later=True, with_logits=True)
    for shape in ODD[:3]:
        yield f"merge {shape}", *merged(shape)
    for n in (1, 2):
        for shape in (Shape(n, 1, 2048), Shape(n, 1, 1168), Shape(n, 1, 100, 7, "float32")):
            yield f"single_phase {shape}", *single(shape)


def read(shape: Shape, *, later: bool = False, bank: bool = False, with_logits: bool = False):
    """Phase 1 and its transpose.

    `later`: as any read but the first, with the inverse RMS of all sources but the newest, and with
    gradients of the sources to add to. `with_logits`: the logits are differentiated too.
    """
    values = shape.rows(shape.n) if bank else shape.sources()
    known = shape.scalars(shape.n - 1) if later and shape.n > 1 else None

    def run(values, folded_sd, count, inverse_rms):
        _check(inter_block.unsupported(values, shape.s, "mosaic_tpu"))
        result = inter_block.inter_block(
            values,
            folded_sd,
            eps=EPS,
            implementation="mosaic_tpu",
            count=count,
            inverse_rms=inverse_rms,
        )
        used = (result.outputs, result.lse, result.logits if with_logits else None)
        return *used, (result.values if later else None)

    count = jax.ShapeDtypeStruct((), jnp.int32) if bank else None
    return with_transpose(run, (values, _f32(shape.s, shape.d)), (count, known))


def joined_read(shape: Shape):
    """One launch of several over which the sources are spread, and its transpose."""
    n, s, chip = shape.n, shape.s, chips.current()
    assert chip is not None
    tiles = [
        tiling.choose(kind, tiling.Shape(n, s, shape.t, shape.d, 2, carried=carried), chip)
        for kind, carried in (("forward", True), ("backward", False))
    ]

    def run(values, folded_sd, carry, doutputs, dlse_st, delta_st):
        outputs, lse_st, logits_snt, inverse_rms_nt = mosaic_tpu.forward(
            values,
            folded_sd,
            tiling=tiles[0],
            eps=EPS,
            carry=carry,
            out_dtype=jnp.float32,
        )
        return outputs, mosaic_tpu.backward(
            values,
            folded_sd,
            lse_st,
            logits_snt,
            inverse_rms_nt,
            doutputs,
            dlse_st,
            tiling=tiles[1],
            cores=chip.cores,
            delta_st=delta_st,
        )

    carry = ((shape.rows(dtype="float32"),) * s, shape.scalars(s))
    cotangents = ((shape.rows(),) * s, shape.scalars(s), shape.scalars(s))
    return run, (shape.sources(), _f32(s, shape.d), carry, *cotangents)


def merged(shape: Shape, *, with_norm: bool = True, sum_dtype: str | None = None):
    """Phase 2 and its transpose."""
    partial_sum = shape.rows(dtype=sum_dtype)

    def run(*arguments):
        _check(merge.unsupported(arguments[0], arguments[2], "mosaic_tpu"))
        merged = merge.merge(*arguments, eps=EPS, norm_eps=EPS, implementation="mosaic_tpu")
        return merged if sum_dtype else merged[:2]  # Without a cotangent for the gate.

    vector_d = _f32(shape.d)
    rows = (shape.rows(), shape.scalars(), partial_sum, shape.rows())
    return with_transpose(run, (*rows, vector_d, vector_d if with_norm else None))


def single(shape: Shape):
    """The fused read of few sources, and its transpose."""

    def run(*arguments):
        _check(single_phase.unsupported(*arguments[:2], "mosaic_tpu"))
        result = single_phase.single_phase(
            *arguments, eps=EPS, norm_eps=EPS, implementation="mosaic_tpu"
        )
        return result.summed, result.hidden, result.values

    vector_d = _f32(shape.d)
    return with_transpose(run, (shape.sources(), shape.rows(), shape.rows(), vector_d, vector_d))


def with_transpose(function: Callable, inputs: tuple, others: tuple = ()) -> tuple:
    """The function that also returns its gradients to `inputs`, and what it takes."""

    def run(inputs, others, cotangents):
        results, transpose = jax.vjp(lambda *inputs: function(*inputs, *others), *inputs)
        return results, transpose(cotangents)

    return run, (inputs, others, jax.eval_shape(function, *inputs, *others))


def _check(reason_against: str | None) -> None:
    if reason_against is not None:
        raise ValueError(reason_against)


def kernels_in(hlo: str) -> dict[str, int]:
    """How often a compiled program launches each kernel of ours, or of splash attention."""
    calls = re.findall(r"%(\S+) = .*custom_call_target=\"tpu_custom_call\"", hlo)
    kernel = re.compile(r"attnres_\w+?(?:forward|backward)|splash_mha_(?:fwd|dkv|dq)")
    found = [kernel.search(name) for name in calls]
    return dict(collections.Counter(match[0] if match else "?" for match in found))


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def main(topology_name: str) -> None:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name)
    mesh = Mesh(np.array(topology.devices[:1]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        for name, function, arguments in programs():
            arguments = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
            )
            row: dict = {"program": name}
            try:
                compiled = jax.jit(function).lower(*arguments).compile()
                row["kernels"] = kernels_in(compiled.as_text())
            except Exception as error:
                row["error"] = str(error)[-1000:]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
