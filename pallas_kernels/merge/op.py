"""Phase 2 with its gradient: joins the forward and backward kernels, whichever the accelerator.

The gradient keeps the output of phase 1, the new partial sum, and a few scalars per token.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from pallas_kernels.merge import gpu_launch, tpu_launch
from pallas_kernels.merge.call import Call
from pallas_kernels.sharding import on_each_device, reshard, sum_over_tokens, token_axes

STATISTICS_NAME = "depth_attention_statistics"
"""`checkpoint_name` of the scalars per token that the gradient keeps."""
OUTPUT_NAME = "depth_attention_output"
"""`checkpoint_name` of the hidden state."""
PARTIAL_SUM_NAME = "partial_sum"
"""`checkpoint_name` of the new partial sum."""

_LAUNCHERS: dict[str, Any] = {"mosaic_tpu": tpu_launch, "triton_gpu": gpu_launch}


def unsupported(output: jax.Array, summed: jax.Array, implementation: str) -> str | None:
    """Returns why the kernels cannot merge these arrays, or None if they can.

    Args:
        output: Output of phase 1, `[..., d]`.
        summed: An array of the dtype of the partial sum.
        implementation: "mosaic_tpu" or "triton_gpu".
    """
    return _LAUNCHERS[implementation].unsupported(output, summed)


def merge(
    output: jax.Array,
    lse: jax.Array,
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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the update to the partial sum, reads it beside phase 1, and normalises the read.

    Args:
        output: Output of phase 1, `[..., d]`.
        lse: Its log-sum-exp, float32 `[...]`.
        partial_sum: Sum of the block's earlier outputs, `[..., d]`, or None.
        update: The last sub-layer's output, `[..., d]`, or None; one of the two is given.
        folded_d: float32 product of pseudo-query and key-norm gain.
        norm_gain_d: float32 gain of the norm that follows; None: hidden is the read itself.
        eps: Added to the mean square of the sum.
        norm_eps: Added to the mean square of the read.
        implementation: Whose kernels.
        tiling: How those kernels are launched; None chooses it.
        interpret: Passed to `pallas_call`: how to run TPU kernels on a CPU.

    Returns:
        The new partial sum, hidden, and the gate, float32 `[...]`. Reverse mode only.
    """
    call = Call(implementation, eps, norm_eps, tiling, interpret)
    rows, scalars, whole = _specs(token_axes(output.shape))
    # Outside the rule, so that gradients have the types of what they are gradients of.
    primals = reshard(
        (output, lse, partial_sum, update, folded_d, norm_gain_d),
        (rows, scalars, rows, rows, whole, whole),
    )
    return _merge(call, *primals)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merge(call, output, lse, partial_sum, update, folded_d, norm_gain_d):
    return _run_forward(call, output, lse, partial_sum, update, folded_d, norm_gain_d)[0]


def _merge_forward(call, *primals):
    primals = jax.tree.map(lambda x: x.value, primals, is_leaf=lambda x: hasattr(x, "perturbed"))
    output, _, partial_sum, update, folded_d, norm_gain_d = primals
    (summed, hidden, gate), statistics = _run_forward(call, *primals)
    # Arrays of no elements tell the dtypes of what is not kept.
    dtypes = [None if x is None else jnp.zeros(0, x.dtype) for x in (partial_sum, update)]
    return (summed, hidden, gate), (output, summed, statistics, folded_d, norm_gain_d, dtypes)


def _merge_backward(call, residuals, cotangents):
    output, summed, statistics, folded_d, norm_gain_d, dtypes = residuals
    dsummed, dhidden, dgate = cotangents
    dgate = None if isinstance(dgate, SymbolicZero) else dgate
    spec = token_axes(output.shape)
    rows, scalars, whole = _specs(spec)
    per_token = PartitionSpec(None, *scalars)

    def run(output, summed, statistics, folded_d, norm_gain_d, dsummed, dhidden, dgate):
        launch = _LAUNCHERS[call.implementation]
        doutput, dlse, dsum, *dvectors = launch.run_backward(
            call,
            _flat(output),
            _flat(summed),
            folded_d,
            norm_gain_d,
            statistics.reshape(statistics.shape[0], -1),
            _flat(dsummed),
            _flat(dhidden),
            None if dgate is None else dgate.reshape(-1),
        )
        shape = output.shape
        tokens = (doutput.reshape(shape), dlse.reshape(shape[:-1]), dsum.reshape(shape))
        return *tokens, *sum_over_tokens(tuple(dvectors), spec)

    if not output.size:
        vectors = jnp.zeros_like(folded_d), jax.tree.map(jnp.zeros_like, norm_gain_d)
        doutput, dlse, dsum = output, jnp.zeros(output.shape[:-1]), summed
        dfolded_d, dnorm_gain_d = vectors
    else:
        doutput, dlse, dsum, dfolded_d, dnorm_gain_d = on_each_device(
            run,
            spec,
            (rows, rows, per_token, whole, whole, rows, rows, scalars),
            (rows, scalars, rows, whole, whole),
        )(
            output,
            summed,
            statistics,
            folded_d,
            norm_gain_d,
            *map(_instantiate, (dsummed, dhidden)),
            dgate,
        )
    dparts = [None if x is None else dsum.astype(x.dtype) for x in dtypes]
    return doutput, dlse, *dparts, dfolded_d, dnorm_gain_d


_merge.defvjp(_merge_forward, _merge_backward, symbolic_zeros=True)


def _run_forward(call, output, lse, partial_sum, update, folded_d, norm_gain_d):
    parts = [x for x in (partial_sum, update) if x is not None]
    if not output.size:
        gate = jnp.zeros(output.shape[:-1])
        return (parts[0], output, gate), gate[None]
    spec = token_axes(output.shape)
    rows, scalars, whole = _specs(spec)

    def run(output, lse, partial_sum, update, folded_d, norm_gain_d):
        launch = _LAUNCHERS[call.implementation]
        summed, hidden, gate, statistics = launch.run_forward(
            call,
            _flat(output),
            lse.reshape(-1),
            None if partial_sum is None else _flat(partial_sum),
            None if update is None else _flat(update),
            folded_d,
            norm_gain_d,
        )
        shape = output.shape
        statistics = statistics.reshape(-1, *shape[:-1])
        return summed.reshape(shape), hidden.reshape(shape), gate.reshape(shape[:-1]), statistics

    summed, hidden, gate, statistics = on_each_device(
        run,
        spec,
        (rows, scalars, rows, rows, whole, whole),
        (rows, rows, scalars, PartitionSpec(None, *scalars)),
    )(output, lse, partial_sum, update, folded_d, norm_gain_d)
    summed = checkpoint_name(summed, PARTIAL_SUM_NAME)
    gate, statistics = checkpoint_name((gate, statistics), STATISTICS_NAME)
    return (summed, checkpoint_name(hidden, OUTPUT_NAME), gate), statistics


def _specs(tokens: PartitionSpec | None) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """How rows `[..., d]`, scalars `[...]` and vectors are cut, given how tokens are."""
    tokens = tokens or PartitionSpec()
    return PartitionSpec(*tokens, None), tokens, PartitionSpec()


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _instantiate(x: Any) -> Any:
    """Turns a zero that reverse mode knows of into an array."""
    if not isinstance(x, SymbolicZero):
        return x
    aval: Any = x.aval
    return jnp.zeros(aval.shape, aval.dtype)
