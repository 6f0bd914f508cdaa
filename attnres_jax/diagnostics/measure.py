"""Measuring a model on text, in its own forward pass."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from attnres_jax.diagnostics.dilution import dilution
from attnres_jax.diagnostics.per_token import per_token_arrays
from attnres_jax.diagnostics.record import Diagnostics
from attnres_jax.diagnostics.reductions import mean_norm, pad
from attnres_jax.models import TransformerLM
from attnres_jax.models.capture import Probes, ReadState
from attnres_jax.ops import rms_norm


def diagnose(
    model: TransformerLM,
    tokens_bt: jax.Array,
    *,
    weights_bt: jax.Array | None = None,
    gradients: bool = True,
    lens: bool = True,
    per_token: bool = False,
) -> Diagnostics:
    r"""Measures what a model reads over depth and how large it is there.

    Everything is taken from one forward pass of the model itself and, for the gradients, its
    reverse. Call it inside `jax.jit`; sharded, scanned and rematerialised models need nothing more:

        measure = jax.jit(lambda params, tokens: diagnose(nnx.merge(graphdef, params), tokens))

    With h_i what read i returns, before the norm that follows it, v_j the outputs (the embedding is
    v_0) and alpha the depth weights, the arrays are, averaged over tokens:

    - `depth_weights`: alpha of every read.
    - `entropy`: `-sum_n alpha_n log(alpha_n) / log(number of sources)`, from 0 (one source takes
      all) to 1 (all weigh the same); 0 for a read with a single source.
    - `sublayer_norm`, `source_norm`, `read_norm`, `block_norm`: root mean square over the width of
      v_1 .. v_L, of each source of each read, of h_i, and of the block sums b_1 .. b_N.
    - `dilution`: the share of v_j in h_i. A source s that sums outputs gives each the share of its
      projection, and passes on its depth weight in these shares:

          share_ij = alpha_{s,i} <v_j, s> / <s, s>        s the source that holds v_j

      In Full every source is one output, so this is its depth weight. In the standard residual the
      one source is h_i itself, so it is `<v_j, h_i> / <h_i, h_i>`. Shares sum to 1; a projection
      against the sum is negative. A source that is zero is shared evenly.
    - `gradient_norm_sublayer`, `gradient_norm_read`: root mean square over the width of the
      gradient of the mean loss with respect to v_1 .. v_L, and to h_i as the sub-layer behind it
      (or the head) reads it: in the standard residual, without what the stream carries on.
    - `logit_lens_loss`: mean loss, in nats, if the final norm and the head read h_i, each with its
      own statistics. There is no single stream under Attention Residuals: h_i is the mixture that
      sub-layer i reads. The last is the model's own loss.

    `depth_weights`, `entropy`, `source_norm` and `block_norm` are absent for standard residuals.

    Args:
        model: Any residual.
        tokens_bt: Integer ids `[b, t + 1]`: the model reads all but the last and predicts all but
            the first.
        weights_bt: Weight of each predicted token in averages and loss, `[b, t]`, 0 for padding;
            all alike if None.
        gradients: Whether to take the gradients, which cost a backward pass.
        lens: Whether to take the logit lens, which costs L heads.
        per_token: Whether to add, for every token, `depth_weights_per_token`; `logits_per_token`,
            what the softmax is of; and, for reads in two phases, `lse_per_token` of phase 1 and
            `gate_per_token`, the weight of the partial sum. Not for standard residuals.

    Returns:
        float32 arrays with named axes. A gradient that was not asked for is absent.

    Raises:
        ValueError: The tokens are not `[b, t + 1]`, or the weights not `[b, t]`.

    References:
        Attention Residuals, arXiv:2603.15031, sections 5.2 (norms and gradients) and 5.4 (weights).
    """
    if tokens_bt.ndim != 2 or tokens_bt.shape[1] < 2:
        raise ValueError(
            "tokens_bt: expected [b, t + 1] ids with t >= 1, the last of which is only predicted;"
            f" got {list(tokens_bt.shape)}"
        )
    inputs_bt, targets_bt = tokens_bt[:, :-1], tokens_bt[:, 1:]
    if weights_bt is None:
        weights_bt = jnp.ones(targets_bt.shape)
    if weights_bt.shape != targets_bt.shape:
        raise ValueError(
            f"weights_bt: expected {list(targets_bt.shape)}, one for each predicted token,"
            f" got {list(weights_bt.shape)}"
        )
    total = jnp.sum(weights_bt.astype(jnp.float32))
    weights_bt = weights_bt.astype(jnp.float32) / total

    def loss_of(logits_btv: jax.Array) -> jax.Array:
        return jnp.sum(_nats(logits_btv, targets_bt) * weights_bt)

    def forward(probes: Probes | None):
        logits_btv, captured = model(inputs_bt, capture=True, probes=probes)
        loss = loss_of(logits_btv)
        # The gradient of the summed loss stays in the range of float16; it is divided below.
        return loss * total, (loss, captured)

    config = model.config
    num_sublayers = 2 * config.num_layers
    if gradients:
        shape = (num_sublayers, *inputs_bt.shape, config.width)
        zeros = jnp.zeros(shape, config.compute_dtype)
        probes = Probes(zeros, zeros, zeros[0])
        gradient, (loss, captured) = jax.grad(forward, has_aux=True)(probes)
    else:
        gradient, (loss, captured) = None, forward(None)[1]

    block_size = {"standard": None, "full": 1, "block": config.block_size}[config.residual]
    states, finished = captured["states"], captured["finished"]
    outputs = [finished[0], *(state.output for state in states[:-1])]
    norm = partial(mean_norm, weights_bt=weights_bt)
    arrays: dict[str, jax.Array] = {}
    if block_size is not None:
        alphas = captured["depth_weights"]
        arrays["depth_weights"] = pad([jnp.einsum("nbt,bt->n", a, weights_bt) for a in alphas])
        arrays["entropy"] = jnp.stack([jnp.sum(_entropy(a) * weights_bt) for a in alphas])
        finished_norms = [norm(source) for source in finished]
        partial_norms = [
            [] if state.partial_sum is None else [norm(state.partial_sum)] for state in states
        ]
        arrays["source_norm"] = pad(
            [
                jnp.stack([*finished_norms[: len(a) - len(partial)], *partial])
                for a, partial in zip(alphas, partial_norms, strict=True)
            ]
        )
        arrays["block_norm"] = jnp.stack(finished_norms[1:])
    arrays["sublayer_norm"] = jnp.stack([norm(output) for output in outputs[1:]])
    arrays["read_norm"] = jnp.stack([norm(state.hidden) for state in states])
    arrays["dilution"] = pad(dilution(states, finished, outputs, block_size, weights_bt))
    if gradient is not None:
        arrays["gradient_norm_sublayer"] = jnp.stack([norm(g) for g in gradient.output]) / total
        pulled = [
            _through_norm(model, states, i, gradient.received[i]) for i in range(num_sublayers)
        ]
        arrays["gradient_norm_read"] = (
            jnp.stack([norm(g) for g in [*pulled, gradient.final]]) / total
        )
    if lens:
        arrays["logit_lens_loss"] = _lens(model, states, loss, loss_of)
    if per_token and block_size is not None:
        arrays |= per_token_arrays(model, states, finished)
    return Diagnostics(
        arrays,
        config.residual,
        config.block_size if config.residual == "block" else None,
        num_sublayers,
    )


def _nats(logits_btv: jax.Array, targets_bt: jax.Array) -> jax.Array:
    """Cross-entropy of each target; NaN for one outside the vocabulary."""
    target_bt1 = jnp.take_along_axis(
        logits_btv, targets_bt[..., None], axis=-1, mode="fill", fill_value=jnp.nan
    )
    return jax.nn.logsumexp(logits_btv, axis=-1) - target_bt1[..., 0]


def _entropy(alpha_nbt: jax.Array) -> jax.Array:
    if alpha_nbt.shape[0] == 1:
        return jnp.zeros(alpha_nbt.shape[1:])
    # xlogy: a weight that underflowed to zero adds nothing, where 0 * log 0 is NaN.
    entropy_bt = -jnp.sum(jax.scipy.special.xlogy(alpha_nbt, alpha_nbt), axis=0)
    return entropy_bt / math.log(alpha_nbt.shape[0])


def _through_norm(
    model: TransformerLM, states: Sequence[ReadState], index: int, gradient_btd: jax.Array
) -> jax.Array:
    """From the gradient to what a sub-layer received to that of what its read returned."""
    norms = (model.attention_norm, model.feed_forward_norm)
    gain_d = norms[index % 2].gain[...][index // 2]
    eps = model.norm_eps(_num_sources(states[index]))
    hidden_btd = states[index].hidden.astype(jnp.float32)
    pull = jax.vjp(lambda hidden_btd: rms_norm(hidden_btd, gain_d, eps=eps), hidden_btd)[1]
    return pull(gradient_btd.astype(jnp.float32))[0]


def _lens(
    model: TransformerLM,
    states: Sequence[ReadState],
    last_loss: jax.Array,
    loss_of: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The loss of the head at every read, one after the other, so that one has logits at a time."""

    def norm_eps(state: ReadState) -> float:
        return model.norm_eps(_num_sources(state))

    losses = []
    for _, group in itertools.groupby(states[:-1], key=norm_eps):
        alike = list(group)
        head = partial(model.head, num_sources=_num_sources(alike[0]))
        hidden_lbtd = jnp.stack([s.hidden.astype(states[-1].hidden.dtype) for s in alike])
        losses.append(
            jax.lax.map(lambda hidden_btd, head=head: loss_of(head(hidden_btd)), hidden_lbtd)
        )
    return jnp.concatenate([*losses, last_loss[None]])


def _num_sources(state: ReadState) -> int:
    return 1 if state.weights is None else state.weights.shape[0]
