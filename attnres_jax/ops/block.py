"""Block Attention Residuals around any sub-layers: the paper's algorithm 1, and bookkeeping."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from attnres_jax.ops.implementation import Implementation
from attnres_jax.ops.sources import FinishedSources
from attnres_jax.ops.two_phase import inter_block, merge


def block_boundaries(num_sublayers: int, block_size: int) -> list[tuple[int, int]]:
    """Returns the (first, past-the-last) sub-layer of each block; the last may be short.

    Raises:
        ValueError: Fewer than one sub-layer, or a block size below 1.
    """
    if num_sublayers < 1 or block_size < 1:
        raise ValueError(
            "a model needs at least one sub-layer, and a block at least one;"
            f" got {num_sublayers} sub-layers and block_size={block_size}"
        )
    return [
        (start, min(start + block_size, num_sublayers))
        for start in range(0, num_sublayers, block_size)
    ]


def run_blocks(
    embedding: jax.Array,
    sublayers: Sequence[Callable[[jax.Array], jax.Array]],
    query_ld: jax.Array,
    gain_ld: jax.Array,
    *,
    block_size: int,
    reads_per_group: int | None = None,
    eps: float = 1e-6,
    implementation: Implementation | None = None,
) -> tuple[FinishedSources, list[jax.Array]]:
    """Runs L sub-layers with Block Attention Residuals; block size 1 is Full.

    For each block: phase 1 reads the finished sources for all its sub-layers; each sub-layer but
    the first merges its share with the open partial sum; the sum of the outputs is a new source.

    Args:
        embedding: Source b_0, `[..., d]`.
        sublayers: L callables `[..., d] -> [..., d]`, each with its own norm inside.
        query_ld: Pseudo-queries of the L reads.
        gain_ld: Key-norm gains of the L reads.
        block_size: Sub-layers in a block (S).
        reads_per_group: Reads whose first phase runs together; None means a whole block.
        eps: Added to the mean square of every source.
        implementation: "xla", "mosaic_tpu" or "triton_gpu"; None takes the kernels of the
            accelerator where they can, and else XLA.

    Returns:
        The sources of the final read (the embedding and every block sum), and the depth weights of
        the L reads, float32 `[n, ...]` each.

    References:
        Attention Residuals, arXiv:2603.15031, algorithm 1.
    """
    if reads_per_group is not None and reads_per_group < 1:
        raise ValueError(f"reads_per_group: a group needs at least one read, got {reads_per_group}")
    group_size = reads_per_group or block_size
    sources, weights = FinishedSources((embedding,)), []
    for start, stop in block_boundaries(len(sublayers), block_size):
        partial_sum: jax.Array | None = None
        update: jax.Array | None = None
        for group in range(start, stop, group_size):
            reads = range(group, min(group + group_size, stop))
            query_sd, gain_sd = query_ld[group : reads.stop], gain_ld[group : reads.stop]
            outputs, lse, weights_snbt, sources = inter_block(
                sources,
                query_sd,
                gain_sd,
                eps=eps,
                implementation=implementation,
                return_weights=True,
                return_sources=True,
            )
            for s, index in enumerate(reads):
                hidden, read_weights = outputs[s], weights_snbt[s]
                if index > start:  # A block's first read has no partial sum to merge.
                    partial_sum, hidden, gate = merge(
                        outputs[s],
                        lse[s],
                        partial_sum,
                        update,
                        query_sd[s],
                        gain_sd[s],
                        eps=eps,
                        implementation=implementation,
                        return_gate=True,
                    )
                    read_weights = join_weights(weights_snbt[s], gate)
                update = sublayers[index](hidden)
                weights.append(read_weights)
        assert update is not None
        sources = sources.append(update if partial_sum is None else partial_sum + update)
    return sources, weights


def join_weights(finished: jax.Array, gate: jax.Array) -> jax.Array:
    """Depth weights `[n + 1, ...]` from phase 1's `[n, ...]` and the partial sum's gate `[...]`."""
    return jnp.concatenate([finished * (1 - gate)[None], gate[None]])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockState:
    """The sources as they grow, for a forward pass that drives reads and writes itself.

        state = BlockState.create(embedding, block_size=8)
        for read, sublayer in zip(reads, sublayers):
            state = state.write(sublayer(read(state.sources)))
        hidden = final_read(state.sources)

    Attributes:
        finished: The embedding and the sums of finished blocks, each `[..., d]`.
        partial_sum: Sum of the open block's outputs, or None at its first sub-layer.
        outputs_in_block: How many outputs that sum has.
        block_size: Sub-layers in a block (S).
    """

    finished: tuple[jax.Array, ...]
    partial_sum: jax.Array | None
    outputs_in_block: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, embedding: jax.Array, *, block_size: int) -> "BlockState":
        """Starts with the embedding as the only source.

        Raises:
            ValueError: A block size below 1.
        """
        block_boundaries(1, block_size)
        return cls((embedding,), None, 0, block_size)

    @property
    def sources(self) -> tuple[jax.Array, ...]:
        """What the next read attends to."""
        if self.partial_sum is None:
            return self.finished
        return (*self.finished, self.partial_sum)

    def write(self, output: jax.Array) -> "BlockState":
        """Adds a sub-layer's output `[..., d]` to the open block, and closes the block if full."""
        total = output if self.partial_sum is None else self.partial_sum + output
        if self.outputs_in_block + 1 == self.block_size:
            return BlockState((*self.finished, total), None, 0, self.block_size)
        return BlockState(self.finished, total, self.outputs_in_block + 1, self.block_size)
