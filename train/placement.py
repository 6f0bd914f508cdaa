"""Where the state of a run and its batches lie on the mesh, while training and in checkpoints.

With several stages, training keeps the parameters of layers in pipeline layout: a stage has those
of its chunks. Checkpoints, evaluation and sampling have them in layer order, which is the same for
every mesh; there, the devices of a pipeline split the width as those of "fsdp" do, so that no
device ever holds what it would not hold in training. Moments lie as the parameters they belong to.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnres_jax.parallel import (
    BATCH_AXES,
    RULES,
    Plan,
    axis_letters,
    check_divisible,
    make_mesh,
    make_plan,
    names_of,
    partition_spec,
    to_layer_order,
    to_pipeline,
)
from train.config import Config

type Rules = dict[str, tuple[str, ...]]


class Placement(NamedTuple):
    """A mesh, and how the model is cut for it.

    Attributes:
        mesh: All devices of all processes, on five axes.
        plan: How sub-layers and microbatches go over the stages; None for a single stage, which
            trains `TransformerLM` as it is.
    """

    mesh: Mesh
    plan: Plan | None


def make_placement(config: Config, devices: Sequence[Any] | None = None) -> Placement:
    """Lays out the devices and cuts the model.

    Args:
        config: The run.
        devices: All of all processes by default; or those of a described topology.

    Raises:
        ValueError: The mesh does not fit the devices, the model or the batch.
    """
    mesh = make_mesh(config.mesh, devices)
    plan = make_plan(config.model, mesh, config.pipeline) if mesh.shape["stage"] > 1 else None
    placement = Placement(mesh, plan)
    _check_batch(config, placement)
    return placement


def _check_batch(config: Config, placement: Placement) -> None:
    shape, plan = placement.mesh.shape, placement.plan
    factors = {
        "optimizer.accumulate": config.optimizer.accumulate,
        "pipeline.microbatches": plan.microbatches if plan else 1,
        "mesh.data": shape["data"],
        "mesh.fsdp": shape["fsdp"],
    }
    product = 1
    for size in factors.values():
        product *= size
    if config.batch_size % product:
        over = " times ".join(f"{name}={size}" for name, size in factors.items() if size > 1)
        below = config.batch_size // product * product
        near = f"{below} or {below + product}" if below else f"{product}"
        raise ValueError(
            f"batch_size: {config.batch_size} sequences cannot be shared evenly by {over}; the"
            f" nearest that can: {near}"
        )
    parts = shape["sequence"] * (shape["tensor"] if plan else 1)
    if config.context % parts:
        over = f"mesh.sequence={shape['sequence']}"
        over += f" times mesh.tensor={shape['tensor']}" if plan else ""
        raise ValueError(
            f"context: {config.context} tokens cannot be shared evenly by {over}; make it a"
            f" multiple of {parts}"
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays whose first axis counts sequences; every stage has those of its replica."""
    return NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Axes of the mesh that split a batch."""
    return tuple(name for name in BATCH_AXES if name in mesh.axis_names)


def stored_shardings(state: Any, mesh: Mesh) -> Any:
    """Shardings of a state, or of parameters, in layer order.

    Raises:
        ValueError: An axis of a parameter is not a multiple of the devices that split it.
    """
    rules = _stored_rules(mesh)

    def sharding(path, leaf):
        names = parameter_names(path)
        if names is None:
            return NamedSharding(mesh, PartitionSpec())
        letters = _letters(names).replace("cp", "")
        check_divisible(f"parameter {'.'.join(names)}", letters, leaf.shape, mesh)
        width = leaf.shape[letters.index("d")]
        return NamedSharding(mesh, _spec(names, letters, _for_width(rules, width, mesh)))

    return jax.tree_util.tree_map_with_path(sharding, state)


def whole_vectors(params: Any, mesh: Mesh) -> Any:
    """Gathers embeddings, queries and gains over the devices that split the width.

    Kernels stay as they are until they are used: with these whole, the compiler keeps activations
    split by sequences and gathers a kernel, and not the other way round.
    """
    rules = _stored_rules(mesh) | {"d": ()}

    def gather(path, leaf):
        names = parameter_names(path)
        if names is None or "kernel" in names[-1]:
            return leaf
        spec = _spec(names, _letters(names).replace("cp", ""), rules)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(gather, params)


def training_shardings(state: Any, placement: Placement) -> Any:
    """Shardings of a state in the layout that it is trained in."""
    if placement.plan is None:
        return stored_shardings(state, placement.mesh)

    def sharding(path, _):
        names = parameter_names(path)
        spec = PartitionSpec() if names is None else _spec(names, _letters(names), RULES)
        return NamedSharding(placement.mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, state)


def to_training(state: Any, placement: Placement) -> Any:
    """Puts a state, or parameters, in layer order into the layout that it is trained in."""
    return _convert(state, placement, to_pipeline)


def to_stored(state: Any, placement: Placement) -> Any:
    """Puts a state, or parameters, into layer order, bit for bit; to be called in `jax.jit`."""
    if placement.plan is None:
        return state
    mesh = placement.mesh
    rules = _stored_rules(mesh) | {"p": ()}

    def spread(path, leaf):
        """Exchanges a split of stages for one of the width while chunks are still apart."""
        names = parameter_names(path)
        if names is None:
            return leaf
        letters = _letters(names)
        width = leaf.shape[letters.index("d")]
        spec = _spec(names, letters, _for_width(rules, width, mesh))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    state = jax.tree_util.tree_map_with_path(spread, state)
    state = _convert(state, placement, to_layer_order)
    return jax.lax.with_sharding_constraint(state, stored_shardings(state, mesh))


def _convert(state: Any, placement: Placement, change: Callable[..., Any]) -> Any:
    if placement.plan is None:
        return state
    change = partial(change, partition=placement.plan.partition)

    def convert(path, leaf):
        names = parameter_names(path)
        if names is None:
            return leaf
        for name in reversed(names):
            leaf = {name: leaf}
        return jax.tree.leaves(change(leaf))[0]

    return jax.tree_util.tree_map_with_path(convert, state)


_MODULES = frozenset(
    {"attention", "attention_norm", "feed_forward", "feed_forward_norm", "reads"}
    | {"final_read", "final_norm", "embedding_table", "head_kernel"}
)


def parameter_names(path: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Names of the parameter that a leaf of a state is or belongs to, such as a moment; or None."""
    names = names_of(path)
    starts = [i for i, name in enumerate(names) if name in _MODULES]
    return names[starts[-1] :] if starts else None


def _letters(names: tuple[str, ...]) -> str:
    return axis_letters(tuple(jax.tree_util.DictKey(name) for name in names))


def _spec(names: tuple[str, ...], letters: str, rules: Rules) -> PartitionSpec:
    return partition_spec(letters, name=f"parameter {'.'.join(names)}", rules=rules)


def _stored_rules(mesh: Mesh) -> Rules:
    """In layer order a pipeline's devices split the width as well."""
    rules = RULES | {"d": ("stage", "fsdp")}
    # Meshes of fewer axes serve too.
    return {
        letter: tuple(axis for axis in axes if axis in mesh.axis_names)
        for letter, axes in rules.items()
    }


def _for_width(rules: Rules, width: int, mesh: Mesh) -> Rules:
    """Leaves "stage" out where it does not divide the width."""
    devices = 1
    for axis in rules["d"]:
        devices *= mesh.shape[axis]
    if width % devices == 0:
        return rules
    return rules | {"d": tuple(axis for axis in rules["d"] if axis != "stage")}
