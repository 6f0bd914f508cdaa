"""One optimizer update and one evaluation, as pure functions of a state and a batch.

The state is replicated over a mesh of one axis, "data", and the batch is split over it, so that
gradients are summed across devices and processes by the compiler. On one device nothing changes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from train.loss import cross_entropy

Params = Any
Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """Everything that changes from step to step; what a checkpoint holds."""

    step: jax.Array
    """int32: batches seen, skipped ones included."""
    params: Params
    """float32 parameters, the master copy."""
    optimizer: Any
    """Moments, and the number of updates made, which the schedule reads."""
    skipped: jax.Array
    """int32: batches whose loss or gradient was not finite."""
    skipped_in_row: jax.Array
    """int32: how many of the latest batches were skipped without a good one between."""


def data_mesh() -> jax.sharding.Mesh:
    """All devices of all processes on one axis, "data"."""
    # Automatic axes let the compiler place the sums; explicit ones would put shardings into types.
    return jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))


def to_devices(batch: dict[str, Any], mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Joins the rows that each process has into global arrays split over the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return {
        name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
    }


def initial_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; called inside `jax.jit`, no two leaves are one buffer."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), zero, zero)


def make_train_step(
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    mesh: jax.sharding.Mesh,
    accumulate: int = 1,
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, Metrics]]:
    """Builds the compiled step. Donates the state: use the returned one afterwards.

    A step whose loss or gradient is not finite leaves parameters, moments and the schedule's count
    bit for bit as they were, and counts the batch as skipped. Loss scaling is not built in: with
    float16 compute an overflow is such a skipped step, and gradients below 6e-8 vanish; bfloat16
    has neither problem.

    Args:
        graphdef: From `nnx.split(model, nnx.Param)`.
        optimizer: The update rule.
        schedule: Learning rate by number of updates, for the metrics.
        mesh: From `data_mesh`.
        accumulate: Microbatches whose gradients are averaged, in float32.

    Returns:
        `train_step(state, batch) -> (state, metrics)`; the batch holds "tokens", int32
        `[B, T + 1]`, and the metrics are scalars.
    """

    def loss_fn(params: Params, tokens_bt: jax.Array) -> jax.Array:
        logits_btv = nnx.merge(graphdef, params)(tokens_bt[:, :-1])
        nats, weight = cross_entropy(logits_btv, tokens_bt[:, 1:])
        return nats / weight

    def loss_and_gradients(params: Params, tokens_bt: jax.Array) -> tuple[jax.Array, Params]:
        if accumulate == 1:
            return jax.value_and_grad(loss_fn)(params, tokens_bt)
        # Row r goes to microbatch r % M, so that every device keeps the rows that it has.
        tokens_mbt = tokens_bt.reshape(-1, accumulate, tokens_bt.shape[-1]).swapaxes(0, 1)
        tokens_mbt = jax.lax.with_sharding_constraint(
            tokens_mbt, NamedSharding(mesh, PartitionSpec(None, "data"))
        )

        def add(total: Any, tokens_bt: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(
                jnp.add, total, jax.value_and_grad(loss_fn)(params, tokens_bt)
            ), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zero, tokens_mbt)
        return jax.tree.map(lambda leaf: leaf / accumulate, total)

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        loss, gradients = loss_and_gradients(state.params, batch["tokens"])
        gradient_norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        params, optimizer_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, optimizer_state),
            (state.params, state.optimizer),
        )
        bad = jnp.where(finite, 0, 1).astype(jnp.int32)
        metrics = {
            "loss": loss,
            "gradient_norm": gradient_norm,
            "parameter_norm": optax.tree.norm(params),
            "learning_rate": jnp.asarray(schedule(state.step - state.skipped), jnp.float32),
            "skipped_steps": state.skipped + bad,
            "skipped_in_row": jnp.where(finite, 0, state.skipped_in_row + 1),
        }
        state = TrainState(
            step=state.step + 1,
            params=params,
            optimizer=optimizer_state,
            skipped=metrics["skipped_steps"],
            skipped_in_row=metrics["skipped_in_row"],
        )
        return state, metrics

    replicated = NamedSharding(mesh, PartitionSpec())
    # Stated output shardings make the second call's inputs equal the first's: one compilation.
    return jax.jit(train_step, donate_argnums=0, out_shardings=replicated)


def make_evaluation_step(
    graphdef: Any, mesh: jax.sharding.Mesh
) -> Callable[[Params, dict[str, jax.Array]], Metrics]:
    """Builds the compiled sums over one batch of held-out text.

    Besides the loss it sums, for read r of n sources, the depth weights and their entropy over real
    tokens, and per depth the root-mean-square of what is read. The keys say which:
    `weight/03` is a vector over the sources of read 3.

    Args:
        graphdef: From `nnx.split(model, nnx.Param)`.
        mesh: From `data_mesh`.

    Returns:
        `evaluation_step(params, batch)` for a batch of "tokens", int32 `[B, T + 1]`, and "weights",
        float32 `[B, T]`.
    """

    def evaluation_step(params: Params, batch: dict[str, jax.Array]) -> Metrics:
        tokens_bt, weights_bt = batch["tokens"], batch["weights"]
        logits_btv, capture = nnx.merge(graphdef, params)(tokens_bt[:, :-1], capture=True)
        nats, weight = cross_entropy(logits_btv, tokens_bt[:, 1:], weights_bt)
        sums = {"nats": nats, "tokens": weight}
        for read, alpha_nbt in enumerate(capture.get("depth_weights") or []):
            sums[f"weight/{read:02d}"] = jnp.einsum("nbt,bt->n", alpha_nbt, weights_bt)
            # xlogy: a weight that underflowed to zero adds no entropy, where 0 * log 0 is NaN.
            entropy_bt = -jnp.sum(jax.scipy.special.xlogy(alpha_nbt, alpha_nbt), axis=0)
            sums[f"entropy/{read:02d}"] = jnp.sum(entropy_bt * weights_bt)
        sums["hidden_norm"] = capture["hidden_norm"] * weight
        return sums

    return jax.jit(evaluation_step, out_shardings=NamedSharding(mesh, PartitionSpec()))
