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

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from attnres_jax.models.sublayers import KINDS
from attnres_jax.models.transformer import TransformerLM
from attnres_jax.ops import Bank, depth_attention
from attnres_jax.parallel import head, pipeline
from attnres_jax.parallel.chunk import run_chunk
from attnres_jax.parallel.layers import Program
from attnres_jax.parallel.mesh import AXES
from attnres_jax.parallel.plan import Plan, abstract_params, check_batch
from attnres_jax.parallel.sharding import axis_letters, parameter_specs, partition_spec

_STACKED = (*KINDS, *(f"{kind}_norm" for kind in KINDS), "reads")


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
        check_batch(plan, batch_size, context)
        if weights_bt is None:
            weights_bt = jnp.ones((batch_size, context), jnp.float32)
        arrays = tokens_bt[:, :-1], tokens_bt[:, 1:], weights_bt
        nats = region(params, *(_split_batch(plan, array) for array in arrays))
        return nats, jnp.sum(weights_bt)

    return loss


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
        name: jax.tree.map(lambda leaf: jnp.squeeze(leaf, 1), leaves)
        for name, leaves in params.items()
        if name in _STACKED
    }
    others = {name: leaf for name, leaf in params.items() if name not in _STACKED}
    x_mbtd = head.embed(plan, others["embedding_table"], tokens_mbt)
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
            hidden_btd = _final_read(plan, params.get("final_read"), values)
            return head.microbatch_loss(plan, params, hidden_btd, *targets)

        nats = pipeline.one_f_one_b(run, loss, stacked, others, x_mbtd, (targets_mbt, weights_mbt))
    else:
        execute = getattr(pipeline, plan.settings.executor)
        hidden_mbtd = execute(
            run, partial(_final_read, plan), stacked, others.get("final_read"), x_mbtd
        )
        nats = head.spread_loss(plan, others, hidden_mbtd, targets_mbt, weights_mbt)
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
        x = head.gather_time(plan, normed_btd)
        sublayer = nnx.merge(graphdefs[kind], state)
        if kind == "attention":
            output = sublayer(x, time_axis=time_axis)
        else:
            output = sublayer(x)
        return head.scatter_time(plan, output)

    communicates = shape["sequence"] > 1 or shape["tensor"] > 1
    return Program(plan.config, plan.partition, apply, communicates)


def _final_read(plan: Plan, params, values_nbtd: jax.Array) -> jax.Array:
    """The read after the last chunk; of a standard residual stream, the stream."""
    config = plan.config
    if config.residual == "standard":
        return values_nbtd[-1]
    return depth_attention(
        Bank(values_nbtd, jnp.int32(len(values_nbtd))),
        params["query"],
        params["gain"],
        eps=config.norm_eps,
        implementation=config.implementation,
    )
