"""Attention Residuals in float64 numpy, from the paper (arXiv:2603.15031), gradients by hand.

The oracle shares no code with the library. A read of sources v_1..v_n with pseudo-query w and
key-norm gain g is equations 2 to 4:

    k_i = g * v_i / sqrt(mean_d(v_i**2) + eps)
    alpha = softmax_i(<w, k_i>)
    h = sum_i alpha_i v_i

A stack is written without any block bookkeeping. Let outputs 0..l-1 be the embedding and the
outputs of the sub-layers so far. In Full Attention Residuals a read attends to each of them. In
Block Attention Residuals it attends to sums of them: the embedding alone, then the sub-layer
outputs in runs of S, the last of which may be short (equations 5 and 6). The gradient to a sum is
the gradient to each of its terms.
"""

from typing import NamedTuple

import numpy as np


def normal(seed: int, *shape: int) -> np.ndarray:
    """Standard normal float64 array."""
    return np.random.default_rng(seed).standard_normal(shape)


def float64(tree):
    """The same tuples, lists and arrays in float64; values of narrower dtypes are kept exactly."""
    if tree is None:
        return None
    if isinstance(tree, (tuple, list)):
        return _like(tree, [float64(leaf) for leaf in tree])
    return np.asarray(tree).astype(np.float64)


def relative_error(actual, expected) -> float:
    """Relative L2 error; infinite for any difference from an expected zero, or for NaN."""
    actual, expected = float64(actual), float64(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    difference, size = np.linalg.norm(actual - expected), np.linalg.norm(expected)
    if not np.isfinite(difference):
        return np.inf
    if size == 0:
        return 0.0 if difference == 0 else np.inf
    return float(difference / size)


def rounding_floor(expected: np.ndarray, dtype) -> float:
    """Relative L2 error of `expected` when it is rounded once to `dtype`."""
    return relative_error(expected.astype(dtype), expected)


def directional_derivative(function, primals: tuple, tangents: tuple, step: float = 1e-5):
    """Central difference of `function` (which returns an array or a tuple) along the tangents."""
    after = function(*add(primals, tangents, step))
    before = function(*add(primals, tangents, -step))
    if isinstance(after, (tuple, list)):
        return _like(after, [(a - b) / (2 * step) for a, b in zip(after, before, strict=True)])
    return (after - before) / (2 * step)


def add(tree, other, scale: float = 1.0):
    """`tree + scale * other`, leaf by leaf."""
    if isinstance(tree, (tuple, list)):
        return _like(tree, [add(a, b, scale) for a, b in zip(tree, other, strict=True)])
    return tree + scale * other


def inner(tree, other) -> float:
    """Sum of the products of all leaves."""
    if isinstance(tree, (tuple, list)):
        return sum(inner(a, b) for a, b in zip(tree, other, strict=True))
    return float(np.sum(float64(tree) * float64(other)))


def normal_like(seed: int, tree):
    """Standard normal leaves of the same shapes."""
    if isinstance(tree, (tuple, list)):
        return _like(tree, [normal_like(seed + 31 * i + 1, leaf) for i, leaf in enumerate(tree)])
    return normal(seed, *np.shape(tree))


def _like(tree, items):
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


# --- RMSNorm -------------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def rms_norm_gradients(x, gain, eps, dnormalised):
    """Gradients to x and gain."""
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    dratio = dnormalised * gain
    dx = dratio / rms - x * (dratio * x).mean(-1, keepdims=True) / rms**3
    return dx, _over_tokens(dnormalised * x / rms)


def _over_tokens(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1]).sum(0)


# --- One read ------------------------------------------------------------------------------------


class Read(NamedTuple):
    output: np.ndarray  # [..., d]
    lse: np.ndarray  # [...]
    weights: np.ndarray  # [n, ...]


def read(sources, query, gain, eps: float = 1e-6) -> Read:
    logits = np.stack([(query * rms_norm(v, gain, eps)).sum(-1) for v in sources])
    largest = logits.max(0)
    total = np.exp(logits - largest).sum(0)
    weights = np.exp(logits - largest) / total
    output = sum(a[..., None] * v for a, v in zip(weights, sources, strict=True))
    return Read(output, largest + np.log(total), weights)


class ReadGradients(NamedTuple):
    sources: list[np.ndarray]
    query: np.ndarray
    gain: np.ndarray


def read_gradients(
    sources, query, gain, doutput, dlse=None, dweights=None, eps: float = 1e-6
) -> ReadGradients:
    """Gradients of `<doutput, output> + <dlse, lse> + <dweights, weights>`."""
    weights = read(sources, query, gain, eps).weights
    pulls = [(doutput * v).sum(-1) for v in sources]
    if dweights is not None:
        pulls = [pull + dweight for pull, dweight in zip(pulls, dweights, strict=True)]
    dsources, dquery, dgain = [], np.zeros_like(query), np.zeros_like(gain)
    for i, v in enumerate(sources):
        # alpha_i sum_j alpha_j (pull_i - pull_j): no cancellation where one weight is nearly one.
        dlogit = weights[i] * sum(
            alpha * (pulls[i] - pull) for alpha, pull in zip(weights, pulls, strict=True)
        )
        if dlse is not None:
            dlogit = dlogit + weights[i] * dlse
        dquery += _over_tokens(dlogit[..., None] * rms_norm(v, gain, eps))
        dv, dgain_of_key = rms_norm_gradients(v, gain, eps, dlogit[..., None] * query)
        dsources.append(weights[i][..., None] * doutput + dv)
        dgain += dgain_of_key
    return ReadGradients(dsources, dquery, dgain)


# --- A group of reads of the same sources --------------------------------------------------------


def group_read(sources, queries, gains, eps: float = 1e-6) -> list[Read]:
    return [read(sources, w, g, eps) for w, g in zip(queries, gains, strict=True)]


def group_read_gradients(
    sources, queries, gains, doutputs, dlse=None, dweights=None, eps: float = 1e-6
) -> ReadGradients:
    """Like `read_gradients`; the cotangents have one entry for each query."""
    each = [
        read_gradients(
            sources,
            queries[s],
            gains[s],
            doutputs[s],
            None if dlse is None else dlse[s],
            None if dweights is None else dweights[s],
            eps,
        )
        for s in range(len(queries))
    ]
    return ReadGradients(
        [sum(dv) for dv in zip(*[grads.sources for grads in each], strict=True)],
        np.stack([grads.query for grads in each]),
        np.stack([grads.gain for grads in each]),
    )


# --- Phase 2 -------------------------------------------------------------------------------------


class Merge(NamedTuple):
    summed: np.ndarray  # [..., d]
    hidden: np.ndarray  # [..., d]
    gate: np.ndarray  # [...]


def merge(
    output, lse, summed, query, gain, norm_gain=None, eps: float = 1e-6, norm_eps: float = 1e-6
) -> Merge:
    """Joins phase 1 with one more source, as algorithm 1 does, there with lse = m1 + log(l1).

    `summed` is the partial sum with the update already in it.
    """
    logit = (query * rms_norm(summed, gain, eps)).sum(-1)
    largest = np.maximum(lse, logit)
    finished, unfinished = np.exp(lse - largest), np.exp(logit - largest)
    joined = finished[..., None] * output + unfinished[..., None] * summed
    hidden = joined / (finished + unfinished)[..., None]
    gate = unfinished / (finished + unfinished)
    if norm_gain is not None:
        hidden = rms_norm(hidden, norm_gain, norm_eps)
    return Merge(summed, hidden, gate)


class MergeGradients(NamedTuple):
    output: np.ndarray
    lse: np.ndarray
    summed: np.ndarray  # The gradient to the partial sum and to the update alike.
    query: np.ndarray
    gain: np.ndarray
    norm_gain: np.ndarray | None


def merge_gradients(
    output,
    lse,
    summed,
    query,
    gain,
    dsummed,
    dhidden,
    dgate=None,
    norm_gain=None,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> MergeGradients:
    """Gradients of `<dsummed, summed> + <dhidden, hidden> + <dgate, gate>`."""
    logit = (query * rms_norm(summed, gain, eps)).sum(-1)
    largest = np.maximum(lse, logit)
    total = np.exp(lse - largest) + np.exp(logit - largest)
    rest, gate = np.exp(lse - largest) / total, np.exp(logit - largest) / total
    dnorm_gain = None
    if norm_gain is not None:
        h = rest[..., None] * output + gate[..., None] * summed
        dhidden, dnorm_gain = rms_norm_gradients(h, norm_gain, norm_eps, dhidden)
    pull = (dhidden * (summed - output)).sum(-1)
    if dgate is not None:
        pull = pull + dgate
    dlogit = rest * gate * pull
    dsummed_key, dgain = rms_norm_gradients(summed, gain, eps, dlogit[..., None] * query)
    return MergeGradients(
        output=rest[..., None] * dhidden,
        lse=-dlogit,
        summed=dsummed + gate[..., None] * dhidden + dsummed_key,
        query=_over_tokens(dlogit[..., None] * rms_norm(summed, gain, eps)),
        gain=dgain,
        norm_gain=dnorm_gain,
    )


# --- A stack of L sub-layers ---------------------------------------------------------------------


class Parameters(NamedTuple):
    """Of L reads before sub-layers `tanh(slope * x + shift)` and of the final read.

    Every read is followed by an RMSNorm: the sub-layer's own, or the final one.
    """

    queries: np.ndarray  # [l + 1, d]
    gains: np.ndarray  # [l + 1, d]
    norm_gains: np.ndarray  # [l + 1, d]
    slopes: np.ndarray  # [l, d]
    shifts: np.ndarray  # [l, d]


def stack_parameters(seed: int, n_sublayers: int, width: int, query_scale: float = 1.0):
    shape = (n_sublayers, width)
    more = (n_sublayers + 1, width)
    return Parameters(
        queries=query_scale * normal(seed, *more) / np.sqrt(width),
        gains=1 + 0.3 * normal(seed + 1, *more),
        norm_gains=1 + 0.3 * normal(seed + 2, *more),
        slopes=1 + 0.3 * normal(seed + 3, *shape),
        shifts=0.3 * normal(seed + 4, *shape),
    )


def attended_full(n_outputs: int) -> list[list[int]]:
    """Full Attention Residuals: each of the outputs 0..n-1 is a source."""
    return [[i] for i in range(n_outputs)]


def attended_block(n_outputs: int, block_size: int) -> list[list[int]]:
    """Block Attention Residuals: which outputs 0..n-1 each source sums."""
    starts = range(1, n_outputs, block_size)
    return [[0]] + [list(range(i, min(i + block_size, n_outputs))) for i in starts]


def _attended(n_outputs: int, block_size: int | None) -> list[list[int]]:
    if block_size is None:
        return attended_full(n_outputs)
    return attended_block(n_outputs, block_size)


def dilution(outputs, attended: list[list[int]], weights) -> np.ndarray:
    """Share of every output in a read, `[j, ...]`: its projection on the sum it is in, weighted.

    `attended` says which outputs each source sums, `weights` `[n, ...]` are its depth weights.
    """
    shares = np.zeros((len(outputs), *outputs[0].shape[:-1]))
    for js, weight in zip(attended, weights, strict=True):
        total = sum(outputs[j] for j in js)
        for j in js:
            shares[j] = weight * (outputs[j] * total).sum(-1) / (total * total).sum(-1)
    return shares


class Stack(NamedTuple):
    hidden: np.ndarray  # [..., d], after the final norm
    outputs: list[np.ndarray]  # the embedding and L outputs of sub-layers
    reads: list[Read]  # L + 1


def stack(
    embedding,
    parameters: Parameters,
    block_size: int | None,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> Stack:
    """The whole forward pass; `block_size` None is Full Attention Residuals."""
    outputs, reads = [embedding], []
    for i in range(len(parameters.queries)):
        sources = [sum(outputs[j] for j in js) for js in _attended(len(outputs), block_size)]
        reads.append(read(sources, parameters.queries[i], parameters.gains[i], eps))
        hidden = rms_norm(reads[-1].output, parameters.norm_gains[i], norm_eps)
        if i < len(parameters.slopes):
            outputs.append(np.tanh(parameters.slopes[i] * hidden + parameters.shifts[i]))
    return Stack(hidden, outputs, reads)


def stack_gradients(
    embedding,
    parameters: Parameters,
    block_size: int | None,
    dhidden,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> tuple[np.ndarray, Parameters]:
    """Gradients of `<dhidden, hidden>` to the embedding and to every parameter."""
    outputs, reads = stack(embedding, parameters, block_size, eps, norm_eps)[1:]
    doutputs = [np.zeros_like(embedding) for _ in outputs]
    grads = Parameters(*[np.zeros_like(p) for p in parameters])
    for i in reversed(range(len(parameters.queries))):
        if i < len(parameters.slopes):
            inner = doutputs[i + 1] * (1 - outputs[i + 1] ** 2)
            hidden = rms_norm(reads[i].output, parameters.norm_gains[i], norm_eps)
            grads.slopes[i] = _over_tokens(inner * hidden)
            grads.shifts[i] = _over_tokens(inner)
            dhidden = inner * parameters.slopes[i]
        dread, grads.norm_gains[i] = rms_norm_gradients(
            reads[i].output, parameters.norm_gains[i], norm_eps, dhidden
        )
        attended = _attended(i + 1, block_size)
        of_read = read_gradients(
            [sum(outputs[j] for j in js) for js in attended],
            parameters.queries[i],
            parameters.gains[i],
            dread,
            eps=eps,
        )
        grads.queries[i], grads.gains[i] = of_read.query, of_read.gain
        for js, dsource in zip(attended, of_read.sources, strict=True):
            for j in js:
                doutputs[j] += dsource
    return doutputs[0], grads
