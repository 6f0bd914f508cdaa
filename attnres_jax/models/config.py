"""The configuration of a decoder-only language model, checked before anything is built."""

import dataclasses
from typing import Literal

Residual = Literal["standard", "full", "block"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and numerics of `TransformerLM`.

    One transformer layer is two sub-layers, attention then feed-forward. Everything that AttnRes
    counts (`block_size`, `reads_per_group`) counts sub-layers, as the paper does (section 3.2).

    Raises:
        ValueError: A field breaks a rule; the message names the field, its value and the way out.
    """

    vocab_size: int
    """Rows of the embedding table (V); at least the tokenizer's size."""
    width: int
    """Width of the residual stream (D)."""
    num_layers: int
    """Transformer layers; the model has L = 2 * num_layers sub-layers."""
    num_heads: int
    """Query heads (H)."""
    num_kv_heads: int | None = None
    """Key and value heads of grouped-query attention; None means num_heads."""
    head_width: int | None = None
    """Width of one head (K); None means width / num_heads."""
    feed_forward_width: int
    """Inner width of SwiGLU (F)."""
    residual: Residual = "block"
    """What a sub-layer reads: the plain sum (standard), every earlier output (full), or block sums."""
    block_size: int = 8
    """Sub-layers in a block (S), two for each transformer layer. Only read when residual is "block".
    Kimi K3's attn_res_block_size counts decoder layers instead: its 12 is 24 here."""
    reads_per_group: int | None = None
    """Reads whose first phase runs together; bounds the live phase-1 outputs. None: a whole block."""
    norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm, keys included. Must stay small beside the
    embedding's mean square: depth attention starts as the mean of its sources, not their sum."""
    embedding_std: float = 0.02
    """Standard deviation of the initial embedding table."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""
    tie_embeddings: bool = True
    """Whether the output head is the transposed embedding table."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of activations. Parameters are float32 always."""
    float32_partial_sum: bool = False
    """Keep the open block's partial sum in float32: 1.7x less rounding error at two more rows a read."""
    remat: Literal["none", "block", "full"] = "none"
    """What the backward pass recomputes: nothing, each sub-layer's inside (the reads too) keeping
    block sums and partial sums, or everything inside a block."""
    implementation: Literal["xla", "mosaic_tpu", "triton_gpu"] | None = None
    """How depth attention is computed; None picks the best one for backend, dtype and shape."""
    retrofit: bool = False
    """Whether the weights come from a standard-residual model: the norm after a read of n sources
    then takes norm_eps / n**2, so that zero queries reproduce that model to rounding."""
