"""Parameters in layer order and in pipeline layout, and the way between, bit for bit.

Layer order `[l, ...]` is what `TransformerLM` has and what a checkpoint keeps: it is the same for
every mesh. In pipeline layout the same leaf is `[c, p, l, ...]`: of chunk c of stage p, the l-th
layer. Chunks with fewer layers than the longest end in zeros, whose gradient is zero.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.models.sublayers import KINDS
from attnres_jax.parallel.partition import Partition
from attnres_jax.parallel.sharding import names_of

EMPTY = -1


def to_pipeline(params: Any, partition: Partition) -> Any:
    """Puts parameters in layer order into pipeline layout.

    Args:
        params: A pytree like the parameters of `TransformerLM`, such as optimizer moments.
        partition: Which chunk has which sub-layers.

    Returns:
        The same pytree, with stacked leaves `[c, p, l, ...]` and the others as they were.
    """

    def convert(path, leaf):
        index_cl = layers_of_chunks(names_of(path)[0], partition)
        if index_cl is None:
            return leaf
        zeros = jnp.zeros((1, *leaf.shape[1:]), leaf.dtype)
        rows = jnp.concatenate([leaf, zeros])[index_cl.ravel() % (leaf.shape[0] + 1)]
        grid = partition.virtual_stages, partition.stages, index_cl.shape[1]
        return rows.reshape(*grid, *leaf.shape[1:])

    return jax.tree_util.tree_map_with_path(convert, params)


def to_layer_order(params: Any, partition: Partition) -> Any:
    """Undoes `to_pipeline`."""

    def convert(path, leaf):
        index_cl = layers_of_chunks(names_of(path)[0], partition)
        if index_cl is None:
            return leaf
        flat = index_cl.ravel()
        positions = np.argsort(flat, kind="stable")[np.count_nonzero(flat == EMPTY) :]
        return leaf.reshape(flat.size, *leaf.shape[3:])[positions]

    return jax.tree_util.tree_map_with_path(convert, params)


def layers_of_chunks(module: str, partition: Partition) -> np.ndarray | None:
    """Rows of a module's stacked parameters that each chunk has, `[C, l]`, `EMPTY` at the end.

    Args:
        module: Attribute of `TransformerLM`.
        partition: Which chunk has which sub-layers.

    Returns:
        None for modules that are not stacked.
    """
    kind = module.removesuffix("_norm")
    if module != "reads" and kind not in KINDS:
        return None
    chunks = []
    for start, size in zip(partition.boundaries[:-1], partition.sizes, strict=True):
        sublayers = range(start, start + size)
        if module == "reads":
            chunks.append(list(sublayers))
        else:
            chunks.append([i // 2 for i in sublayers if KINDS[i % 2] == kind])
    longest = max(map(len, chunks))
    return np.array([rows + [EMPTY] * (longest - len(rows)) for rows in chunks])
