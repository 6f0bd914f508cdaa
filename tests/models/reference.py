"""A decoder-only transformer in float64, written from the paper, for models of any residual.

The forward pass keeps all outputs: the embedding and those of the L sub-layers. What a read attends
to is a matrix of zeros and ones, `sums[n, j]`: source n is the sum of the outputs j with a one. All
residuals are such matrices:

    standard     one source, the sum of all outputs so far (its weight is 1, whatever the query)
    full         one source for each output
    block        the embedding alone, then outputs in runs of S

One program therefore serves all of them, and nothing here knows of phases or open blocks.
"""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnres_jax import ModelConfig, TransformerLM


class Setting(NamedTuple):
    """What differs between residuals, all of it numbers."""

    sums: np.ndarray  # [l + 1, n, j]
    filled: np.ndarray  # [l + 1, n], which sources there are
    norm_eps: np.ndarray  # [l + 1], of the norm after each read


def setting(num_sublayers: int, block_size: int | None, norm_eps, retrofit=False) -> Setting:
    """`block_size` None is the standard residual; Full is 1."""
    size = num_sublayers + 1
    sums, filled = np.zeros((size, size, size)), np.zeros((size, size), bool)
    for i in range(size):
        if block_size is None:
            sources = [range(i + 1)]
        else:
            starts = range(1, i + 1, block_size)
            sources = [range(1), *(range(a, min(a + block_size, i + 1)) for a in starts)]
        for n, outputs in enumerate(sources):
            filled[i, n] = True
            sums[i, n, list(outputs)] = 1
    counts = filled.sum(1)
    return Setting(sums, filled, norm_eps / counts**2 if retrofit else np.full(size, norm_eps))


def setting_of(config: ModelConfig) -> Setting:
    block_size = {"standard": None, "full": 1, "block": config.block_size}[config.residual]
    return setting(2 * config.num_layers, block_size, config.norm_eps, config.retrofit)


def _rms_norm(x, gain, eps):
    return gain * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _rotate(x_bthk, theta):
    """The halves of a head are real and imaginary parts; position turns each number's phase."""
    half = x_bthk.shape[-1] // 2
    phase = np.arange(x_bthk.shape[1])[:, None, None] * theta ** (-np.arange(half) / half)
    turned = (x_bthk[..., :half] + 1j * x_bthk[..., half:]) * jnp.exp(1j * phase)[None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def _attention(x, query, key, value, output, theta):
    q = _rotate(jnp.einsum("btd,dhk->bthk", x, query), theta)
    k = _rotate(jnp.einsum("btd,dhk->bthk", x, key), theta)
    v = jnp.einsum("btd,dhk->bthk", x, value)
    logits = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
    future = np.triu(np.ones(logits.shape[-2:], bool), 1)[None, None]
    weights = jax.nn.softmax(jnp.where(future, -jnp.inf, logits), axis=-1)
    return jnp.einsum("bhts,bshk,hkd->btd", weights, v, output)


def _logits(p, tokens, sums, filled, norm_eps, eps, theta, nudges=None):
    """`nudges` are added to outputs and to what is read, to differentiate with respect to them."""
    if nudges is None:
        nudges = {"output": np.zeros(len(norm_eps)), "read": np.zeros(len(norm_eps))}
    layers, size = p["attention"]["query_kernel"].shape[0], len(norm_eps)
    assert size == 2 * layers + 1
    outputs = [p["embedding_table"][tokens]]
    reads = []
    for i in range(size):
        sources = jnp.einsum("nj,jbtd->nbtd", sums[i][:, : i + 1], jnp.stack(outputs))
        logits = (p["queries"][i] * _rms_norm(sources, p["gains"][i], eps)).sum(-1)
        weights = jax.nn.softmax(jnp.where(filled[i][:, None, None], logits, -jnp.inf), axis=0)
        hidden = jnp.einsum("nbt,nbtd->btd", weights, sources)
        reads.append((weights, sources, jnp.sqrt((hidden * hidden).mean()), hidden, outputs[-1]))
        hidden = hidden + nudges["read"][i]
        if i == size - 1:
            break
        kind, layer = ("attention", "feed_forward")[i % 2], i // 2
        x = _rms_norm(hidden, p[f"{kind}_norm"]["gain"][layer], norm_eps[i])
        kernels = {name: kernel[layer] for name, kernel in p[kind].items()}
        if kind == "attention":
            names = ("query_kernel", "key_kernel", "value_kernel", "output_kernel")
            outputs.append(_attention(x, *(kernels[name] for name in names), theta))
        else:
            gate = x @ kernels["gate_kernel"]
            inner = gate / (1 + jnp.exp(-gate)) * (x @ kernels["up_kernel"])
            outputs.append(inner @ kernels["down_kernel"])
        outputs[-1] += nudges["output"][i]
    normed = _rms_norm(hidden, p["final_norm"]["gain"], norm_eps[-1])
    return normed @ p["head_kernel"], reads


def _loss(logits, targets, weights):
    log_likelihood = jax.nn.log_softmax(logits, axis=-1)
    return -(jnp.take_along_axis(log_likelihood, targets[..., None], -1)[..., 0] * weights).sum()


@jax.jit
def _points(p, tokens, targets, weights, nudges, *setting):
    def loss(nudges):
        logits, reads = _logits(p, tokens, *setting, nudges)
        return _loss(logits, targets, weights), reads

    gradients, reads = jax.grad(loss, has_aux=True)(nudges)
    lens = [
        _loss(_rms_norm(r[3], p["final_norm"]["gain"], eps) @ p["head_kernel"], targets, weights)
        for r, eps in zip(reads, setting[2], strict=True)
    ]
    return gradients, reads, lens


@jax.jit
def _logits_and_gradients(p, tokens, cotangent, *setting):
    logits, pullback, reads = jax.vjp(lambda p: _logits(p, tokens, *setting), p, has_aux=True)
    return logits, pullback(cotangent)[0], reads


class Result(NamedTuple):
    logits: np.ndarray  # [b, t, v]
    grads: dict  # like the model's parameters
    depth_weights: list  # [n, b, t] for each read
    sources: list  # [n, b, t, d] for each read
    hidden_norm: np.ndarray  # [l + 1]


def run(config: ModelConfig, params: dict, tokens, cotangent, with_setting=None) -> Result:
    """Logits, and the gradients of `<cotangent, logits>`, in float64.

    Args:
        config: A model's config.
        params: Its parameters as nested dicts of arrays.
        tokens: `[b, t]`.
        cotangent: `[b, t, v]`.
        with_setting: Another residual than the config's.
    """
    setting = with_setting or setting_of(config)
    p, repeats = _in_float64(config, params)
    has_reads, tied = "reads" in params, "head_kernel" not in params
    with _exactly():
        results = _logits_and_gradients(
            p,
            np.asarray(tokens),
            np.asarray(cotangent, np.float64),
            *setting,
            config.norm_eps,
            config.rope_theta,
        )
        logits, grads, reads_done = jax.tree.map(np.asarray, results)
    for name in ("key_kernel", "value_kernel"):
        layers, width, heads, head_width = grads["attention"][name].shape
        grouped = (layers, width, heads // repeats, repeats, head_width)
        grads["attention"][name] = grads["attention"][name].reshape(grouped).sum(3)
    if tied:
        grads["embedding_table"] = grads["embedding_table"] + grads.pop("head_kernel").T
    queries, gains = grads.pop("queries"), grads.pop("gains")
    if has_reads:
        grads["reads"] = {"query": queries[:-1], "gain": gains[:-1]}
        grads["final_read"] = {"query": queries[-1], "gain": gains[-1]}
    return Result(
        logits,
        grads,
        [r[0][filled] for r, filled in zip(reads_done, setting.filled, strict=True)],
        [r[1][filled] for r, filled in zip(reads_done, setting.filled, strict=True)],
        np.array([r[2] for r in reads_done]),
    )


class Points(NamedTuple):
    """What a forward pass has at each depth, and the gradients of the loss there."""

    depth_weights: list  # [n, b, t] for each read
    sources: list  # [n, b, t, d] for each read
    hidden: list  # [b, t, d] for each read
    outputs: list  # [b, t, d] for the embedding and each sub-layer
    output_gradients: np.ndarray  # [l, b, t, d]
    read_gradients: np.ndarray  # [l + 1, b, t, d]
    lens: np.ndarray  # [l + 1], loss of the head on each read


def points(config: ModelConfig, params: dict, tokens, weights) -> Points:
    """Everything at each depth in float64, for the loss `sum(weights * nats)`.

    Args:
        config: A model's config.
        params: Its parameters as nested dicts of arrays.
        tokens: `[b, t + 1]`, the last only predicted.
        weights: `[b, t]`.
    """
    setting = setting_of(config)
    p, _ = _in_float64(config, params)
    tokens = np.asarray(tokens)
    shape = (*weights.shape, config.width)
    nudges = {
        "output": np.zeros((2 * config.num_layers, *shape)),
        "read": np.zeros((2 * config.num_layers + 1, *shape)),
    }
    with _exactly():
        results = _points(
            p,
            tokens[:, :-1],
            tokens[:, 1:],
            np.asarray(weights, np.float64),
            nudges,
            *setting,
            config.norm_eps,
            config.rope_theta,
        )
        gradients, reads, lens = jax.tree.map(np.asarray, results)
    return Points(
        [r[0][filled] for r, filled in zip(reads, setting.filled, strict=True)],
        [r[1][filled] for r, filled in zip(reads, setting.filled, strict=True)],
        [r[3] for r in reads],
        [r[4] for r in reads],
        gradients["output"],
        gradients["read"],
        np.array(lens),
    )


def _in_float64(config, params):
    """The parameters as `_logits` takes them, and how often a key-value head is repeated."""
    size = 2 * config.num_layers + 1
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    reads, final_read = p.pop("reads", None), p.pop("final_read", None)
    if reads is None:
        p["queries"] = np.zeros((size, config.width))
        p["gains"] = np.ones((size, config.width))
    else:
        p["queries"] = np.concatenate([reads["query"], final_read["query"][None]])
        p["gains"] = np.concatenate([reads["gain"], final_read["gain"][None]])
    if "head_kernel" not in p:
        p["head_kernel"] = p["embedding_table"].T
    repeats = config.num_heads // (config.num_kv_heads or config.num_heads)
    for name in ("key_kernel", "value_kernel"):
        p["attention"] = p["attention"] | {name: p["attention"][name].repeat(repeats, axis=2)}
    return p, repeats


@contextlib.contextmanager
def _exactly():
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield


def random_params(config: ModelConfig, seed: int = 0, query_scale: float = 1.0) -> dict:
    """float32 parameters with nothing left at a special value: unit-scale table, uneven gains."""
    abstract = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        values = rng.standard_normal(leaf.shape)
        if path[-1] == "gain":
            values = 1 + 0.3 * values
        elif path[-1] == "query":
            values = query_scale * values / np.sqrt(config.width)
        elif path[-1] == "output_kernel":
            values /= np.sqrt(leaf.shape[-3] * leaf.shape[-2])
        elif path[0] == "attention":
            values /= np.sqrt(config.width)
        elif path[-1] != "embedding_table":
            values /= np.sqrt(leaf.shape[-2])
        return values.astype(np.float32)

    flat = {path: fill(path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(abstract))}
    return nnx.traversals.unflatten_mapping(flat)


def leaves(tree, path=()):
    """(dotted path, array) of every leaf of nested dicts."""
    if not isinstance(tree, dict):
        return [(".".join(path), tree)]
    return [pair for name in sorted(tree) for pair in leaves(tree[name], (*path, name))]
