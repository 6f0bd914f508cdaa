"""A whole training step on a TPU or GPU, as its real compiler plans it: nothing is run or timed.

    uv run --group aot python -m benchmarks.step_memory [--topology=h200:1 --batch-size=2] [--json]

Compiles loss, gradients and AdamW of a model of the paper's scaling table for one described chip,
with the standard residual and with Block Attention Residuals through XLA and through kernels.
Temporary memory and, for TPUs, bytes accessed are the compiler's own figures; for a Pallas kernel
it takes the bytes that the kernel declares. Compiling takes many minutes.
"""

import dataclasses
import os
import re
import sys
from typing import Any, Literal

# A compiler runs on any machine, beside JAX on the CPU.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from attnres_jax import TransformerLM, scaling_law_model
from benchmarks.rows import print_rows
from train.step import initial_state, make_train_step
from train.topology import Topology, described_devices, parse_topology

KERNEL = r'custom_call_target="(?:tpu_custom_call".*attnres_|triton_kernel_call_ffi")'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Shape of the compiled step."""

    topology: str = "v5p:2x2x1"
    """A described TPU slice, or GPUs such as h200:1, of which one chip is used."""
    model: Literal["194m", "241m", "296m", "436m", "528m"] = "436m"
    """Row of the paper's scaling table."""
    num_layers: int | None = None
    """Transformer layers, two sub-layers each; None means the table's."""
    batch_size: int = 4
    context: int = 2048
    """Tokens in a sequence; the step has batch_size times as many."""
    remat: Literal["none", "block", "full"] = "block"
    """What the backward pass recomputes."""
    json: bool = False
    """Print one JSON line a row instead of a table."""


def compile_step(settings: Settings, topology: Topology, **fields: Any) -> Any:
    """Compiles the step of a model with these fields of `ModelConfig`."""
    layers = {} if settings.num_layers is None else {"num_layers": settings.num_layers}
    config = scaling_law_model(
        settings.model,
        vocab_size=32768,
        compute_dtype="bfloat16",
        attention="splash" if topology.is_tpu else "xla",
        remat=settings.remat,
        **layers,
        **fields,
    )
    mesh = Mesh(np.array(described_devices(topology)[:1]), ("data",), axis_types=(AxisType.Auto,))
    model = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    optimizer, schedule = optax.adamw(1e-3), optax.constant_schedule(1e-3)
    state = jax.eval_shape(lambda params: initial_state(params, optimizer), params)
    tokens = jax.ShapeDtypeStruct((settings.batch_size, settings.context + 1), jnp.int32)
    state, batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        ),
        (state, {"tokens": tokens}),
    )
    with jax.set_mesh(mesh):
        step: Any = make_train_step(graphdef, optimizer, schedule, mesh)
        return step.lower(state, batch).compile()


def main(settings: Settings) -> None:
    """Compiles and prints one row for each kind of residual."""
    try:
        topology = parse_topology(settings.topology)
        described_devices(topology)
    except ValueError as error:
        sys.exit(str(error))
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    kernels = "mosaic_tpu" if topology.is_tpu else "triton_gpu"
    kinds = (("standard", "xla"), ("block", "xla"), ("block", kernels))
    for residual, implementation in kinds:
        with console.status(f"compiling {residual} through {implementation}"):
            compiled = compile_step(
                settings, topology, residual=residual, implementation=implementation
            )
        # XLA counts no bytes of a program for described GPUs.
        accessed = (compiled.cost_analysis() or {}).get("bytes accessed")
        rows.append(
            {
                "residual": residual,
                "implementation": implementation,
                "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
                "accessed_gib": accessed and accessed / 2**30,
                "kernel_calls": len(re.findall(KERNEL, compiled.as_text())),
            }
        )
    for row in rows:
        row["temporary_over_standard"] = row["temporary_mib"] / rows[0]["temporary_mib"]
        accessed = row["accessed_gib"]
        row["accessed_over_standard"] = accessed and accessed / rows[0]["accessed_gib"]
    title = (
        f"Training step of the {settings.model} model compiled for one chip of {topology.name}:"
        f" {settings.batch_size * settings.context} tokens, bfloat16, remat={settings.remat}"
    )
    print_rows(title, rows, as_json=settings.json)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
