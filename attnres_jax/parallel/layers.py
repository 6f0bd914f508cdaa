"""The layers of a chunk: which parameters are whose, and what runs each of them.

The chunk's number is traced. Where chunks may start with either kind of sub-layer, so is the kind.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.models.config import ModelConfig
from attnres_jax.models.sublayers import KINDS, Run, run_sublayers, split_into_runs
from attnres_jax.parallel.partition import Partition


class Program(NamedTuple):
    """What `run_chunk` knows when it is traced.

    Attributes:
        config: Block size, numerics and rematerialisation.
        partition: Which chunk has which sub-layers and blocks.
        apply: `(kind, parameters of one sub-layer, normalised [b, t, d]) -> [b, t, d]`.
        communicates: Whether `apply` does, and so must run on all devices or none.
    """

    config: ModelConfig
    partition: Partition
    apply: Callable[[str, Any, jax.Array], jax.Array]
    communicates: bool = False

    @property
    def sum_dtype(self) -> Any:
        """Dtype of the open block's partial sum."""
        return jnp.dtype(
            "float32" if self.config.float32_partial_sum else self.config.compute_dtype
        )


class Layer(NamedTuple):
    """Parameters of one sub-layer, or of several stacked."""

    norm_gain: jax.Array
    state: Any


def at_chunk(numbers: Sequence[Any], chunk: jax.Array) -> jax.Array:
    """Looks up the chunk's own entry of a table with one for each chunk."""
    return jnp.asarray(np.asarray(numbers))[chunk]


def select(flag: bool | jax.Array, if_true: jax.Array, if_false: jax.Array) -> jax.Array:
    """`jnp.where`, decided now where it can be."""
    if isinstance(flag, bool):
        return if_true if flag else if_false
    return jnp.where(flag, if_true, if_false)


def run_layers(
    step: Callable[..., tuple[Any, None]], carry: Any, run: Run, layers: Any, reads: Sequence[Any]
) -> Any:
    """Folds `step` over consecutive sub-layers, scanned where their kinds are static.

    Args:
        step: `(kind, carry, layer, read) -> (carry, None)` for one sub-layer. A kind is a name, or
            two of which the chunk has either.
        carry: Passed from sub-layer to sub-layer.
        run: Which sub-layers.
        layers: Their share of what `split_layers` returns.
        reads: What else each sub-layer takes.
    """
    if isinstance(layers, dict):
        return run_sublayers(step, carry, run, layers, reads)[0]
    for (kinds, layer), read in zip(layers, reads, strict=True):
        carry, _ = step(kinds, carry, layer, read)
    return carry


def split_layers(
    program: Program, params: dict[str, Any], runs: list[Run], chunk: jax.Array
) -> list[Any]:
    """For each run the layers of each kind, stacked; or one by one where kinds are not static."""
    partition = program.partition
    stacked = {kind: Layer(params[f"{kind}_norm"]["gain"], params[kind]) for kind in KINDS}
    if not _has_odd_start(partition):
        return split_into_runs(stacked, runs)
    # Both kinds alternate from either start, so that slot i is the (i // 2)-th of its kind.
    layers = []
    for slot in range(partition.num_slots):
        kinds = KINDS[slot % 2], KINDS[(slot + 1) % 2]
        even, odd = (
            jax.tree.map(lambda leaf, slot=slot: leaf[slot // 2], stacked[kind]) for kind in kinds
        )
        norm_gain = select(_starts_odd(partition, chunk), odd.norm_gain, even.norm_gain)
        layers.append((kinds, Layer(norm_gain, (even.state, odd.state))))
    return [layers[run.start : run.stop] for run in runs]


def apply_layer(
    program: Program, kind: str | tuple[str, str], chunk: jax.Array, state: Any, hidden: jax.Array
) -> jax.Array:
    """Runs a sub-layer; of two kinds, the first where the chunk starts on an even sub-layer."""
    if isinstance(kind, str):
        return program.apply(kind, state, hidden)
    branches = [
        lambda hidden, one=one, its=its: program.apply(one, its, hidden)
        for one, its in zip(kind, state, strict=True)
    ]
    is_odd = _starts_odd(program.partition, chunk)
    if program.communicates:
        return jnp.where(is_odd, branches[1](hidden), branches[0](hidden))
    return jax.lax.cond(is_odd, branches[1], branches[0], hidden)


def _has_odd_start(partition: Partition) -> bool:
    return any(start % len(KINDS) for start in partition.boundaries[:-1])


def _starts_odd(partition: Partition, chunk: jax.Array) -> jax.Array:
    return at_chunk([start % len(KINDS) == 1 for start in partition.boundaries[:-1]], chunk)
