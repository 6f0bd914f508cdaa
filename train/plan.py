"""Compiles the training step of a run for a described pod or cluster, with none of it at hand.

    uv run --group aot python -m train.plan --config=configs/dense_7b_v5p.py --topology=v5p:4x4x4

Says what every device keeps, against what it has, and what the step computes and exchanges; with
stages, also against the formulas of the pipeline. The compiler is the real one: a step that
compiles here compiles there. Nothing is run or timed: the least time of a step is a bound from the
makers' figures. Exit codes: 0 it fits, 1 it does not fit, 2 a setting is refused.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import rich.console
import rich.progress
import tyro

from attnres_jax.parallel import Plan, collectives_of_hlo, collectives_of_jaxpr, total_bytes
from train.cli import parse_run
from train.config import Config
from train.cost import (
    bounds,
    count_by_kind,
    memory_of,
    model_flops,
    products,
    refused_memory,
)
from train.placement import batch_sharding
from train.plan_report import gib, print_report
from train.setup import Setup, abstract_setup
from train.topology import Topology, described_devices, parse_topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommandLine:
    """Compiles the training step of a run for chips that are not there, and says what it takes."""

    config: pathlib.Path
    """Python file whose get_config() gives a train.config.Config."""
    topology: str
    """What to compile for: a TPU slice such as v5p:4x4x8, or GPUs such as h200:64."""
    json: bool = False
    """Print one JSON object instead of tables."""
    run: Annotated[Config, tyro.conf.arg(name="")]


class DoesNotFitError(RuntimeError):
    """A device of the topology has less memory than the step needs."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code.

    Args:
        arguments: Those after `python -m train.plan`.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", force=True)
    # Devices are described; this machine's own would only be in the way.
    jax.config.update("jax_platforms", "cpu")
    try:
        prog = "python -m train.plan"
        command_line = parse_run(PlanCommandLine, arguments, prog=prog, topology=tyro.MISSING)
        topology = parse_topology(command_line.topology)
        with _progress() as show:
            report = plan(command_line.run, topology, show)
    except DoesNotFitError as error:
        return _fail(error, 1)
    except (ValueError, NotImplementedError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return 130
    if command_line.json:
        print(json.dumps(report))
    else:
        print_report(report)
    excess = report["memory"]["excess"]
    if excess:
        used, capacity = report["memory"]["total"], report["memory"]["capacity"]
        return _fail(DoesNotFitError(_too_much(command_line.run, topology, used, capacity)), 1)
    return 0


def plan(config: Config, topology: Topology, show: Callable[[str], None]) -> dict[str, Any]:
    """Compiles the step and reads what the compiler planned.

    Args:
        config: The run.
        topology: What to compile for.
        show: Told what is being done.

    Returns:
        Plain data, as `--json` prints it.

    Raises:
        ValueError: The compiler is missing or a setting does not fit the topology.
        DoesNotFitError: The compiler found no plan within the memory of a device.
    """
    show("describing devices")
    devices = described_devices(topology)
    config = _as_there(config, topology)
    setup = abstract_setup(config, devices)
    chips_in_a_device = topology.chips / len(devices)
    capacity = round(topology.chip.memory * chips_in_a_device)
    _check_state(config, topology, setup, capacity)

    shape = config.batch_size, config.context + 1
    tokens_bt = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(setup.mesh))
    with jax.set_mesh(setup.mesh):
        show("tracing the step")
        traced = setup.make_train_step(config.optimizer.accumulate).trace(
            setup.template, {"tokens": tokens_bt}
        )
        lowered = traced.lower()
        show(f"compiling for {len(devices)} x {devices[0].device_kind}")
        start = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            refused = refused_memory(str(error))
            if refused is None:
                raise
            raise DoesNotFitError(_too_much(config, topology, *refused, "at least ")) from error
        seconds = time.perf_counter() - start

    show("counting")
    memory = memory_of(compiled, capacity)
    written = collectives_of_jaxpr(traced.jaxpr)
    collectives = count_by_kind(collectives_of_hlo(compiled.as_text() or ""))
    flops = products(traced.jaxpr) / len(devices)
    analysis: Any = compiled.cost_analysis() or {}
    model = config.model
    tokens = config.batch_size * config.context
    heads_width = model.num_heads * (model.head_width or model.width // model.num_heads)
    needed = model_flops(setup.stored.params, tokens, model.num_layers, heads_width, config.context)
    limits = bounds(
        topology.chip,
        flops=flops,
        # The whole state is read and written, whatever else the compiler has counted.
        memory_bytes=max(float(analysis.get("bytes accessed", 0.0)), 2.0 * memory.state),
        collectives=collectives,
        chips_in_a_device=chips_in_a_device,
    )
    bound = max(limits.values())
    return {
        "topology": topology.name,
        "devices": len(devices),
        "mesh": dict(setup.mesh.shape),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(setup.stored.params)),
        "tokens": tokens,
        "compile_seconds": seconds,
        "memory": dataclasses.asdict(memory) | {"total": memory.total, "excess": memory.excess},
        "flops": {"model": needed / len(devices), "program": flops},
        "collectives": collectives,
        "pipeline": _pipeline(config, setup.placement.plan, written),
        "bound": limits
        | {
            "seconds": bound,
            "tokens_per_second": tokens / bound,
            "model_flops_utilisation": needed
            / len(devices)
            / (topology.chip.flops * chips_in_a_device)
            / bound,
        },
    }


def _as_there(config: Config, topology: Topology) -> Config:
    """What the model would choose on that accelerator, where it asks for the default device."""
    model = config.model
    if topology.is_tpu and model.attention is None:
        splash = config.context % 128 == 0 and config.mesh.sequence == 1
        model = dataclasses.replace(model, attention="splash" if splash else "xla")
    return dataclasses.replace(config, model=model)


def _pipeline(config: Config, plan: Plan | None, written: list[Any]) -> dict[str, Any] | None:
    if plan is None:
        return None
    shape, schedule, payload = plan.mesh.shape, plan.schedule, plan.payload
    rows = config.batch_size // (
        plan.microbatches * config.optimizer.accumulate * shape["data"] * shape["fsdp"]
    )
    times = config.optimizer.accumulate
    tokens = config.context // (shape["sequence"] * shape["tensor"])
    values = rows * tokens * config.model.width
    itemsize = jnp.dtype(config.model.compute_dtype).itemsize
    partial_sum = jnp.dtype(jnp.float32).itemsize if config.model.float32_partial_sum else itemsize
    formula = payload.exchanged_bytes(schedule, values * itemsize, values * partial_sum)
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "virtual_stages": schedule.virtual_stages,
        "microbatches": schedule.microbatches,
        "ticks_each_way": schedule.ticks_each_way,
        "bubble": schedule.bubble_fraction,
        "blocks_in_a_hop": payload.blocks,
        "exchanged_bytes_formula": formula * times,
        "exchanged_bytes_program": total_bytes(written, "collective-permute"),
    }


def _check_state(config: Config, topology: Topology, setup: Setup, capacity: int) -> None:
    """Refuses without compiling what even the state alone does not fit."""
    state = 0
    for leaf in jax.tree.leaves(setup.template):
        size = leaf.dtype.itemsize
        for length in leaf.sharding.shard_shape(leaf.shape):
            size *= length
        state += size
    if state > capacity:
        raise DoesNotFitError(
            "parameters and moments alone: " + _too_much(config, topology, state, capacity)
        )


def _too_much(
    config: Config, topology: Topology, used: float, capacity: float, least: str = ""
) -> str:
    mesh = config.mesh
    pipelined = mesh.stage > 1
    knobs = [
        f"more mesh.fsdp (now {mesh.fsdp}), mesh.tensor ({mesh.tensor}) or mesh.stage"
        f" ({mesh.stage})",
    ]
    if config.model.remat != "full":
        knobs.append(f"model.remat=full (now {config.model.remat})")
    if pipelined and config.pipeline.executor != "one_f_one_b":
        knobs.append(f"pipeline.executor=one_f_one_b (now {config.pipeline.executor})")
    if pipelined:
        knobs.append("more pipeline.microbatches, of fewer sequences each")
    else:
        knobs.append(f"more optimizer.accumulate (now {config.optimizer.accumulate})")
    knobs.append(f"a smaller batch_size (now {config.batch_size}) or context ({config.context})")
    return (
        f"a device of {topology.name} has {gib(capacity)} and the step takes {least}{gib(used)},"
        f" {gib(used - capacity)} too much; what helps: {'; '.join(knobs)}"
    )


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    """Shows what is being done, and for how long, on stderr."""
    progress = rich.progress.Progress(
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeElapsedColumn(),
        console=rich.console.Console(stderr=True),
        transient=True,
    )
    with progress:
        task = progress.add_task("", total=None)
        yield lambda what: progress.update(task, description=what)


def _fail(error: Exception, code: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
