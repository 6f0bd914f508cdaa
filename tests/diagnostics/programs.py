"""Compiled diagnostics of tiny models, shared by the tests of one process."""

import functools

import jax
import numpy as np
from flax import nnx

from attnres_jax import diagnose
from tests.models.programs import STANDARD, B, T, V, graphdef_of, tiny

STANDARD_MODEL = STANDARD
FULL = tiny(residual="full", tie_embeddings=False, retrofit=True, norm_eps=0.01)
GROUPED = tiny(block_size=3, reads_per_group=2)
SHORT = tiny(block_size=4, tie_embeddings=False)
SCANNED = tiny(block_size=6)
MODELS = {
    "standard": STANDARD_MODEL,
    "full, as a retrofit with a large eps": FULL,
    "block size 3 ends inside a layer, groups of two reads": GROUPED,
    "block size 4 leaves a short last block": SHORT,
    "block size 6 scans within its one block": SCANNED,
}


def text(batch: int = B) -> np.ndarray:
    """`[b, t + 1]`, the last only predicted."""
    return np.random.default_rng(3).integers(0, V, (batch, T + 1), dtype=np.int32)


def padded(batch: int = B) -> np.ndarray:
    """Uneven weights `[b, t]`, the last of which are padding."""
    weights_bt = np.random.default_rng(4).uniform(0.5, 2, (batch, T)).astype(np.float32)
    weights_bt[-1, 3:] = 0
    return weights_bt


@functools.cache
def measure(config, **options):
    """`(params, tokens, weights) -> Diagnostics`, compiled."""

    @jax.jit
    def run(params, tokens_bt, weights_bt):
        model = nnx.merge(graphdef_of(config), params)
        return diagnose(model, tokens_bt, weights_bt=weights_bt, **options)

    return run
