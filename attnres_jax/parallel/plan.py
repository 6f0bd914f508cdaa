"""A model cut for a mesh: which stage has which sub-layers, and how a batch goes through them."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from attnres_jax.models.config import ModelConfig
from attnres_jax.models.transformer import TransformerLM
from attnres_jax.parallel import cross_stage, pipeline, schedules
from attnres_jax.parallel.cross_stage import EXCHANGES, Payload
from attnres_jax.parallel.errors import check_choice
from attnres_jax.parallel.layout import to_pipeline
from attnres_jax.parallel.partition import Partition
from attnres_jax.parallel.schedules import Schedule, padded_microbatches
from attnres_jax.parallel.sharding import axis_letters, check_divisible, names_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a batch goes through the stages.

    Raises:
        ValueError: An unknown name, or a number below one.
    """

    virtual_stages: int = 1
    """Chunks of each stage (V): divides the idle share of the time by about as much."""
    microbatches: int | None = None
    """Parts of a batch (M); None takes one for each stage. Filled up to a multiple of the stages
    with microbatches of zero weight."""
    executor: str = "two_scan"
    """two_scan keeps the sources of all microbatches and spreads the head over the stages;
    one_f_one_b keeps those of two microbatches for each stage; autodiff is for comparison."""
    exchange: str = "cached"
    """cached sends each source once to each stage; naive sends all with every hop, for
    comparison."""

    def __post_init__(self):
        """Checks each setting by itself."""
        for name in ("virtual_stages", "microbatches"):
            value = getattr(self, name)
            if value is None and name == "microbatches":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"pipeline.{name}: expected a whole number of at least 1, got {value!r}"
                )
        check_choice("pipeline.executor", self.executor, pipeline.EXECUTORS)
        check_choice("pipeline.exchange", self.exchange, EXCHANGES)


class Plan(NamedTuple):
    """A model, cut for a mesh; plain data besides the mesh.

    Attributes:
        config: The model.
        settings: How a batch goes through the stages.
        mesh: From `make_mesh`.
        partition: Which chunk has which sub-layers and blocks.
        schedule: Who does what at each tick.
        payload: What each hop carries.
    """

    config: ModelConfig
    settings: PipelineConfig
    mesh: Mesh
    partition: Partition
    schedule: Schedule
    payload: Payload

    @property
    def microbatches(self) -> int:
        """Parts of a batch before any of zero weight are added."""
        return self.settings.microbatches or self.partition.stages


def make_plan(config: ModelConfig, mesh: Mesh, settings: PipelineConfig = PipelineConfig()) -> Plan:
    """Cuts a model for a mesh.

    Args:
        config: The model, of any residual.
        mesh: From `make_mesh`.
        settings: How a batch goes through the stages.

    Raises:
        ValueError: The model has fewer sub-layers than chunks, or a parameter cannot be split
            evenly; raised before anything is compiled.
    """
    if config.attention == "splash" and mesh.shape["sequence"] > 1:
        raise ValueError(
            'attention="splash" needs whole sequences on a device; take attention="xla", or'
            f" sequence=1 instead of {mesh.shape['sequence']} in the mesh"
        )
    stages = mesh.shape["stage"]
    block_size = {"standard": None, "full": 1, "block": config.block_size}[config.residual]
    partition = Partition(2 * config.num_layers, block_size, stages, settings.virtual_stages)
    one_f_one_b = settings.executor == "one_f_one_b"
    schedule = Schedule(
        stages,
        settings.virtual_stages,
        padded_microbatches(settings.microbatches or stages, stages),
        schedules.ORDERS[one_f_one_b],
    )
    plan = Plan(
        config,
        settings,
        mesh,
        partition,
        schedule,
        cross_stage.payload(partition, settings.exchange),
    )
    for path, leaf in jax.tree_util.tree_flatten_with_path(abstract_params(plan))[0]:
        name = f"parameter {'.'.join(names_of(path))}"
        check_divisible(name, axis_letters(path), leaf.shape, mesh)
    return plan


def new_params(plan: Plan, seed: int | jax.Array = 0) -> dict[str, Any]:
    """Parameters of a new model in pipeline layout; to be called by `sharded_init`."""
    model = TransformerLM(plan.config, rngs=nnx.Rngs(seed))
    return to_pipeline(nnx.to_pure_dict(nnx.state(model, nnx.Param)), plan.partition)


def abstract_params(plan: Plan) -> dict[str, Any]:
    """Shapes of the parameters in pipeline layout."""
    return jax.eval_shape(partial(new_params, plan))


def check_batch(plan: Plan, batch_size: int, context: int) -> None:
    """Raises ValueError unless microbatches and devices get equal shares of a batch."""
    shape = plan.mesh.shape
    rows = plan.microbatches * shape["data"] * shape["fsdp"]
    if batch_size % rows:
        raise ValueError(
            f"a batch of {batch_size} sequences cannot be split evenly over microbatches="
            f"{plan.microbatches} times data={shape['data']} times fsdp={shape['fsdp']}; make it a"
            f" multiple of {rows}"
        )
    parts = shape["sequence"] * shape["tensor"]
    if context % parts:
        raise ValueError(
            f"a context of {context} tokens cannot be split evenly over sequence="
            f"{shape['sequence']} times tensor={shape['tensor']}; make it a multiple of {parts}"
        )
