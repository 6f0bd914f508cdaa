"""What pipeline stages exchange, and what each executor keeps: counted, not timed.

    python -m benchmarks.pipeline_traffic [--json]

The first table has the block representations that a stage sends in a training step, forward and
backward, with cross-stage caching and without: by formula, from the jaxpr, and from the program
that XLA compiles for emulated devices. The second has the temporary memory that the TPU compiler
plans for, on chips that are not there, in a bfloat16 model of two virtual stages, one block of one
layer to a chunk; it needs the dependency group aot:

    uv run --group aot python -m benchmarks.pipeline_traffic
"""

import dataclasses
import importlib.util
import os
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track

from attnres_jax import ModelConfig
from attnres_jax.parallel import (
    EXECUTORS,
    MeshConfig,
    PipelineConfig,
    Plan,
    abstract_params,
    collectives_of_hlo,
    collectives_of_jaxpr,
    make_loss,
    make_mesh,
    make_plan,
    parameter_shardings,
    total_bytes,
)
from benchmarks.rows import print_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compiled."""

    stages: int = 4
    """Pipeline stages (P)."""
    topology: str = "v5e:2x2"
    """Described TPU for the second table; has as many chips as there are stages."""
    width: int = 512
    """Width of the residual stream in the second table (D)."""
    context: int = 512
    """Tokens of a microbatch's one sequence in the second table."""
    json: bool = False
    """Print one JSON line a row instead of tables."""


TRAFFIC = ((1, 8), (2, 8), (3, 12), (4, 8))
"""Virtual stages and microbatches of the first table."""
MEMORY = (8, 32)
"""Microbatches of the second, with two virtual stages."""


def gradient_step(plan: Plan, context: int) -> tuple[Any, tuple]:
    """Returns `params, tokens -> loss and gradients` and shapes to compile it with."""
    loss = make_loss(plan)

    def mean(params, tokens_bt):
        nats, weight = loss(params, tokens_bt)
        return nats / weight

    abstract = abstract_params(plan)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        parameter_shardings(abstract, plan.mesh),
    )
    tokens_bt = jax.ShapeDtypeStruct(
        (plan.microbatches * plan.mesh.shape["data"], context + 1),
        jnp.int32,
        sharding=NamedSharding(plan.mesh, PartitionSpec("data")),
    )
    return jax.value_and_grad(mean), (params, tokens_bt)


def main(settings: Settings) -> None:
    """Counts and prints."""
    # Read when the TPU compiler is loaded: there is no TPU to ask, and others may be compiling.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_MIN_LOG_LEVEL": "3"}
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", settings.stages)
    title = f"Block representations that each of {settings.stages} stages sends in a training step"
    print_rows(title, traffic_rows(settings), as_json=settings.json)
    if importlib.util.find_spec("libtpu") is None:
        Console(stderr=True).print(
            "No TPU compiler here; for the memory of each executor: uv run --group aot python -m"
            " benchmarks.pipeline_traffic"
        )
        return
    title = (
        f"Temporary memory of a training step on {settings.topology}, by the TPU compiler's plan"
    )
    print_rows(title, memory_rows(settings), as_json=settings.json)


def traffic_rows(settings: Settings) -> list[dict]:
    """One row for each number of virtual stages, with blocks of one layer, one to a chunk."""
    rows = []
    mesh = make_mesh(MeshConfig(stage=settings.stages), jax.devices()[: settings.stages])
    context, width = 4, 8
    for virtual_stages, microbatches in _track(TRAFFIC, "exchange"):
        config = ModelConfig(
            vocab_size=16,
            width=width,
            num_layers=settings.stages * virtual_stages,
            num_heads=2,
            feed_forward_width=16,
            block_size=2,
        )
        row: dict[str, Any] = {"V": virtual_stages, "M": microbatches}
        for exchange in ("cached", "naive"):
            plan = make_plan(
                config,
                mesh,
                PipelineConfig(
                    virtual_stages=virtual_stages, microbatches=microbatches, exchange=exchange
                ),
            )
            step, arguments = gradient_step(plan, context)
            block = context * width * 4
            traced = jax.jit(step).trace(*arguments)
            found = {
                "jaxpr": collectives_of_jaxpr(traced.jaxpr),
                "hlo": collectives_of_hlo(traced.lower().compile().as_text() or ""),
            }
            row["ticks"] = plan.schedule.ticks_each_way
            row[exchange] = plan.payload.exchanged_blocks(plan.schedule)
            for name, ones in found.items():
                exchanged = total_bytes(ones, "collective-permute")
                row[f"{exchange}_{name}"] = exchanged / block
        row["naive_to_cached"] = row["naive_jaxpr"] / row["cached_jaxpr"]
        rows.append(row)
    return rows


def memory_rows(settings: Settings) -> list[dict]:
    """One row for each executor; temporary memory in MiB and in block representations."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=settings.topology)
    mesh = make_mesh(MeshConfig(stage=settings.stages), topology.devices)
    config = ModelConfig(
        vocab_size=512,
        width=settings.width,
        num_layers=2 * settings.stages,
        num_heads=settings.width // 128,
        feed_forward_width=2 * settings.width,
        block_size=2,
        compute_dtype="bfloat16",
        attention="splash" if settings.context % 128 == 0 else "xla",
    )
    block = settings.context * settings.width * 2
    rows = []
    for executor in _track(EXECUTORS, "memory"):
        row: dict[str, Any] = {"executor": executor}
        for microbatches in MEMORY:
            plan = make_plan(
                config,
                mesh,
                PipelineConfig(virtual_stages=2, microbatches=microbatches, executor=executor),
            )
            step, arguments = gradient_step(plan, settings.context)
            compiled = jax.jit(step).lower(*arguments).compile()
            analysis: Any = compiled.memory_analysis()
            temporary = analysis.temp_size_in_bytes
            row[f"M{microbatches}_mib"] = temporary / 2**20
            row[f"M{microbatches}_blocks"] = round(temporary / block)
        row["growth"] = row[f"M{MEMORY[1]}_mib"] / row[f"M{MEMORY[0]}_mib"]
        rows.append(row)
    return rows


def _track(items, description):
    return track(items, description, console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
