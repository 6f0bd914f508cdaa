"""What a read attends to: a tuple of arrays, or a bank with a traced number of filled rows."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


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


class FinishedSources(NamedTuple):
    """Finished sources, as a read hands them on to the next one.

    Passing these on, and not the arrays, saves memory traffic where kernels compute the reads: the
    gradients of all reads are added into one array for each source, in place, and TPUs compute no
    inverse RMS twice. Through XLA it changes nothing.

    Attributes:
        values: Arrays `[..., d]`.
        inverse_rms: float32 `[k, ...]` of the first k of them, not differentiable; None for k = 0.
    """

    values: tuple[jax.Array, ...]
    inverse_rms: jax.Array | None = None

    @property
    def read_by_kernels(self) -> bool:
        """Whether kernels computed a read of these."""
        return self.inverse_rms is not None

    def append(self, source: jax.Array) -> "FinishedSources":
        """Returns these with one more source `[..., d]`."""
        if self.read_by_kernels:
            source = row_major(source)
        return FinishedSources((*self.values, source), self.inverse_rms)


Sources = Sequence[jax.Array] | Bank | FinishedSources


def row_major(x: jax.Array) -> jax.Array:
    """Asks the compiler to keep `x` `[..., d]`, and its cotangent, as rows of d.

    Kernels take and return rows. Left alone, a compiler that computes with their arrays in another
    layout copies them, and keeps both.
    """
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def check_sources(
    sources: Sources,
) -> tuple[tuple[jax.Array, ...] | jax.Array, jax.Array | None]:
    """Checks sources and tells their two forms apart.

    Args:
        sources: Arrays `[..., d]` of one shape and dtype, or a `Bank`.

    Returns:
        Those arrays and None, or the bank's `[n_max, ..., d]` and its count.

    Raises:
        ValueError: There is no source, or shapes or dtypes do not fit.
    """
    if isinstance(sources, jax.Array):
        raise ValueError(
            f"sources: expected a sequence of arrays or a Bank, got one array of shape"
            f" {sources.shape}; pass tuple(array), or Bank(array, count) to attend to leading rows"
        )
    known = isinstance(sources, (Bank, FinishedSources))
    values = sources.values if known else tuple(sources)
    if len(values) == 0:
        raise ValueError(
            "sources: depth attention needs at least one source; got none, or a bank without rows"
        )
    first = values[0]
    for i, row in enumerate(values):
        if row.shape != first.shape or row.dtype != first.dtype:
            raise ValueError(
                f"sources: all must have one shape and dtype; sources[0] is"
                f" {first.dtype}{list(first.shape)}, sources[{i}] is {row.dtype}{list(row.shape)}"
            )
    if first.ndim == 0 or not jnp.issubdtype(first.dtype, jnp.floating):
        raise ValueError(
            "sources: expected floating arrays [..., d], got"
            f" {first.dtype}{list(first.shape)} for each"
        )
    if isinstance(sources, FinishedSources) and sources.inverse_rms is not None:
        k, *tokens = sources.inverse_rms.shape
        if k > len(values) or tuple(tokens) != first.shape[:-1]:
            raise ValueError(
                f"sources: expected inverse_rms of at most {len(values)} sources, one for each of"
                f" {list(first.shape[:-1])} tokens, got {list(sources.inverse_rms.shape)}"
            )
    return values, sources.count if isinstance(sources, Bank) else None


def as_rows(
    values: tuple[jax.Array, ...] | jax.Array, count: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Splits what `check_sources` returns into n arrays `[..., d]`, zero past a bank's count."""
    if isinstance(values, tuple) or count is None:
        return tuple(values)
    # The transpose of a split is one concatenate; that of n slices would be n padded sums.
    rows = [row[0] for row in jax.lax.split(values, [1] * values.shape[0], axis=0)]
    # Selecting, not multiplying: a row past the count may hold NaN.
    return tuple(jnp.where(i < count, row, jnp.zeros_like(row)) for i, row in enumerate(rows))


def check_vectors(name: str, vectors: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `vectors`, the argument called `name`, has this shape."""
    if vectors.shape != shape:
        raise ValueError(
            f"{name}: expected shape {list(shape)} to match the sources and the other vectors,"
            f" got {list(vectors.shape)}"
        )
