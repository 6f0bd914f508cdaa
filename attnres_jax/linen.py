"""Attention residuals for Flax Linen models; see `attnres_jax.modules` for what they compute.

The parameters are called `query` and `gain`, as in the nnx modules.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax

from attnres_jax.ops import Bank, FinishedSources, Implementation, Sources, depth_attention
from attnres_jax.ops.block import run_blocks

_zeros, _ones = nn.initializers.zeros_init(), nn.initializers.ones_init()


class AttentionResidual(nn.Module):
    """One read: `h = sum_i softmax_i(<w, RMSNorm(v_i)>) v_i` with learned w and key-norm gain.

    Attributes:
        eps: Added to the mean square of each source.
        implementation: "xla", "mosaic_tpu" or "triton_gpu"; None takes the kernels of the
            accelerator where they can, and else XLA.
    """

    eps: float = 1e-6
    implementation: Implementation | None = None

    @nn.compact
    def __call__(self, sources: Sources) -> jax.Array:
        """Reads the sources; see `attnres_jax.depth_attention` for shapes and errors."""
        known = isinstance(sources, (Bank, FinishedSources))
        values = sources.values[0] if known else sources[0]
        query_d = self.param("query", _zeros, values.shape[-1:])
        gain_d = self.param("gain", _ones, values.shape[-1:])
        return depth_attention(
            sources, query_d, gain_d, eps=self.eps, implementation=self.implementation
        )


class AttentionResidualStack(nn.Module):
    """Runs any sub-layers with Full or Block Attention Residuals, in two phases.

    Attributes:
        sublayers: L callables `[..., d] -> [..., d]`, Linen modules or not, each with its own norm.
        block_size: Sub-layers in a block (S); 1 is Full. The last block may be shorter.
        reads_per_group: Reads whose first phase runs together; None means a whole block.
        eps: Added to the mean square of every source.
        implementation: "xla", "mosaic_tpu" or "triton_gpu"; None takes the kernels of the
            accelerator where they can, and else XLA.
    """

    sublayers: Sequence[Callable[[jax.Array], jax.Array]]
    block_size: int
    reads_per_group: int | None = None
    eps: float = 1e-6
    implementation: Implementation | None = None

    @nn.compact
    def __call__(self, embedding: jax.Array) -> jax.Array:
        """Runs all sub-layers and the final read: what the final norm and the head take."""
        shape = (len(self.sublayers), embedding.shape[-1])
        sources, _ = run_blocks(
            embedding,
            self.sublayers,
            self.param("query", _zeros, shape),
            self.param("gain", _ones, shape),
            block_size=self.block_size,
            reads_per_group=self.reads_per_group,
            eps=self.eps,
            implementation=self.implementation,
        )
        final_read = AttentionResidual(
            eps=self.eps, implementation=self.implementation, name="final_read"
        )
        return final_read(sources)
