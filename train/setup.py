"""The model, optimizer and first state of a run, and what a finished one left."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from attnres_jax import ModelConfig, TransformerLM, retrofit
from train import step as step_lib
from train.checkpoint import Checkpoints
from train.config import Config, from_json
from train.optimizer import make_optimizer

# What a model may choose for itself when its weights come from another.
_NEW_IN_A_RETROFIT = (
    "residual",
    "block_size",
    "reads_per_group",
    "embedding_std",
    "compute_dtype",
    "attention",
    "float32_partial_sum",
    "remat",
)


class Setup(NamedTuple):
    """Model and optimizer of a configuration, described without computing anything."""

    mesh: jax.sharding.Mesh
    graphdef: Any
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    template: step_lib.TrainState
    """Shapes, dtypes and shardings of the state."""


def abstract_setup(config: Config) -> Setup:
    """Builds everything about model and optimizer that needs no arithmetic.

    Raises:
        ValueError: A parameter has no optimizer group.
    """
    mesh = step_lib.data_mesh()
    optimizer, schedule = make_optimizer(config.optimizer, config.steps)
    model = nnx.eval_shape(lambda: TransformerLM(config.model, rngs=nnx.Rngs(config.seed)))
    replicated = NamedSharding(mesh, PartitionSpec())
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated),
        jax.eval_shape(lambda: _random_state(config, optimizer)),
    )
    return Setup(mesh, nnx.graphdef(model), optimizer, schedule, template)


def first_state(config: Config, setup: Setup) -> tuple[step_lib.TrainState, list[str]]:
    """Makes the state before the first step, replicated over the mesh.

    Returns:
        The state, with random weights or those of `config.retrofit_from`; and the paths of the
        leaves that a retrofit added.

    Raises:
        ValueError: There is nothing to retrofit, or it does not fit.
        CheckpointError: The checkpoint to retrofit cannot be read.
    """
    replicated = NamedSharding(setup.mesh, PartitionSpec())
    if not config.retrofit_from:
        make = jax.jit(lambda: _random_state(config, setup.optimizer), out_shardings=replicated)
        return make(), []
    old, _, params = load_run(config.retrofit_from)
    changes = {name: getattr(config.model, name) for name in _NEW_IN_A_RETROFIT}
    _, new_params, added = retrofit(old.model, nnx.State(params), **changes)
    make = jax.jit(
        lambda params: step_lib.initial_state(params, setup.optimizer), out_shardings=replicated
    )
    return make(nnx.to_pure_dict(new_params)), added


def check_retrofit(config: Config) -> None:
    """Raises ValueError unless `config.retrofit_from` holds a run whose weights fit the model."""
    if not config.model.retrofit:
        raise ValueError(
            "retrofit_from needs --model.retrofit, with which the new model's first loss is the old"
            " model's"
        )
    old = _newest_config(config.retrofit_from)[0].model
    changes: dict[str, Any] = {name: getattr(config.model, name) for name in _NEW_IN_A_RETROFIT}
    wanted = dataclasses.replace(old, **changes, retrofit=True)
    for field in dataclasses.fields(ModelConfig):
        before, now = getattr(wanted, field.name), getattr(config.model, field.name)
        if before != now:
            raise ValueError(
                f"{config.retrofit_from} cannot be retrofitted: model.{field.name} is {before}"
                f" there and {now} here"
            )
    if old.residual != "standard":
        raise ValueError(
            f"{config.retrofit_from} cannot be retrofitted: its residual is {old.residual!r},"
            ' not "standard"'
        )


def load_run(workdir: str) -> tuple[Config, Any, Any]:
    """Restores the newest checkpoint of a run.

    Returns:
        The configuration, the model's definition and its parameters.

    Raises:
        ValueError: The folder holds no checkpoint, or one of another version.
        CheckpointError: No checkpoint can be read.
    """
    config, checkpoints = _newest_config(workdir)
    setup = abstract_setup(config)
    state = checkpoints.restore(setup.template, None)
    checkpoints.close()
    assert state is not None
    return config, setup.graphdef, state.params


def _newest_config(workdir: str) -> tuple[Config, Checkpoints]:
    checkpoints = Checkpoints(workdir, read_only=True)
    description = checkpoints.newest_description()
    if description is None:
        raise ValueError(f"{workdir} holds no checkpoint; name the folder of a run")
    return from_json(description["settings"]), checkpoints


def _random_state(config: Config, optimizer: optax.GradientTransformation) -> step_lib.TrainState:
    model = TransformerLM(config.model, rngs=nnx.Rngs(config.seed))
    params = nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])
    return step_lib.initial_state(params, optimizer)
