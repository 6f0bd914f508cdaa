"""Compiled programs of tiny models, shared by the tests of one process."""

import dataclasses
import functools

import jax
import numpy as np
from flax import nnx

from attnres_jax import ModelConfig, TransformerLM

B, T, V = 2, 5, 13

TINY = ModelConfig(
    vocab_size=V,
    width=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_width=6,
    feed_forward_width=20,
    rope_theta=50.0,
)
"""Six sub-layers. Grouped heads, and a head width that is not width / heads."""


def tiny(**changes) -> ModelConfig:
    return dataclasses.replace(TINY, **changes)


STANDARD = tiny(residual="standard", tie_embeddings=False, num_kv_heads=None)
FULL = tiny(residual="full", tie_embeddings=False)
MODELS = {
    "standard, untied head, one key-value head for each head": STANDARD,
    "full, untied head": FULL,
    "block size 3 ends inside a layer, groups of two reads": tiny(block_size=3, reads_per_group=2),
    "block size 4 leaves a short last block": tiny(block_size=4, tie_embeddings=False),
    "block size 6 scans within its one block": tiny(block_size=6),
    "block size 8 exceeds the sub-layers, groups of one read": tiny(
        block_size=8, reads_per_group=1
    ),
}


def tokens(seed=1):
    return np.random.default_rng(seed).integers(0, V, (B, T), dtype=np.int32)


def cotangent(seed=2):
    return np.random.default_rng(seed).standard_normal((B, T, V)).astype(np.float32)


@functools.cache
def graphdef_of(config):
    return nnx.graphdef(nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0))))


def apply(config, params, tokens, **kwargs):
    """The model as a pure function of nested dicts of arrays."""
    return nnx.merge(graphdef_of(config), params)(tokens, **kwargs)


@functools.cache
def logits_and_gradients(config):
    """`(params, tokens, cotangent) -> (logits, gradients of <cotangent, logits>)`, compiled."""

    @jax.jit
    def run(params, tokens, cotangent):
        logits, pullback = jax.vjp(lambda params: apply(config, params, tokens), params)
        return logits, pullback(cotangent)[0]

    return run


@functools.cache
def logits_of(config):
    """`(params, tokens) -> logits`, compiled."""
    return jax.jit(functools.partial(apply, config))


@functools.cache
def logits_and_capture(config):
    """`(params, tokens) -> (logits, what the reads did)`, compiled."""
    return jax.jit(functools.partial(apply, config, capture=True))


def new_params(config, seed=0):
    """Parameters as a new model has them, as nested dicts of arrays."""
    params = nnx.state(TransformerLM(config, rngs=nnx.Rngs(seed)), nnx.Param)
    return jax.tree.map(np.asarray, nnx.to_pure_dict(params))


def with_zero_queries(params):
    """The same weights with the reads of a new model."""
    return params | {
        name: {
            "query": np.zeros_like(params[name]["query"]),
            "gain": np.ones_like(params[name]["gain"]),
        }
        for name in ("reads", "final_read")
    }


def without_reads(params):
    """The parameters of the standard-residual model with the same weights."""
    return {name: leaf for name, leaf in params.items() if name not in ("reads", "final_read")}
