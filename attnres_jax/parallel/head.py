"""Embedding, head and loss on a device: the vocabulary is split over "tensor", tokens over more."""

from typing import Any

import jax
import jax.numpy as jnp

from attnres_jax.ops import rms_norm
from attnres_jax.parallel.plan import Plan

Params = dict[str, Any]


def gather_time(plan: Plan, x_btd: jax.Array) -> jax.Array:
    """All tokens of this device's part of the sequence, from the devices along "tensor"."""
    if plan.mesh.shape["tensor"] == 1:
        return x_btd
    return jax.lax.all_gather(x_btd, "tensor", axis=1, tiled=True)


def scatter_time(plan: Plan, x_btd: jax.Array) -> jax.Array:
    """Sums the shares of the devices along "tensor"; each keeps its tokens."""
    if plan.mesh.shape["tensor"] == 1:
        return x_btd
    return jax.lax.psum_scatter(x_btd, "tensor", scatter_dimension=1, tiled=True)


def embed(plan: Plan, table_vd: jax.Array, tokens_mbt: jax.Array) -> jax.Array:
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


def spread_loss(
    plan: Plan,
    params: Params,
    hidden_mbtd: jax.Array,
    targets_mbt: jax.Array,
    weights_mbt: jax.Array,
) -> jax.Array:
    """The loss of all microbatches; each stage takes some of them from the last one.

    Args:
        plan: From `make_plan`.
        params: All that are not stacked over layers.
        hidden_mbtd: Results of the final read; of meaning on the last stage.
        targets_mbt: The tokens to predict.
        weights_mbt: Their weights.

    Returns:
        This device's part of the weighted sum of cross-entropies, float32.
    """
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
        return total + microbatch_loss(plan, params, *microbatch), None

    zero = jnp.zeros_like(weights_mbt[0, 0, 0])
    return jax.lax.scan(add, zero, (hidden_mbtd, targets_mbt, weights_mbt))[0]


def microbatch_loss(
    plan: Plan,
    params: Params,
    hidden_btd: jax.Array,
    targets_bt: jax.Array,
    weights_bt: jax.Array,
) -> jax.Array:
    """This device's part of one microbatch: final norm, head and weighted cross-entropy."""
    config, tensor = plan.config, plan.mesh.shape["tensor"]
    eps = config.norm_eps / (plan.partition.num_sources**2 if config.retrofit else 1)
    normed_btd = rms_norm(hidden_btd, params["final_norm"]["gain"], eps=eps)
    normed_btd = gather_time(plan, normed_btd)
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
