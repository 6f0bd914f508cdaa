"""A whole training step on a TPU, as its real compiler plans it: nothing is run or timed.

    uv run --group aot python -m benchmarks.tpu_step [--json]

Compiles loss, gradients and AdamW of a model of the paper's scaling table for one described chip,
with the standard residual and with Block Attention Residuals through XLA and through the Pallas
kernels. Temporary memory and bytes accessed are the compiler's own figures; for a kernel it takes
the bytes that the kernel declares. Compiling takes many minutes.
"""

import dataclasses
import os
import re
from typing import Any, Literal

# The TPU compiler runs on any machine, beside JAX on the CPU; it reads these when it is loaded.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from attnres_jax import TransformerLM, scaling_law_model
from benchmarks.rows import print_rows
from train.step import initial_state, make_train_step

KERNEL = r'custom_call_target="tpu_custom_call".*attnres_'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Shape of the compiled step."""

    topology: str = "v5p:2x2x1"
    """A described TPU slice, of which one chip is used."""
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


def compile_step(settings: Settings, **fields: Any) -> Any:
    """Compiles the step of a model with these fields of `ModelConfig`."""
    layers = {} if settings.num_layers is None else {"num_layers": settings.num_layers}
    config = scaling_law_model(
        settings.model,
        vocab_size=32768,
        compute_dtype="bfloat16",
        attention="splash",
        remat=settings.remat,
        **layers,
        **fields,
    )
    topology = topologies.get_topology_desc(platform="tpu", topology_name=settings.topology)
    mesh = Mesh(np.array(topology.devices[:1]), ("data",), axis_types=(AxisType.Auto,))
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
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    kinds = (("standard", "xla"), ("block", "xla"), ("block", "mosaic_tpu"))
    for residual, implementation in kinds:
        with console.status(f"compiling {residual} through {implementation}"):
            compiled = compile_step(settings, residual=residual, implementation=implementation)
        hlo = compiled.as_text()
        rows.append(
            {
                "residual": residual,
                "implementation": implementation,
                "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
                "accessed_gib": compiled.cost_analysis()["bytes accessed"] / 2**30,
                "kernel_calls": len(re.findall(KERNEL, hlo)),
            }
        )
    for row in rows:
        row["temporary_over_standard"] = row["temporary_mib"] / rows[0]["temporary_mib"]
        row["accessed_over_standard"] = row["accessed_gib"] / rows[0]["accessed_gib"]
    title = (
        f"Training step of the {settings.model} model compiled for one chip of {settings.topology}:"
        f" {settings.batch_size * settings.context} tokens, bfloat16, remat={settings.remat}"
    )
    print_rows(title, rows, as_json=settings.json)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
