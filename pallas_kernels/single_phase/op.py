"""A single read with its gradient: joins the forward and backward kernels.

The gradient keeps the sources themselves, the new partial sum, and a few scalars per token. The
sources are also a result. Whoever reads them next takes that, so that its gradients arrive here as
cotangents, and are added to in place.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from pallas_kernels.merge.call import Call
from pallas_kernels.merge.op import OUTPUT_NAME, PARTIAL_SUM_NAME, STATISTICS_NAME
from pallas_kernels.sharding import on_each_device, sum_over_tokens, token_axes
from pallas_kernels.single_phase import gpu_launch, tpu_launch
from pallas_kernels.single_phase.tiling import MOST_SOURCES

_LAUNCHERS: dict[str, Any] = {"mosaic_tpu": tpu_launch, "triton_gpu": gpu_launch}


class Result(NamedTuple):
    """What a single read returns.

    Attributes:
        summed: The new partial sum, `[..., d]`.
        hidden: `[..., d]` in the dtype of the sources.
        weights: float32 `[n + 1, ...]`, the last of the partial sum.
        values: The sources, to be read from now on.
    """

    summed: jax.Array
    hidden: jax.Array
    weights: jax.Array
    values: tuple[jax.Array, ...]


def unsupported(
    values: tuple[jax.Array, ...], summed: jax.Array, implementation: str
) -> str | None:
    """Returns why the kernels cannot read these arrays, or None if they can.

    Args:
        values: n finished sources, `[..., d]`.
        summed: An array of the dtype of the partial sum.
        implementation: "mosaic_tpu" or "triton_gpu".
    """
    if len(values) > MOST_SOURCES:
        return f"single reads take up to {MOST_SOURCES} sources, got {len(values)}"
    return _LAUNCHERS[implementation].unsupported(values, summed)


def single_phase(
    values: tuple[jax.Array, ...],
    partial_sum: jax.Array | None,
    update: jax.Array | None,
    folded_d: jax.Array,
    norm_gain_d: jax.Array | None,
    *,
    eps: float,
    norm_eps: float,
    implementation: Literal["mosaic_tpu", "triton_gpu"],
    tiling: Any = None,
    interpret: Any = False,
) -> Result:
    """Adds the update to the partial sum, reads it beside the sources, and normalises the read.

    Args:
        values: One or two finished sources, `[..., d]` of one dtype.
        partial_sum: Sum of the block's earlier outputs, `[..., d]`, or None.
        update: The last sub-layer's output, `[..., d]`, or None; one of the two is given.
        folded_d: float32 product of pseudo-query and key-norm gain.
        norm_gain_d: float32 gain of the norm that follows; None: hidden is the read itself.
        eps: Added to the mean square of each source and of the sum.
        norm_eps: Added to the mean square of the read.
        implementation: Whose kernels.
        tiling: How those kernels are launched; None chooses it.
        interpret: Passed to `pallas_call`: how to run TPU kernels on a CPU.

    Returns:
        See `Result`. Reverse mode only.
    """
    call = Call(implementation, eps, norm_eps, tiling, interpret)
    return _read(call, values, partial_sum, update, folded_d, norm_gain_d)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(call, values, partial_sum, update, folded_d, norm_gain_d):
    return _run_forward(call, values, partial_sum, update, folded_d, norm_gain_d)[0]


def _read_forward(call, *primals):
    primals = jax.tree.map(lambda x: x.value, primals, is_leaf=lambda x: hasattr(x, "perturbed"))
    values, partial_sum, update, folded_d, norm_gain_d = primals
    result, statistics = _run_forward(call, *primals)
    # Arrays of no elements tell the dtypes of what is not kept.
    dtypes = [None if x is None else jnp.zeros(0, x.dtype) for x in (partial_sum, update)]
    return result, (values, result.summed, statistics, folded_d, norm_gain_d, dtypes)


def _read_backward(call, residuals, cotangents):
    values, summed, statistics, folded_d, norm_gain_d, dtypes = residuals
    dsummed, dhidden, dweights, dvalues = cotangents
    dweights = None if _is_zero(dweights) else dweights
    dvalues = None if all(map(_is_zero, dvalues)) else tuple(map(_instantiate, dvalues))
    spec = token_axes(summed.shape)
    rows, scalars, whole = _specs(spec)

    def run(values, summed, statistics, folded_d, norm_gain_d, dsummed, dhidden, dweights, dvalues):
        shape, launch = summed.shape, _LAUNCHERS[call.implementation]
        dvalues, dsum, *dvectors = launch.run_backward(
            call,
            tuple(map(_flat, values)),
            _flat(summed),
            folded_d,
            norm_gain_d,
            statistics.reshape(statistics.shape[0], -1),
            _flat(dsummed),
            _flat(dhidden),
            None if dweights is None else dweights.reshape(dweights.shape[0], -1),
            None if dvalues is None else tuple(map(_flat, dvalues)),
        )
        dvalues = tuple(x.reshape(shape) for x in dvalues)
        return dvalues, dsum.reshape(shape), *sum_over_tokens(tuple(dvectors), spec)

    if not summed.size:
        dvalues, dsum = values, summed
        dfolded_d, dnorm_gain_d = jax.tree.map(jnp.zeros_like, (folded_d, norm_gain_d))
    else:
        dvalues, dsum, dfolded_d, dnorm_gain_d = on_each_device(
            run,
            spec,
            (rows, rows, scalars, whole, whole, rows, rows, scalars, rows),
            (rows, rows, whole, whole),
        )(
            values,
            summed,
            statistics,
            folded_d,
            norm_gain_d,
            *map(_instantiate, (dsummed, dhidden)),
            dweights,
            dvalues,
        )
    dparts = [None if x is None else dsum.astype(x.dtype) for x in dtypes]
    return dvalues, *dparts, dfolded_d, dnorm_gain_d


_read.defvjp(_read_forward, _read_backward, symbolic_zeros=True)


def _run_forward(call, values, partial_sum, update, folded_d, norm_gain_d):
    parts = [x for x in (partial_sum, update) if x is not None]
    leading = values[0].shape[:-1]
    if not values[0].size:
        weights = jnp.zeros((len(values) + 1, *leading))
        return Result(parts[0], values[0], weights, values), weights
    spec = token_axes(values[0].shape)
    rows, scalars, whole = _specs(spec)

    def run(values, partial_sum, update, folded_d, norm_gain_d):
        shape, launch = values[0].shape, _LAUNCHERS[call.implementation]
        summed, hidden, weights, statistics = launch.run_forward(
            call,
            tuple(map(_flat, values)),
            None if partial_sum is None else _flat(partial_sum),
            None if update is None else _flat(update),
            folded_d,
            norm_gain_d,
        )
        per_token = [x.reshape(-1, *shape[:-1]) for x in (weights, statistics)]
        return summed.reshape(shape), hidden.reshape(shape), *per_token

    summed, hidden, weights, statistics = on_each_device(
        run, spec, (rows, rows, rows, whole, whole), (rows, rows, scalars, scalars)
    )(values, partial_sum, update, folded_d, norm_gain_d)
    summed = checkpoint_name(summed, PARTIAL_SUM_NAME)
    statistics = checkpoint_name(statistics, STATISTICS_NAME)
    return Result(summed, checkpoint_name(hidden, OUTPUT_NAME), weights, values), statistics


def _specs(tokens: PartitionSpec | None) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """How rows `[..., d]`, scalars `[k, ...]` and vectors are cut, given how tokens are."""
    tokens = tokens or PartitionSpec()
    return PartitionSpec(*tokens, None), PartitionSpec(None, *tokens), PartitionSpec()


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _instantiate(x: Any) -> jax.Array:
    return jnp.zeros(x.aval.shape, x.aval.dtype) if _is_zero(x) else x
