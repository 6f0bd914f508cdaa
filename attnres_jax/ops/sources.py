"""What a read attends to: a tuple of arrays, or a bank with a traced number of filled rows."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Bank(NamedTuple):
    """Sources in one preallocated array, for programs in which their number is traced.

    A scan over all layers, or one program for many pipeline stages, cannot hold a tuple that grows.
    Rows from `count` on are ignored: they may hold anything, NaN included, and get zero gradient.

    Attributes:
        values: `[n_max, ..., d]`.
        count: int32 scalar, at least 1: how many leading rows are sources.
    """

    values: jax.Array
    count: jax.Array

    @classmethod
    def create(cls, source: jax.Array, n_max: int) -> "Bank":
        """Returns a bank of `n_max` rows whose only source is `source` `[..., d]`."""
        empty = jnp.zeros((n_max - 1, *source.shape), source.dtype)
        return cls(jnp.concatenate([source[None], empty]), jnp.int32(1))

    def append(self, source: jax.Array) -> "Bank":
        """Returns the bank with `source` `[..., d]` as its next row; a full bank loses its last."""
        values = jax.lax.dynamic_update_index_in_dim(self.values, source, self.count, axis=0)
        return Bank(values, self.count + 1)


Sources = Sequence[jax.Array] | Bank


def as_rows(sources: Sources) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Splits sources into rows and says which of them count.

    Args:
        sources: Arrays `[..., d]` of one shape and dtype, or a `Bank`.

    Returns:
        The rows, and bool `[n]` marking the filled rows of a bank or None where all rows count.

    Raises:
        ValueError: There is no source, or shapes or dtypes differ.
    """
    if isinstance(sources, Bank):
        n_max = sources.values.shape[0]
        if n_max == 0:
            raise ValueError("sources: a bank needs at least one row; got n_max = 0")
        # The transpose of a split is one concatenate; that of n slices would be n padded sums.
        rows = [row[0] for row in jax.lax.split(sources.values, [1] * n_max, axis=0)]
        valid_n = jnp.arange(n_max) < sources.count
        # Selecting, not multiplying: a row past the count may hold NaN.
        return tuple(
            jnp.where(valid_n[i], row, jnp.zeros_like(row)) for i, row in enumerate(rows)
        ), valid_n
    if isinstance(sources, jax.Array):
        raise ValueError(
            f"sources: expected a sequence of arrays or a Bank, got one array of shape"
            f" {sources.shape}; pass tuple(array), or Bank(array, count) to attend to leading rows"
        )
    rows = tuple(sources)
    if not rows:
        raise ValueError("sources: depth attention needs at least one source, got none")
    for i, row in enumerate(rows):
        if row.shape != rows[0].shape or row.dtype != rows[0].dtype:
            raise ValueError(
                f"sources: all must have one shape and dtype; sources[0] is"
                f" {rows[0].dtype}{list(rows[0].shape)}, sources[{i}] is"
                f" {row.dtype}{list(row.shape)}"
            )
    if not jnp.issubdtype(rows[0].dtype, jnp.floating):
        raise ValueError(f"sources: expected a floating dtype, got {rows[0].dtype}")
    return rows, None


def check_vectors(name: str, vectors: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `vectors`, the argument called `name`, has this shape."""
    if vectors.shape != shape:
        raise ValueError(
            f"{name}: expected shape {list(shape)} to match the sources and the other vectors,"
            f" got {list(vectors.shape)}"
        )
