"""A stack of small sub-layers as a pipeline, and the same as one loop written from the paper."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from attnres_jax import ModelConfig
from attnres_jax.ops import depth_attention
from attnres_jax.parallel import cross_stage, layout, pipeline, ring
from attnres_jax.parallel.chunk import run_chunk
from attnres_jax.parallel.layers import Program
from attnres_jax.parallel.schedules import ORDERS, Schedule

B, T, D, EPS = 1, 2, 8, 1e-6
MAX_SUBLAYERS, MAX_MICROBATCHES = 24, 16
"""What the oracle is compiled for, once: shorter inputs are filled up with zeros."""


def random_params(num_sublayers: int, seed: int = 0) -> dict[str, Any]:
    """In layer order; queries and gains away from their initial values."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    layers = num_sublayers // 2
    return {
        "attention": {"kernel": normal(layers, D, D) / np.float32(D**0.5)},
        "feed_forward": {"kernel": normal(layers, D, D) / np.float32(D**0.5)},
        "attention_norm": {"gain": 1 + 0.3 * normal(layers, D)},
        "feed_forward_norm": {"gain": 1 + 0.3 * normal(layers, D)},
        "reads": {
            "query": 0.3 * normal(num_sublayers, D),
            "gain": 1 + 0.3 * normal(num_sublayers, D),
        },
        "final_read": {"query": 0.3 * normal(D), "gain": 1 + 0.3 * normal(D)},
    }


def apply(kind, state, x):
    hidden = jnp.einsum("btd,de->bte", x, state["kernel"])
    return jnp.sin(hidden) if kind == "attention" else hidden / (1 + jnp.square(hidden))


def inputs(microbatches: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and weights of the results, `[m, b, t, d]` each."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((microbatches, B, T, D))
    weights = rng.uniform(0.5, 1.5, x.shape)
    return x.astype(np.float32), weights.astype(np.float32)


def value_and_gradients(*arguments):
    """`(params, x, weights) -> (loss, gradients of params and x)`, compiled."""
    return jax.jit(jax.value_and_grad(make_loss(*arguments), argnums=(0, 1)))


def make_loss(microbatches, partition, executor, exchange="cached", implementation="xla"):
    """`(params in layer order, x, weights) -> loss` through a pipeline.

    The loss is `sum <weights, 1 + sin(final read)>` over microbatches.
    """
    stages = partition.stages
    order = ORDERS[executor == "one_f_one_b"]
    schedule = Schedule(stages, partition.virtual_stages, microbatches, order)
    config = ModelConfig(
        vocab_size=2,
        width=D,
        num_layers=partition.num_sublayers // 2,
        num_heads=1,
        feed_forward_width=D,
        block_size=partition.block_size,
        implementation=implementation,
    )
    the_pipeline = ring.Pipeline(
        partition,
        schedule,
        cross_stage.payload(partition, exchange),
        functools.partial(run_chunk, Program(config, partition, apply)),
        jnp.dtype("float32"),
    )

    def final_read(params, values):
        return depth_attention(tuple(values), params["query"], params["gain"], eps=EPS)

    def microbatch_loss(params, values, weights):
        return jnp.sum(weights * (1 + jnp.sin(final_read(params, values))))

    def region(staged, final, x, weights):
        staged = jax.tree.map(lambda leaf: jnp.squeeze(leaf, 1), staged)
        if executor == "one_f_one_b":
            loss = pipeline.one_f_one_b(the_pipeline, microbatch_loss, staged, final, x, weights)
        else:
            hidden = getattr(pipeline, executor)(the_pipeline, final_read, staged, final, x)
            is_last = jax.lax.axis_index("stage") == stages - 1
            loss = jnp.where(is_last, jnp.sum(weights * (1 + jnp.sin(hidden))), 0.0)
        return jax.lax.psum(loss, "stage")

    mesh = jax.make_mesh((stages,), ("stage",), (AxisType.Auto,), devices=jax.devices()[:stages])
    sharded = jax.shard_map(
        region,
        mesh=mesh,
        in_specs=(PartitionSpec(None, "stage"), *(PartitionSpec(),) * 3),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    def loss(params, x, weights):
        staged = layout.to_pipeline(params, partition)
        final = staged.pop("final_read")
        return sharded(staged, final, x, weights)

    return loss


@jax.jit
def _oracle(trained, x, weights, sums, filled, is_attention):
    def rms(x, gain):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * gain

    def read(outputs, sums, filled, query, gain):
        sources = jnp.einsum("nj,j...->n...", sums, outputs)
        logits = jnp.einsum("d,n...d->n...", query, rms(sources, gain))
        logits = jnp.where(filled[:, None, None, None], logits, -jnp.inf)
        return jnp.einsum("n...,n...d->...d", jax.nn.softmax(logits, 0), sources)

    def loss(trained, x):
        reads, final, norm_gain, kernel = trained

        def sublayer(outputs, one):
            i, sums, filled, query, gain, norm_gain, kernel, is_attention = one
            inner = rms(read(outputs, sums, filled, query, gain), norm_gain) @ kernel
            output = jnp.where(is_attention, jnp.sin(inner), inner / (1 + inner**2))
            return outputs.at[i + 1].set(output), None

        size = len(kernel)
        outputs = jnp.zeros((size + 1, *x.shape), x.dtype).at[0].set(x)
        steps = (jnp.arange(size), sums[:-1], filled[:-1], reads["query"], reads["gain"])
        outputs, _ = jax.lax.scan(sublayer, outputs, (*steps, norm_gain, kernel, is_attention))
        hidden = read(outputs, sums[-1], filled[-1], final["query"], final["gain"])
        return jnp.sum(weights * (1 + jnp.sin(hidden)))

    return jax.value_and_grad(loss, argnums=(0, 1))(trained, x)


def oracle(block_size, params, x, weights):
    """The same loss and gradients in float64, without chunks, blocks that grow, or phases.

    A read's sources are sums of outputs, which a matrix of zeros and ones forms: `sums[n, j]`.
    """
    num_sublayers, microbatches = len(params["reads"]["query"]), len(x)
    size = MAX_SUBLAYERS + 1
    sums, filled = np.zeros((size, size, size)), np.zeros((size, size), bool)
    for i in (*range(size - 1), MAX_SUBLAYERS):
        # Sub-layers that only fill up read the embedding, and nothing reads them.
        end = num_sublayers if i == MAX_SUBLAYERS else i if i < num_sublayers else 0
        starts = range(1, end + 1, block_size)
        sources = [range(1), *(range(a, min(a + block_size, end + 1)) for a in starts)]
        for n, outputs in enumerate(sources):
            filled[i, n] = True
            sums[i, n, list(outputs)] = 1

    def in_order(name, leaf):
        both = [params[f"{kind}{name}"][leaf] for kind in ("attention", "feed_forward")]
        return np.stack(both, 1).reshape(num_sublayers, *both[0].shape[1:])

    def fill(leaf, size):
        return np.pad(leaf, ((0, size - len(leaf)), *((0, 0),) * (leaf.ndim - 1)))

    by_sublayer = params["reads"], in_order("_norm", "gain"), in_order("", "kernel")
    reads, norm_gain, kernel = jax.tree.map(lambda leaf: fill(leaf, MAX_SUBLAYERS), by_sublayer)
    trained = reads, params["final_read"], norm_gain, kernel
    x, weights = (fill(array, MAX_MICROBATCHES) for array in (x, weights))
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        doubles = jax.tree.map(
            lambda leaf: np.asarray(leaf, np.float64), (trained, x, weights, sums)
        )
        is_attention = np.arange(MAX_SUBLAYERS) % 2 == 0
        results = _oracle(*doubles, filled, is_attention)
        loss, ((reads, final_read, norm_gain, kernel), dx) = jax.tree.map(np.asarray, results)
    reads, norm_gain, kernel = jax.tree.map(
        lambda leaf: leaf[:num_sublayers], (reads, norm_gain, kernel)
    )
    gradients = {"reads": reads, "final_read": final_read}
    for i, kind in enumerate(("attention", "feed_forward")):
        gradients[kind] = {"kernel": kernel[i::2]}
        gradients[f"{kind}_norm"] = {"gain": norm_gain[i::2]}
    return loss, (gradients, dx[:microbatches])


def worst_error(actual, expected) -> float:
    """Largest error of any leaf, relative to the leaf's largest entry."""
    return max(
        float(np.max(np.abs(np.asarray(a, np.float64) - b)) / np.max(np.abs(b)))
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    )


def mutated(module, old: str, new: str) -> types.ModuleType:
    """A copy of a module with one piece of its source replaced."""
    with open(module.__file__) as file:
        source = file.read()
    assert source.count(old) == 1, f"{module.__name__} has {source.count(old)} times: {old}"
    copy = types.ModuleType(module.__name__)
    exec(compile(source.replace(old, new), f"mutated {module.__name__}", "exec"), copy.__dict__)
    return copy
