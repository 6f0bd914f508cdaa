"""Measuring a model on text, in its own forward pass."""

import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax.diagnostics.dilution import dilution
from attnres_jax.diagnostics.per_token import per_token_arrays
from attnres_jax.diagnostics.record import Diagnostics
from attnres_jax.diagnostics.stacked import Stacked, mean_norms, stack
from attnres_jax.models import TransformerLM
from attnres_jax.models.capture import Probes
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
    states = captured["states"]
    stacked = stack(states, captured["finished"])
    norms = partial(mean_norms, weights_bt=weights_bt)
    arrays: dict[str, jax.Array] = {}
    if stacked.weights is not None and stacked.finished is not None:
        alpha_ln = jnp.einsum("lnbt,bt->ln", stacked.weights, weights_bt)
        arrays["depth_weights"] = jnp.where(stacked.is_source, alpha_ln, jnp.nan)
        arrays["entropy"] = jnp.einsum("lbt,bt->l", _entropy(stacked), weights_bt)
        finished_n = norms(stacked.finished)
        arrays["block_norm"] = finished_n[1:]
        norms_ln = jnp.broadcast_to(finished_n[None], alpha_ln.shape)
        if stacked.partial_sums is not None:
            of_partial_sum_l = stacked.at_partial_sums(norms(stacked.partial_sums))
            norms_ln = jnp.where(stacked.is_partial_sum, of_partial_sum_l[:, None], norms_ln)
        arrays["source_norm"] = jnp.where(stacked.is_source, norms_ln, jnp.nan)
    arrays["sublayer_norm"] = norms(stacked.outputs[1:])
    arrays["read_norm"] = norms(stacked.hidden)
    arrays["dilution"] = dilution(stacked, block_size, weights_bt)
    if gradient is not None:
        of_reads = jnp.concatenate(
            [
                _through_norms(model, stacked, gradient.received),
                gradient.final.astype(jnp.float32)[None],
            ]
        )
        arrays["gradient_norm_sublayer"] = norms(gradient.output) / total
        arrays["gradient_norm_read"] = norms(of_reads) / total
    if lens:
        arrays["logit_lens_loss"] = _lens(model, stacked, loss, loss_of)
    if per_token and stacked.weights is not None:
        arrays |= per_token_arrays(model, states, stacked)
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


def _entropy(stacked: Stacked) -> jax.Array:
    """Over log n, 0 where n is 1: `[l, b, t]`."""
    # xlogy: a weight of zero adds nothing, where 0 * log 0 is NaN.
    entropy_lbt = -jnp.sum(jax.scipy.special.xlogy(stacked.weights, stacked.weights), axis=1)
    most_l = np.log(np.maximum(stacked.num_sources, 2)).astype(np.float32)
    is_choice_l = stacked.num_sources > 1
    return jnp.where(is_choice_l[:, None, None], entropy_lbt / most_l[:, None, None], 0.0)


def _through_norms(model: TransformerLM, stacked: Stacked, gradient_lbtd: jax.Array) -> jax.Array:
    """From gradients to what the sub-layers received to those of what their reads returned."""
    gains = (model.attention_norm.gain[...], model.feed_forward_norm.gain[...])
    gain_ld = jnp.stack(gains, axis=1).reshape(-1, gains[0].shape[-1])
    eps_l = np.array([model.norm_eps(int(n)) for n in stacked.num_sources[:-1]], np.float32)

    def through_norm(one):
        hidden_btd, gain_d, eps, gradient_btd = one
        pull = jax.vjp(lambda hidden_btd: rms_norm(hidden_btd, gain_d, eps=eps), hidden_btd)[1]
        return pull(gradient_btd.astype(jnp.float32))[0]

    return jax.lax.map(
        through_norm, (stacked.hidden[:-1], gain_ld, jnp.asarray(eps_l), gradient_lbtd)
    )


def _lens(
    model: TransformerLM,
    stacked: Stacked,
    last_loss: jax.Array,
    loss_of: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The loss of the head at every read, one after the other, so that one has logits at a time."""
    losses, start = [], 0
    for _, group in itertools.groupby(stacked.num_sources[:-1].tolist(), key=model.norm_eps):
        num_sources = list(group)
        hidden_lbtd = stacked.hidden[start : start + len(num_sources)]
        start += len(num_sources)
        head = partial(model.head, num_sources=num_sources[0])

        def loss_at(hidden_btd: jax.Array, head=head) -> jax.Array:
            return loss_of(head(hidden_btd.astype(model.config.compute_dtype)))

        losses.append(jax.lax.map(loss_at, hidden_lbtd))
    return jnp.concatenate([*losses, last_loss[None]])
