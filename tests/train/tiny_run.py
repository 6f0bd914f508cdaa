"""A run that trains in a second: a few kilobytes of text and a model of one layer."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnres_jax import ModelConfig
from attnres_jax.parallel import MeshConfig, make_mesh
from train.config import Config, DataConfig, OptimizerConfig

VOCAB = 11  # Of the stand-in, unless told otherwise.
MODEL = ModelConfig(
    vocab_size=257, width=16, num_layers=1, num_heads=2, feed_forward_width=24, block_size=1
)


def write_text(folder: pathlib.Path) -> str:
    """Writes 40 small documents and returns the pattern that finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    words = ["attention", "residual", "block", "depth", "source", "query", "\n"]
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(" ".join(rng.choice(words, 60)))
    return str(folder / "*.txt")


def tiny_config(folder: pathlib.Path, **changes: Any) -> Config:
    """A configuration of a run in `folder`; a change may name a field as optimizer__name."""
    nested: dict[str, dict[str, Any]] = {"data": {}, "optimizer": {}, "model": {}}
    for name in [name for name in changes if "__" in name]:
        part, field = name.split("__")
        nested[part][field] = changes.pop(name)
    fields: dict[str, Any] = {
        "model": dataclasses.replace(MODEL, **nested["model"]),
        "data": DataConfig(
            **{"source": "text", "paths": (write_text(folder / "text"),)} | nested["data"]
        ),
        "optimizer": OptimizerConfig(**{"warmup_steps": 2} | nested["optimizer"]),
        "workdir": str(folder / "run"),
        "steps": 12,
        "batch_size": 8,
        "context": 16,
        "log_every": 1,
        "evaluate_every": 6,
        "evaluation_tokens": 500,
        "checkpoint_every": 4,
    }
    return Config(**fields | changes)


def one_device() -> jax.sharding.Mesh:
    """A mesh that compiles faster than that of the eight devices of the tests."""
    return make_mesh(MeshConfig(), jax.devices()[:1])


class _Layers(nnx.Module):
    def __init__(self, key: jax.Array):
        self.up_kernel = nnx.Param(jax.random.normal(key, (2, 8, 8)) / 3)


class _Reads(nnx.Module):
    def __init__(self):
        self.query = nnx.Param(jnp.zeros((2, 8)))


class StandIn(nnx.Module):
    """Has the interface of TransformerLM and compiles in no time.

    Its second read mixes three sources evenly until the queries move.
    """

    def __init__(self, compute_dtype: str = "float32", vocab_size: int = VOCAB):
        key = jax.random.key(0)
        self.dtype = compute_dtype
        self.embedding_table = nnx.Param(jax.random.normal(key, (vocab_size, 8)))
        self.feed_forward = _Layers(key)
        self.reads = _Reads()

    def __call__(self, tokens_bt: jax.Array, *, capture: bool = False):
        table_vd = self.embedding_table[...].astype(self.dtype)
        hidden_btd = table_vd[tokens_bt]
        sources = [hidden_btd]
        for kernel_df in self.feed_forward.up_kernel[...].astype(self.dtype):
            sources.append(jnp.tanh(sources[-1] @ kernel_df))
        logits_nbt = jnp.stack([jnp.einsum("btd,d->bt", s, self.reads.query[1]) for s in sources])
        alpha_nbt = jax.nn.softmax(logits_nbt.astype(jnp.float32), axis=0)
        mixed_btd = sum(a[..., None] * s for a, s in zip(alpha_nbt, sources, strict=True))
        logits_btv = jnp.einsum("btd,vd->btv", mixed_btd, table_vd.astype(jnp.float32))
        if not capture:
            return logits_btv
        ones = jnp.ones((1, *tokens_bt.shape))
        return logits_btv, {"depth_weights": [ones, alpha_nbt], "hidden_norm": jnp.ones(2)}
