"""Attention residuals as Flax modules: one read, and the stack that threads sources through it."""

from collections.abc import Callable, Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx

from attnres_jax.ops import Implementation, Sources, depth_attention
from attnres_jax.ops.block import run_blocks


class AttentionResidual(nnx.Module):
    """One read: `h = sum_i softmax_i(<w, RMSNorm(v_i)>) v_i` with learned w and key-norm gain.

    The pseudo-query starts at zero and the gain at one, so that a new read is the mean of its
    sources; starting both at zero would leave both without a gradient for ever.

    Attributes:
        query: Pseudo-query w, float32 `[d]`, zero at first (paper, section 5).
        gain: Key-norm gain, float32 `[d]`, one at first.

    References:
        Attention Residuals, arXiv:2603.15031, equations 2 to 4.
    """

    def __init__(
        self, width: int, *, eps: float = 1e-6, implementation: Implementation | None = None
    ):
        """Creates the read.

        Args:
            width: Width d of the sources.
            eps: Added to their mean squares.
            implementation: "xla", "mosaic_tpu" or "triton_gpu"; None takes the kernels of the
                accelerator where they can, and else XLA.
        """
        self.query = nnx.Param(jnp.zeros(width))
        self.gain = nnx.Param(jnp.ones(width))
        self.eps = eps
        self.implementation = implementation

    @overload
    def __call__(self, sources: Sources) -> jax.Array: ...

    @overload
    def __call__(
        self, sources: Sources, *, return_weights: Literal[True]
    ) -> tuple[jax.Array, jax.Array]: ...

    def __call__(
        self, sources: Sources, *, return_weights: bool = False
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Reads the sources; see `attnres_jax.depth_attention` for shapes and errors."""
        hidden, weights = depth_attention(
            sources,
            self.query[...],
            self.gain[...],
            eps=self.eps,
            implementation=self.implementation,
            return_weights=True,
        )
        return (hidden, weights) if return_weights else hidden


class ReadVectors(nnx.Module):
    """Pseudo-queries and key-norm gains of L reads, stacked: phase 1 takes a block's rows at once.

    Attributes:
        query: float32 `[l, d]`, zero at first.
        gain: float32 `[l, d]`, one at first.
    """

    def __init__(self, num_reads: int, width: int):
        """Creates vectors for `num_reads` reads of sources of `width`."""
        self.query = nnx.Param(jnp.zeros((num_reads, width)))
        self.gain = nnx.Param(jnp.ones((num_reads, width)))


class AttentionResidualStack(nnx.Module):
    """Runs any sub-layers with Full or Block Attention Residuals, in two phases.

    Sub-layer l computes `f_l(h_l)`, `[b, t, d] -> [b, t, d]`, with its own norm inside. There is no
    residual stream to add to: h_l is read from the sources, the last read is the result, and the
    model's final norm and head follow it.

    Attributes:
        sublayers: The callables, in order; those that are modules are part of this one.
        reads: Vectors of the L reads before the sub-layers.
        final_read: The read after the last sub-layer.

    References:
        Attention Residuals, arXiv:2603.15031, sections 3.1, 3.2 and algorithm 1.
    """

    def __init__(
        self,
        sublayers: Sequence[Callable[[jax.Array], jax.Array]],
        width: int,
        *,
        block_size: int,
        reads_per_group: int | None = None,
        eps: float = 1e-6,
        implementation: Implementation | None = None,
    ):
        """Creates the reads around the sub-layers.

        Args:
            sublayers: L callables.
            width: Width d of what they take and return.
            block_size: Sub-layers in a block (S); 1 is Full. Counts sub-layers, so a transformer
                layer counts twice. The last block may be shorter.
            reads_per_group: Reads whose first phase runs together, which bounds the live phase-1
                outputs; None means a whole block.
            eps: Added to the mean square of every source.
            implementation: "xla", "mosaic_tpu" or "triton_gpu"; None takes the kernels of the
                accelerator where they can, and else XLA.
        """
        self.sublayers = nnx.List(sublayers)
        self.reads = ReadVectors(len(sublayers), width)
        self.final_read = AttentionResidual(width, eps=eps, implementation=implementation)
        self.block_size = block_size
        self.reads_per_group = reads_per_group
        self.eps = eps
        self.implementation = implementation

    @overload
    def __call__(self, embedding: jax.Array) -> jax.Array: ...

    @overload
    def __call__(
        self, embedding: jax.Array, *, return_weights: Literal[True]
    ) -> tuple[jax.Array, list[jax.Array]]: ...

    def __call__(
        self, embedding: jax.Array, *, return_weights: bool = False
    ) -> jax.Array | tuple[jax.Array, list[jax.Array]]:
        """Runs all sub-layers and the final read.

        Args:
            embedding: Source b_0, `[..., d]`.
            return_weights: Whether to return the depth weights of all reads too.

        Returns:
            What the final norm and the head read, `[..., d]`; with `return_weights` also a list of
            L + 1 float32 arrays `[n, ...]`, n the number of sources of that read: the embedding,
            the finished blocks, and the open partial sum except at a block's first sub-layer.

        Raises:
            ValueError: No sub-layer, or a block size below 1.
        """
        sources, weights = run_blocks(
            embedding,
            list(self.sublayers),
            self.reads.query[...],
            self.reads.gain[...],
            block_size=self.block_size,
            reads_per_group=self.reads_per_group,
            eps=self.eps,
            implementation=self.implementation,
        )
        hidden, final_weights = self.final_read(sources, return_weights=True)
        return (hidden, [*weights, final_weights]) if return_weights else hidden
