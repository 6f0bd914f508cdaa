"""How much of each earlier output is in what a read returns."""

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.diagnostics.stacked import Stacked
from attnres_jax.ops.block import block_boundaries


def dilution(stacked: Stacked, block_size: int | None, weights_bt: jax.Array) -> jax.Array:
    """The shares of outputs in hidden states that `diagnose` defines, averaged over tokens.

    Args:
        stacked: The forward pass.
        block_size: Sub-layers in a block (S); None for the standard residual.
        weights_bt: Weights of the tokens, which sum to 1.

    Returns:
        float32 `[l + 1, l + 1]`: for read i the shares of the outputs up to then, which sum to 1,
        and NaN for those that follow.
    """
    size = len(stacked.num_sources)
    if block_size is None:
        ones = jnp.ones((size, *weights_bt.shape))
        sizes = np.arange(1, size + 1)
        shares = _shares_in_sums(stacked.outputs, stacked.hidden, sizes, ones, weights_bt)
    else:
        shares = _shares_through_blocks(stacked, block_size, weights_bt)
    return jnp.where(np.tri(size, dtype=bool), shares, jnp.nan)


def _shares_through_blocks(stacked: Stacked, block_size: int, weights_bt: jax.Array) -> jax.Array:
    """Each block's outputs are a run of columns: in its partial sums first, then in its sum."""
    assert stacked.weights is not None and stacked.finished is not None
    size, num_partial_sums = len(stacked.num_sources), 0
    columns = [jnp.einsum("lbt,bt->l", stacked.weights[:, 0], weights_bt)[:, None]]
    for n, (start, stop) in enumerate(block_boundaries(size - 1, block_size), 1):
        outputs, alpha_lbt = stacked.outputs[start + 1 : stop + 1], stacked.weights[:, n]
        column = [jnp.zeros((start + 1, stop - start))]
        num_open = stop - start - 1
        if num_open:
            assert stacked.partial_sums is not None
            sums = stacked.partial_sums[num_partial_sums : num_partial_sums + num_open]
            num_partial_sums += num_open
            sizes, alphas = np.arange(1, num_open + 1), alpha_lbt[start + 1 : stop]
            column.append(_shares_in_sums(outputs, sums, sizes, alphas, weights_bt))
        of_block = _projection_shares(outputs, stacked.finished[n], stop - start)
        column.append(jnp.einsum("jbt,lbt,bt->lj", of_block, alpha_lbt[stop:], weights_bt))
        columns.append(jnp.concatenate(column))
    return jnp.concatenate(columns, axis=1)


def _shares_in_sums(
    outputs: jax.Array,
    sums: jax.Array,
    sizes: np.ndarray,
    alphas: jax.Array,
    weights_bt: jax.Array,
) -> jax.Array:
    """Shares `[k, j]` of `[j, b, t, d]` in `[k, b, t, d]` that have these depth weights."""

    def shares_in_sum(one):
        sum_btd, size, alpha_bt = one
        shares_jbt = _projection_shares(outputs, sum_btd, size)
        return jnp.einsum("jbt,bt,bt->j", shares_jbt, alpha_bt, weights_bt)

    return jax.lax.map(shares_in_sum, (sums, jnp.asarray(sizes), alphas))


def _projection_shares(outputs: jax.Array, sum_btd: jax.Array, size: jax.Array | int) -> jax.Array:
    """`<v_j, s> / <s, s>` of the first `size` of outputs `[j, b, t, d]`, which sum to s; else 0.

    Where s is zero the shares are even.
    """
    if len(outputs) == 1:
        return jnp.ones((1, *sum_btd.shape[:-1]))
    is_part = (jnp.arange(len(outputs)) < size)[:, None, None]
    products = jnp.sum(outputs.astype(jnp.float32) * sum_btd.astype(jnp.float32)[None], axis=-1)
    products = jnp.where(is_part, products, 0.0)
    # <s, s> itself, but for the rounding of s: shares of a rounded sum would not sum to 1.
    square_bt = jnp.sum(products, axis=0)[None]
    even = jnp.where(is_part, 1 / jnp.asarray(size, jnp.float32), 0.0)
    return jnp.where(square_bt == 0, even, products / jnp.where(square_bt == 0, 1.0, square_bt))
