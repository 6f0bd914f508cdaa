"""Phase 1 with its gradient: joins the forward and backward kernels, whichever the accelerator.

The gradient keeps the sources themselves, their inverse RMS, and the logits and log-sum-exp of the
reads: nothing that is as wide as a source. The sources are also a result. Whoever reads them next
takes that, so that its gradients arrive here as cotangents, and are added to in place.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from pallas_kernels.inter_block import gpu_launch, tpu_launch
from pallas_kernels.inter_block.call import Call, Values
from pallas_kernels.sharding import on_each_device, reshard, sum_over_tokens, token_axes

STATISTICS_NAME = "depth_attention_statistics"
"""`checkpoint_name` of the scalars per token that the gradient keeps."""
OUTPUT_NAME = "depth_attention_output"
"""`checkpoint_name` of the outputs."""

_LAUNCHERS: dict[str, Any] = {"mosaic_tpu": tpu_launch, "triton_gpu": gpu_launch}


class Result(NamedTuple):
    """What a read of S queries returns.

    Attributes:
        outputs: S arrays `[..., d]` in the dtype of the sources.
        lse: Log-sum-exp of the logits, float32 `[s, ...]`.
        logits: float32 `[s, n, ...]`; at most -1e30 for rows past a bank's count.
        inverse_rms: Of each source and token, float32 `[n, ...]`. Not differentiable.
        values: The sources, to be read from now on.
    """

    outputs: tuple[jax.Array, ...]
    lse: jax.Array
    logits: jax.Array
    inverse_rms: jax.Array
    values: Values


def unsupported(values: Values, num_reads: int, implementation: str) -> str | None:
    """Returns why the kernels cannot read these sources, or None if they can.

    Args:
        values: n arrays `[..., d]`, or a bank `[n, ..., d]`.
        num_reads: How many queries read them together.
        implementation: "mosaic_tpu" or "triton_gpu".
    """
    return _LAUNCHERS[implementation].unsupported(values, num_reads)


def inter_block(
    values: Values,
    folded_sd: jax.Array,
    *,
    eps: float,
    implementation: Literal["mosaic_tpu", "triton_gpu"],
    count: jax.Array | None = None,
    inverse_rms: jax.Array | None = None,
    tiling: Any = None,
    interpret: Any = False,
) -> Result:
    """Reads sources with S queries at once: `o_s = sum_n softmax_n(<w_s, v_n> r_n) v_n`.

    Args:
        values: n arrays `[..., d]` of one shape and dtype, or a bank `[n, ..., d]`.
        folded_sd: float32 products of pseudo-query and key-norm gain.
        eps: Added to the mean square of each source.
        implementation: Whose kernels.
        count: How many leading rows of the bank count, int32. The others are neither fetched nor
            touched, and get zero gradient.
        inverse_rms: `r` of the leading sources, from an earlier result. Saves work on TPUs.
        tiling: How those kernels are launched; None chooses it.
        interpret: Passed to `pallas_call`: how to run TPU kernels on a CPU.

    Returns:
        See `Result`. Reverse mode only.
    """
    call = Call(implementation, eps, tiling, interpret)
    by_token = _Specs(token_axes(values[0].shape))
    specs = by_token.values(not isinstance(values, tuple)), by_token.whole
    # Outside the rule, so that gradients have the types of what they are gradients of.
    values, folded_sd = reshard((values, folded_sd), specs)
    return _read(call, values, folded_sd, count, inverse_rms)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(call, values, folded_sd, count, inverse_rms):
    return _run_forward(call, values, folded_sd, count, inverse_rms)[0]


def _read_forward(call, values, folded_sd, count, inverse_rms):
    values, folded_sd, count, inverse_rms = jax.tree.map(
        lambda x: x.value, (values, folded_sd, count, inverse_rms), is_leaf=_is_primal
    )
    result, exact = _run_forward(call, values, folded_sd, count, inverse_rms)
    kept = values, folded_sd, count, result.lse, result.logits, result.inverse_rms
    return result, (kept, exact)


def _read_backward(call, residuals, cotangents):
    (values, folded_sd, count, lse, logits, inverse_rms), outputs = residuals
    doutputs, dlse, dlogits, _, dvalues = cotangents
    doutputs, dlse = _instantiate(doutputs), _instantiate(dlse)
    dlogits = None if _is_zero(dlogits) else dlogits
    if count is not None and dlogits is not None:
        # The logits of rows that do not count are constants.
        row = jax.lax.broadcasted_iota(jnp.int32, dlogits.shape, 1)
        dlogits = jnp.where(row < count, dlogits, 0.0)
    if all(map(_is_zero, jax.tree.leaves(dvalues, is_leaf=_is_zero))):
        dvalues = None
    dvalues, dfolded_sd = _run_backward(
        call,
        (values, folded_sd, count, lse, logits, inverse_rms, outputs),
        (doutputs, dlse, dlogits, _instantiate(dvalues)),
    )
    return dvalues, dfolded_sd, None, None


_read.defvjp(_read_forward, _read_backward, symbolic_zeros=True)


def _run_forward(call, values, folded_sd, count, inverse_rms):
    bank = not isinstance(values, tuple)
    n, (*leading, d), s = len(values), values[0].shape, folded_sd.shape[0]
    if not math.prod(leading):
        lse, logits, inverse_rms = (jnp.zeros((*shape, *leading)) for shape in ((s,), (s, n), (n,)))
        return Result((values[0],) * s, lse, logits, inverse_rms, values), None
    spec, launch = token_axes(values[0].shape), _LAUNCHERS[call.implementation]

    def run(values, folded_sd, count, inverse_rms):
        local = values[0].shape[:-1]
        flat = jax.tree.map(partial(_flatten_rows, bank=bank), values)
        known = None if inverse_rms is None else inverse_rms.reshape(inverse_rms.shape[0], -1)
        outputs, *scalars = launch.run_forward(call, flat, folded_sd, count, known)
        outputs = tuple(x.reshape(*local, d) for x in outputs)
        return outputs, *(x.reshape(*x.shape[:-1], *local) for x in scalars)

    by_token = _Specs(spec)
    exact, lse, logits, inverse_rms = on_each_device(
        run,
        spec,
        (by_token.values(bank), by_token.whole, by_token.whole, by_token.statistics(1)),
        (by_token.rows, *map(by_token.statistics, (1, 2, 1))),
    )(values, folded_sd, count, inverse_rms)
    lse, logits, inverse_rms = checkpoint_name((lse, logits, inverse_rms), STATISTICS_NAME)
    outputs = checkpoint_name(tuple(x.astype(values[0].dtype) for x in exact), OUTPUT_NAME)
    result = Result(outputs, lse, logits, inverse_rms, values)
    if not launch.needs_outputs(call, values, s):
        return result, None
    # Each launch of the backward sees a part of the softmax, whose gradient needs the whole output,
    # better than bfloat16 holds it: hence what rounding took off.
    pairs = zip(exact, outputs, strict=True)
    return result, (outputs, tuple((x - _f32(o)).astype(o.dtype) for x, o in pairs))


def _run_backward(call, kept, cotangents):
    values, folded_sd, count, lse, logits, inverse_rms, outputs = kept
    doutputs, dlse, dlogits, dvalues = cotangents
    bank = not isinstance(values, tuple)
    if not values[0].size:
        return values if dvalues is None else dvalues, jnp.zeros_like(folded_sd)
    spec, launch = token_axes(values[0].shape), _LAUNCHERS[call.implementation]

    def run(values, folded_sd, count, statistics, outputs, doutputs, dvalues):
        rows = partial(_flatten_rows, bank=False)
        flat = partial(jax.tree.map, partial(_flatten_rows, bank=bank))
        tokens = math.prod(values[0].shape[:-1])
        statistics = jax.tree.map(lambda x: x.reshape(*x.shape[:-leading], tokens), statistics)
        dvalues, dfolded = launch.run_backward(
            call,
            flat(values),
            folded_sd,
            count,
            statistics,
            jax.tree.map(rows, outputs),
            jax.tree.map(rows, doutputs),
            flat(dvalues),
        )
        dvalues = jax.tree.map(lambda x, like: x.reshape(like.shape), dvalues, values)
        return dvalues, sum_over_tokens(dfolded, spec)

    leading = values[0].ndim - 1
    by_token = _Specs(spec)
    stats = by_token.statistics
    return on_each_device(
        run,
        spec,
        (
            by_token.values(bank),
            by_token.whole,
            by_token.whole,
            (stats(1), stats(2), stats(1), stats(1), stats(2)),
            by_token.rows,
            by_token.rows,
            by_token.values(bank),
        ),
        (by_token.values(bank), by_token.whole),
    )(
        values,
        folded_sd,
        count,
        (lse, logits, inverse_rms, dlse, dlogits),
        outputs,
        doutputs,
        dvalues,
    )


class _Specs:
    """How the arguments of a kernel are cut, given how tokens are."""

    def __init__(self, tokens: PartitionSpec | None):
        self.tokens = tokens or PartitionSpec()
        self.rows, self.whole = PartitionSpec(*self.tokens, None), PartitionSpec()

    def statistics(self, before: int) -> PartitionSpec:
        """`[..., t]` with so many dimensions before the tokens."""
        return PartitionSpec(*[None] * before, *self.tokens)

    def values(self, bank: bool) -> PartitionSpec:
        """Sources, of either form."""
        return PartitionSpec(None, *self.rows) if bank else self.rows


def _flatten_rows(x: jax.Array, *, bank: bool) -> jax.Array:
    return x.reshape(x.shape[0], -1, x.shape[-1]) if bank else x.reshape(-1, x.shape[-1])


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _instantiate(tree: Any) -> Any:
    """Turns the zeros that reverse mode knows of into arrays."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.aval.shape, x.aval.dtype) if _is_zero(x) else x,
        tree,
        is_leaf=_is_zero,
    )


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
