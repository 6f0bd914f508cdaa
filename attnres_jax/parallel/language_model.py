"""`TransformerLM` on a mesh: embedding, pipeline, head and loss in one manual region.

The region is manual over every mesh axis, so that the sums of weight gradients over data, sequence
and stages happen once, after the last tick, and never inside the loop: they are the transpose of
handing each device the same parameters. What a device returns is its own part of the loss, and the
loss the sum over all devices. So a collective's transpose is what it would be for unrelated values,
as `check_vma=False` takes it to be.

Outside sub-layers, tokens are split over "sequence" and "tensor". A sub-layer gathers its tokens
over "tensor", computes its share of heads or feed-forward width, and scatters the sum back; for
attention, keys and values are gathered over "sequence" as well.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnres_jax.models.config import ModelConfig
from attnres_jax.models.sublayers import KINDS
from attnres_jax.models.transformer import TransformerLM
from attnres_jax.ops import Bank, depth_attention, rms_norm
from attnres_jax.parallel import cross_stage, pipeline, schedules
from attnres_jax.parallel.chunk import Program, run_chunk
from attnres_jax.parallel.cross_stage import EXCHANGES, Payload
from attnres_jax.parallel.errors import check_choice
from attnres_jax.parallel.layout import to_pipeline
from attnres_jax.parallel.mesh import AXES
from attnres_jax.parallel.partition import Partition
from attnres_jax.parallel.schedules import Schedule, padded_microbatches
from attnres_jax.parallel.sharding import (
    axis_letters,
    check_divisible,
    parameter_specs,
    partition_spec,
)

STACKED = (*KINDS, *(f"{kind}_norm" for kind in KINDS), "reads")


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
        config: The model; its residual is Full or Block.
        mesh: From `make_mesh`.
        settings: How a batch goes through the stages.

    Raises:
        ValueError: The model has no block representations to exchange or fewer sub-layers than
            chunks, or a parameter cannot be split evenly; raised before anything is compiled.
    """
    if config.residual == "standard":
        raise ValueError(
            'the pipeline exchanges block representations, which residual="standard" does not have;'
            ' take residual="block" or "full", or train without stages'
        )
    if config.attention == "splash" and mesh.shape["sequence"] > 1:
        raise ValueError(
            'attention="splash" needs whole sequences on a device; take attention="xla", or'
            f" sequence=1 instead of {mesh.shape['sequence']} in the mesh"
        )
    stages = mesh.shape["stage"]
    block_size = 1 if config.residual == "full" else config.block_size
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
        letters = axis_letters(path)
        check_divisible(f"parameter {'.'.join(key.key for key in path)}", letters, leaf.shape, mesh)
    return plan


def new_params(plan: Plan, seed: int | jax.Array = 0) -> dict[str, Any]:
    """Parameters of a new model in pipeline layout; to be called by `sharded_init`."""
    model = TransformerLM(plan.config, rngs=nnx.Rngs(seed))
    return to_pipeline(nnx.to_pure_dict(nnx.state(model, nnx.Param)), plan.partition)


def abstract_params(plan: Plan) -> dict[str, Any]:
    """Shapes of the parameters in pipeline layout."""
    return jax.eval_shape(partial(new_params, plan))


def make_loss(plan: Plan) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Builds the next-token loss of a batch, to be differentiated and compiled.

    Args:
        plan: From `make_plan`.

    Returns:
        `loss(params, tokens_bt, weights_bt=None) -> (nats, weight)`: the weighted sum of
        cross-entropies of tokens 1 to T given those before, and the sum of the weights, float32
        scalars; `tokens_bt` is int32 `[B, T + 1]` and `weights_bt` float32 `[B, T]`, ones if
        absent. `params` is in pipeline layout. It raises ValueError for a batch that cannot be
        split evenly.
    """
    mesh = plan.mesh
    data_spec = partition_spec("mbt", name="microbatches")
    region = jax.shard_map(
        partial(_region, plan),
        mesh=mesh,
        in_specs=(parameter_specs(abstract_params(plan)), data_spec, data_spec, data_spec),
        out_specs=PartitionSpec(),
        # Kernels written elsewhere, splash attention among them, do not say how their results vary.
        check_vma=False,
    )

    def loss(params, tokens_bt, weights_bt=None):
        batch_size, context = tokens_bt.shape[0], tokens_bt.shape[1] - 1
        _check_batch(plan, batch_size, context)
        if weights_bt is None:
            weights_bt = jnp.ones((batch_size, context), jnp.float32)
        arrays = tokens_bt[:, :-1], tokens_bt[:, 1:], weights_bt
        nats = region(params, *(_split_batch(plan, array) for array in arrays))
        return nats, jnp.sum(weights_bt)

    return loss


def _check_batch(plan: Plan, batch_size: int, context: int) -> None:
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


def _split_batch(plan: Plan, array_bt: jax.Array) -> jax.Array:
    """`[B, T]` -> `[m, b, t]`, zero in the microbatches that only fill up the last group."""
    # Row r goes to microbatch r % M, so that every device keeps the rows that it has.
    array_bmt = array_bt.reshape(-1, plan.microbatches, array_bt.shape[1])
    extra = plan.schedule.microbatches - plan.microbatches
    array_mbt = jnp.pad(array_bmt.swapaxes(0, 1), ((0, extra), (0, 0), (0, 0)))
    spec = partition_spec("mbt", name="microbatches")
    return jax.lax.with_sharding_constraint(array_mbt, NamedSharding(plan.mesh, spec))


def _region(plan: Plan, params, tokens_mbt, targets_mbt, weights_mbt):
    """What each device computes of the sum of the loss."""
    params = jax.tree_util.tree_map_with_path(partial(_gather_parameter, plan), params)
    stacked = {
        name: jax.tree.map(lambda leaf: jnp.squeeze(leaf, 1), params[name]) for name in STACKED
    }
    others = {name: leaf for name, leaf in params.items() if name not in STACKED}
    x_mbtd = _embed(plan, others["embedding_table"], tokens_mbt)
    program = _program(plan)
    run = pipeline.Pipeline(
        plan.partition,
        plan.schedule,
        plan.payload,
        partial(run_chunk, program),
        program.sum_dtype,
        communicates=program.communicates,
    )
    if plan.settings.executor == "one_f_one_b":

        def loss(params, values, targets):
            hidden_btd = _final_read(plan, params["final_read"], values)
            return _head_loss(plan, params, hidden_btd, *targets)

        nats = pipeline.one_f_one_b(run, loss, stacked, others, x_mbtd, (targets_mbt, weights_mbt))
    else:
        execute = getattr(pipeline, plan.settings.executor)
        hidden_mbtd = execute(
            run, partial(_final_read, plan), stacked, others["final_read"], x_mbtd
        )
        nats = _spread_head_loss(plan, others, hidden_mbtd, targets_mbt, weights_mbt)
    return jax.lax.psum(nats, AXES)


def _gather_parameter(plan: Plan, path, leaf):
    """The whole of a leaf that "fsdp" splits; its gradient is summed and split again."""
    letters = axis_letters(path)
    if plan.mesh.shape["fsdp"] > 1 and "d" in letters:
        leaf = jax.lax.all_gather(leaf, "fsdp", axis=letters.index("d"), tiled=True)
    return leaf


def _program(plan: Plan) -> Program:
    shape = plan.mesh.shape
    model = nnx.eval_shape(lambda: TransformerLM(plan.config, rngs=nnx.Rngs(0)))
    graphdefs = {kind: nnx.graphdef(getattr(model, kind)) for kind in KINDS}
    time_axis = "sequence" if shape["sequence"] > 1 else None

    def apply(kind, state, normed_btd):
        x = _gather_time(plan, normed_btd)
        sublayer = nnx.merge(graphdefs[kind], state)
        if kind == "attention":
            output = sublayer(x, time_axis=time_axis)
        else:
            output = sublayer(x)
        return _scatter_time(plan, output)

    communicates = shape["sequence"] > 1 or shape["tensor"] > 1
    return Program(plan.config, plan.partition, apply, communicates)


def _gather_time(plan: Plan, x_btd: jax.Array) -> jax.Array:
    """All tokens of this device's part of the sequence, from the devices along "tensor"."""
    if plan.mesh.shape["tensor"] == 1:
        return x_btd
    return jax.lax.all_gather(x_btd, "tensor", axis=1, tiled=True)


def _scatter_time(plan: Plan, x_btd: jax.Array) -> jax.Array:
    """Sums the shares of the devices along "tensor"; each keeps its tokens."""
    if plan.mesh.shape["tensor"] == 1:
        return x_btd
    return jax.lax.psum_scatter(x_btd, "tensor", scatter_dimension=1, tiled=True)


def _embed(plan: Plan, table_vd: jax.Array, tokens_mbt: jax.Array) -> jax.Array:
    """Looks tokens up in this device's rows of the table."""
    index = tokens_mbt - _first_token(plan, table_vd.shape[0])
    if plan.mesh.shape["tensor"] == 1:
        return table_vd[index].astype(plan.config.compute_dtype)
    is_here = (index >= 0) & (index < table_vd.shape[0])
    rows = jnp.where(is_here[..., None], table_vd[jnp.where(is_here, index, 0)], 0.0)
    # One device has each token's row, the others zeros: the sum is exact.
    x_mbtd = jax.lax.psum_scatter(rows, "tensor", scatter_dimension=2, tiled=True)
    return x_mbtd.astype(plan.config.compute_dtype)


def _first_token(plan: Plan, rows: int) -> jax.Array | int:
    return jax.lax.axis_index("tensor") * rows if plan.mesh.shape["tensor"] > 1 else 0


def _final_read(plan: Plan, params, values_nbtd: jax.Array) -> jax.Array:
    """The read after the last chunk."""
    config = plan.config
    return depth_attention(
        Bank(values_nbtd, jnp.int32(len(values_nbtd))),
        params["query"],
        params["gain"],
        eps=config.norm_eps,
        implementation=config.implementation,
    )


def _spread_head_loss(plan: Plan, params, hidden_mbtd, targets_mbt, weights_mbt):
    """The loss of all microbatches; each stage takes some of them from the last one."""
    stages = plan.partition.stages
    stage = jax.lax.axis_index("stage")
    if stages > 1:
        hidden_mbtd = jnp.where(stage == stages - 1, hidden_mbtd, jnp.zeros_like(hidden_mbtd))
        hidden_mbtd = jax.lax.psum_scatter(hidden_mbtd, "stage", scatter_dimension=0, tiled=True)
        share = plan.schedule.microbatches // stages
        targets_mbt, weights_mbt = (
            jax.lax.dynamic_slice_in_dim(array, stage * share, share)
            for array in (targets_mbt, weights_mbt)
        )

    @jax.checkpoint  # Logits of one microbatch at a time, in both directions.
    def add(total, microbatch):
        return total + _head_loss(plan, params, *microbatch), None

    zero = jnp.zeros_like(weights_mbt[0, 0, 0])
    return jax.lax.scan(add, zero, (hidden_mbtd, targets_mbt, weights_mbt))[0]


def _head_loss(plan: Plan, params, hidden_btd, targets_bt, weights_bt):
    """Final norm, head and weighted cross-entropy; the vocabulary is split over "tensor"."""
    config, tensor = plan.config, plan.mesh.shape["tensor"]
    eps = config.norm_eps / (plan.partition.num_sources**2 if config.retrofit else 1)
    normed_btd = rms_norm(hidden_btd, params["final_norm"]["gain"], eps=eps)
    normed_btd = _gather_time(plan, normed_btd)
    if config.tie_embeddings:
        kernel, equation = params["embedding_table"], "btd,vd->btv"
    else:
        kernel, equation = params["head_kernel"], "btd,dv->btv"
    logits_btv = jnp.einsum(
        equation,
        normed_btd,
        kernel.astype(normed_btd.dtype),
        preferred_element_type=jnp.float32,
    )
    rows = logits_btv.shape[-1]
    index = targets_bt - _first_token(plan, rows)
    is_here = (index >= 0) & (index < rows)
    largest = jnp.max(jax.lax.stop_gradient(logits_btv), axis=-1, keepdims=True)
    if tensor > 1:
        largest = jax.lax.pmax(largest, "tensor")
    exponentials = jnp.sum(jnp.exp(logits_btv - largest), axis=-1)
    own = jnp.take_along_axis(logits_btv - largest, jnp.where(is_here, index, 0)[..., None], -1)
    target_logit = jnp.where(is_here, own[..., 0], 0.0)
    if tensor > 1:
        exponentials, target_logit = jax.lax.psum((exponentials, target_logit), "tensor")
    in_range = (targets_bt >= 0) & (targets_bt < config.vocab_size)
    # A target outside the vocabulary makes the sum NaN instead of counting as another token.
    nats_bt = jnp.where(in_range, jnp.log(exponentials) - target_logit, jnp.nan)
    # Selecting before summing keeps a NaN at a padded place out of the sum: NaN * 0 is NaN.
    total = jnp.sum(jnp.where(weights_bt > 0, nats_bt * weights_bt, 0.0))
    # All devices along "tensor" have the same sum; of the sum over all, each is a part.
    return total / tensor
