"""What a forward pass hands out for diagnostics, and where it lets gradients be taken."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax.models.sublayers import split_leading
from attnres_jax.ops.block import join_weights


class ReadState(NamedTuple):
    """One read in a forward pass, and the sub-layer behind it.

    Attributes:
        hidden: What the read returned, before the norm that follows, `[b, t, d]`.
        weights: Depth weights, float32 `[n, b, t]`; None for the standard residual.
        partial_sum: The open block's sum that was read, `[b, t, d]`; None where there is none.
        lse: Log-sum-exp of phase 1, float32 `[b, t]`; None for the standard residual and the final
            read.
        gate: Depth weight of the partial sum, float32 `[b, t]`; None where there is none.
        received: What the sub-layer received, after its norm; None for the final read.
        output: What the sub-layer returned; None for the final read.
    """

    hidden: jax.Array
    weights: jax.Array | None = None
    partial_sum: jax.Array | None = None
    lse: jax.Array | None = None
    gate: jax.Array | None = None
    received: jax.Array | None = None
    output: jax.Array | None = None


class Probes(NamedTuple):
    """Zeros that a forward pass adds in; their gradients are those of the loss at that point.

    Attributes:
        received: `[l, b, t, d]`, added to what each sub-layer receives, after its norm.
        output: `[l, b, t, d]`, added to what each sub-layer returns.
        final: `[b, t, d]`, added to what the final read returns; None inside the layers.
    """

    received: jax.Array
    output: jax.Array
    final: jax.Array | None


def add_probe(
    x: jax.Array, probes: Probes | None, point: Literal["received", "output", "final"]
) -> jax.Array:
    """Adds the probe of this point, if there are probes."""
    return x if probes is None else x + getattr(probes, point)


def unstack_probes(probes: Probes | None, size: int) -> list[Any]:
    """The probes of each of `size` sub-layers, None where there are none."""
    if probes is None:
        return [None] * size
    return [jax.tree.map(lambda x: x[0], one) for one in split_leading(probes, [1] * size)]


def read_state(read: Any, gate: jax.Array | None, partial_sum: jax.Array | None) -> ReadState:
    """The state of a read from its phase 1 and, unless the gate is None, its merge.

    A merge keeps what it read to itself: `hidden` is the sum that it took, before it is rounded.
    """
    if gate is None or partial_sum is None:
        return ReadState(read.output, read.weights, lse=read.lse)
    hidden_btd = (1 - gate)[..., None] * read.output.astype(jnp.float32)
    hidden_btd += gate[..., None] * partial_sum.astype(jnp.float32)
    weights = join_weights(read.weights, gate)
    return ReadState(hidden_btd, weights, partial_sum, read.lse, gate)


def finish_state(
    state: ReadState, received: jax.Array, output: jax.Array
) -> tuple[jax.Array, ReadState]:
    """The mean square of what a read returned, and its state with the sub-layer's part."""
    return mean_square(state.hidden), state._replace(received=received, output=output)


def mean_square(x: jax.Array) -> jax.Array:
    """The mean of the squares of all elements, in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)))
