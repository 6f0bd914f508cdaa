"""How much of each earlier output is in what a read returns."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from attnres_jax.models.capture import ReadState
from attnres_jax.ops.block import block_boundaries


def dilution(
    states: Sequence[ReadState],
    finished: Sequence[jax.Array],
    outputs: Sequence[jax.Array],
    block_size: int | None,
    weights_bt: jax.Array,
) -> list[jax.Array]:
    """The shares of outputs in hidden states that `diagnose` defines, averaged over tokens.

    Args:
        states: Of the L + 1 reads.
        finished: The embedding and, except for the standard residual, the block sums.
        outputs: The embedding and the outputs of the L sub-layers, `[b, t, d]`.
        block_size: Sub-layers in a block (S); None for the standard residual.
        weights_bt: Weights of the tokens, which sum to 1.

    Returns:
        For read i float32 `[i + 1]`: shares of the outputs up to then, which sum to 1.
    """
    if block_size is None:
        return [
            jnp.einsum("jbt,bt->j", projection_shares(outputs[: i + 1], state.hidden), weights_bt)
            for i, state in enumerate(states)
        ]
    blocks = block_boundaries(len(outputs) - 1, block_size)
    of_finished = [projection_shares(outputs[:1], finished[0])]
    for (start, stop), block_sum in zip(blocks, finished[1:], strict=True):
        of_finished.append(projection_shares(outputs[start + 1 : stop + 1], block_sum))
    rows = []
    for i, state in enumerate(states):
        assert state.weights is not None
        shares = of_finished
        if state.partial_sum is not None:
            n = state.weights.shape[0] - 1
            open_outputs = outputs[blocks[n - 1][0] + 1 : i + 1]
            shares = [*of_finished[:n], projection_shares(open_outputs, state.partial_sum)]
        alpha_nbt = state.weights
        shares = shares[: alpha_nbt.shape[0]]
        carried = [
            alpha_bt[None] * share for alpha_bt, share in zip(alpha_nbt, shares, strict=True)
        ]
        rows.append(jnp.einsum("jbt,bt->j", jnp.concatenate(carried), weights_bt))
    return rows


def projection_shares(outputs: Sequence[jax.Array], total_btd: jax.Array) -> jax.Array:
    """`<v_j, s> / <s, s>` of outputs that sum to s, float32 `[j, b, t]`; even where s is zero."""
    if len(outputs) == 1:
        return jnp.ones((1, *total_btd.shape[:-1]))
    total_btd = total_btd.astype(jnp.float32)
    products = [jnp.sum(output.astype(jnp.float32) * total_btd, -1) for output in outputs]
    # <s, s> itself, but for the rounding of s: shares of a rounded sum would not sum to 1.
    square_bt = sum(products[1:], products[0])
    is_zero = square_bt == 0
    shares = [product / jnp.where(is_zero, 1.0, square_bt) for product in products]
    return jnp.stack([jnp.where(is_zero, 1 / len(outputs), share) for share in shares])
