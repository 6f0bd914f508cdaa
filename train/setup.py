"""The model, optimizer and first state of a run, and what a finished one left."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from attnres_jax import ModelConfig, TransformerLM, retrofit
from attnres_jax.parallel import MeshConfig
from train import step as step_lib
from train.checkpoint import Checkpoints
from train.config import Config, from_json
from train.diagnostics import make_diagnostics_step
from train.optimizer import make_optimizer
from train.placement import (
    Placement,
    make_placement,
    stored_shardings,
    to_stored,
    to_training,
    training_shardings,
)

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


# One function for all calls, so that saving compiles once.
_to_stored = jax.jit(to_stored, static_argnames="placement")


class Setup(NamedTuple):
    """Model and optimizer of a configuration, described without computing anything."""

    placement: Placement
    graphdef: Any
    evaluation_graphdef: Any
    """Of the same parameters; what it may not do as training does is done otherwise."""
    parts: int
    """Parts of a batch that follow each other: of accumulation, and the microbatches of each."""
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    template: step_lib.TrainState
    """Shapes, dtypes and shardings of the state in training."""
    stored: step_lib.TrainState
    """The same in checkpoints, in layer order."""

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """All devices of all processes."""
        return self.placement.mesh

    def make_train_step(self, accumulate: int) -> Any:
        """The step for this mesh; see `train.step.make_train_step`."""
        return step_lib.make_train_step(
            self.graphdef,
            self.optimizer,
            self.schedule,
            self.mesh,
            accumulate,
            plan=self.placement.plan,
            state_shardings=_shardings(self.template),
        )

    def make_evaluation_step(self) -> Any:
        """The sums over a batch; see `train.step.make_evaluation_step`."""
        return step_lib.make_evaluation_step(
            self.evaluation_graphdef,
            self.mesh,
            self.parts,
            to_layer_order=partial(to_stored, placement=self.placement),
        )

    def make_diagnostics_step(self) -> Any:
        """The measurement of a batch; see `train.diagnostics.make_diagnostics_step`."""
        return make_diagnostics_step(
            self.evaluation_graphdef,
            self.mesh,
            to_layer_order=partial(to_stored, placement=self.placement),
        )

    def to_stored(self, state: Any) -> Any:
        """A state, or its parameters, as a checkpoint has it."""
        if self.placement.plan is None:
            return state
        return _to_stored(state, placement=self.placement)

    def to_training(self, state: step_lib.TrainState) -> step_lib.TrainState:
        """The state of a checkpoint as it is trained."""
        if self.placement.plan is None:
            return state
        change = jax.jit(
            partial(to_training, placement=self.placement),
            out_shardings=_shardings(self.template),
        )
        return change(state)


def abstract_setup(config: Config, devices: Sequence[Any] | None = None) -> Setup:
    """Builds everything about model and optimizer that needs no arithmetic.

    Args:
        config: The run.
        devices: All of all processes by default; or those of a described topology.

    Raises:
        ValueError: The mesh does not fit devices, model or batch, or a parameter has no optimizer
            group.
    """
    placement = make_placement(config, devices)
    optimizer, schedule = make_optimizer(config.optimizer, config.steps)
    plan = placement.plan
    parts = config.optimizer.accumulate * (plan.microbatches if plan else 1)
    stored = jax.eval_shape(lambda: _random_state(config, optimizer))
    template = jax.eval_shape(partial(to_training, placement=placement), stored)
    return Setup(
        placement,
        _graphdef(config.model),
        _graphdef(_evaluation_model(config, config.batch_size // parts, placement)),
        parts,
        optimizer,
        schedule,
        _with_shardings(template, training_shardings(template, placement)),
        _with_shardings(stored, stored_shardings(stored, placement.mesh)),
    )


def _graphdef(model: ModelConfig) -> Any:
    return nnx.graphdef(nnx.eval_shape(lambda: TransformerLM(model, rngs=nnx.Rngs(0))))


def _evaluation_model(config: Config, rows: int, placement: Placement) -> ModelConfig:
    """The model on a mesh whose stages all do the same, with so many sequences at once."""
    if placement.plan is None or rows % placement.mesh.size == 0:
        return config.model
    # Outside a pipeline, splash attention spreads whole sequences over all devices.
    return dataclasses.replace(config.model, attention="xla")


def _with_shardings(state: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )


def _shardings(template: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, template)


def first_state(config: Config, setup: Setup) -> tuple[step_lib.TrainState, list[str]]:
    """Makes the state before the first step where it belongs: no device ever holds all of it.

    Returns:
        The state, with random weights or those of `config.retrofit_from`; and the paths of the
        leaves that a retrofit added.

    Raises:
        ValueError: There is nothing to retrofit, or it does not fit.
        CheckpointError: The checkpoint to retrofit cannot be read.
    """
    shardings = _shardings(setup.template)
    if not config.retrofit_from:

        def make():
            return to_training(_random_state(config, setup.optimizer), setup.placement)

        return jax.jit(make, out_shardings=shardings)(), []
    old, _, params = load_run(config.retrofit_from)
    changes = {name: getattr(config.model, name) for name in _NEW_IN_A_RETROFIT}
    _, new_params, added = retrofit(old.model, nnx.State(params), **changes)

    def extend(params):
        return to_training(step_lib.initial_state(params, setup.optimizer), setup.placement)

    params = jax.device_get(nnx.to_pure_dict(new_params))
    return jax.jit(extend, out_shardings=shardings)(params), added


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
    setup = abstract_setup(_on_any_devices(config))
    state = checkpoints.restore(setup.stored, None)
    checkpoints.close()
    assert state is not None
    return config, setup.graphdef, state.params


def _on_any_devices(config: Config) -> Config:
    """The same model for whatever devices are here, each of which gets all of it."""
    alone = dataclasses.replace(config.optimizer, accumulate=1)
    return dataclasses.replace(
        config,
        mesh=MeshConfig(),
        optimizer=alone,
        batch_size=jax.device_count() * config.data.shards,
    )


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
