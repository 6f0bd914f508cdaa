"""The configuration of a decoder-only language model, checked before anything is built."""

import dataclasses
from typing import Literal

from attnres_jax.ops.implementation import NAMES

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
    """What a sub-layer reads: the plain sum of earlier outputs (standard), every earlier output by
    itself (full), or the sums of blocks of them (block)."""
    block_size: int = 8
    """Sub-layers in a block (S), two for each transformer layer; for the standard residual, those
    that remat="block" recomputes together. Full ignores it. Kimi K3's attn_res_block_size counts
    decoder layers instead: its 12 is 24 here."""
    reads_per_group: int | None = None
    """Reads whose first phase runs together, which bounds the live phase-1 outputs; None: all of a
    block."""
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
    attention: Literal["xla", "splash"] | None = None
    """What computes attention over time: XLA, or JAX's splash attention kernel on TPUs. None takes
    splash on a TPU where the context is a multiple of 128."""
    implementation: Literal["xla", "mosaic_tpu", "triton_gpu"] | None = None
    """What computes depth attention: XLA, Pallas kernels on TPUs or Triton kernels on GPUs. None
    takes the kernels of the accelerator where they can, and else XLA."""
    float32_partial_sum: bool = False
    """Keep the open block's partial sum in float32: less rounding error, more memory traffic."""
    remat: Literal["none", "block", "full"] = "none"
    """What the backward pass recomputes (rematerialisation): nothing; each block from its sources,
    all of it at once; or that and then again each sub-layer by itself, for the least memory."""
    retrofit: bool = False
    """Whether the weights come from a standard-residual model: the norm after a read of n sources
    then takes norm_eps / n**2, so that zero queries reproduce that model to rounding."""

    def __post_init__(self):
        """Checks every rule that the fields must keep, before anything is built."""
        for name in ("vocab_size", "width", "num_layers", "num_heads", "feed_forward_width"):
            _at_least_one(name, getattr(self, name))
        for name in ("num_kv_heads", "head_width", "reads_per_group"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        _at_least_one("block_size", self.block_size)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}: expected one of {', '.join(map(str, choices))};"
                    f" got {getattr(self, name)!r}"
                )
        for name in ("norm_eps", "embedding_std", "rope_theta"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise ValueError(f"{name}: expected a positive finite number, got {value!r}")
        for name in ("tie_embeddings", "float32_partial_sum", "retrofit"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.head_width is None and self.width % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide width={self.width}; choose a divisor"
                " of width, or set head_width"
            )
        head_width = self.head_width or self.width // self.num_heads
        if head_width % 2:
            raise ValueError(
                f"head_width={head_width} (width / num_heads where not set) must be even for the"
                " rotary embedding; set head_width to an even number"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; each"
                " key-value head serves the same number of query heads"
            )
        if self.retrofit and self.residual == "standard":
            raise ValueError(
                'retrofit=True needs residual="full" or "block": a standard model loads its own'
                " weights as they are"
            )


_CHOICES = {
    "residual": ("standard", "full", "block"),
    "compute_dtype": ("float32", "bfloat16", "float16"),
    "attention": (None, "xla", "splash"),
    "implementation": (None, *NAMES),
    "remat": ("none", "block", "full"),
}


def _at_least_one(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
