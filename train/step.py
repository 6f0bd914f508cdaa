"""One optimizer update and one evaluation, as pure functions of a state and a batch.

Both are compiled for a mesh, with the shardings of everything that goes in and comes out. On a
single stage the compiler splits the work and places the sums from those; several stages run the
pipeline. On one device nothing changes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnres_jax.parallel import Plan, make_loss
from train.loss import cross_entropy
from train.placement import batch_axes, batch_sharding, whole_vectors

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


def initial_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; called inside `jax.jit`, no two leaves are one buffer."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), zero, zero)


def make_train_step(
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    mesh: Mesh,
    accumulate: int = 1,
    *,
    plan: Plan | None = None,
    state_shardings: Any = None,
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
        mesh: Splits the batch over its axes "data" and "fsdp".
        accumulate: Parts of the batch whose gradients are averaged, in float32.
        plan: Of the pipeline that computes the loss, whose parameters are in pipeline layout; None
            runs the model as it is.
        state_shardings: Of the state, going in and coming out; None has it whole on every device.

    Returns:
        `train_step(state, batch) -> (state, metrics)`; the batch holds "tokens", int32
        `[B, T + 1]`, and the metrics are scalars.
    """
    loss_fn = _model_loss(graphdef, mesh) if plan is None else _pipeline_loss(plan)

    def loss_and_gradients(params: Params, tokens_bt: jax.Array) -> tuple[jax.Array, Params]:
        if accumulate == 1:
            return jax.value_and_grad(loss_fn)(params, tokens_bt)
        tokens_mbt = _split_batch(tokens_bt, accumulate, mesh)

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
    of_state = replicated if state_shardings is None else state_shardings
    # What comes out lies as what goes in, so that the second call compiles nothing new.
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(of_state, batch_sharding(mesh)),
        out_shardings=(of_state, replicated),
    )


def _model_loss(graphdef: Any, mesh: Mesh) -> Callable[[Params, jax.Array], jax.Array]:
    def loss(params: Params, tokens_bt: jax.Array) -> jax.Array:
        params = whole_vectors(params, mesh)
        logits_btv = nnx.merge(graphdef, params)(_split_time(tokens_bt[:, :-1], mesh))
        nats, weight = cross_entropy(logits_btv, _split_time(tokens_bt[:, 1:], mesh))
        return nats / weight

    return loss


def _pipeline_loss(plan: Plan) -> Callable[[Params, jax.Array], jax.Array]:
    total = make_loss(plan)

    def loss(params: Params, tokens_bt: jax.Array) -> jax.Array:
        nats, weight = total(params, tokens_bt)
        return nats / weight

    return loss


def _split_batch(rows_bt: jax.Array, parts: int, mesh: Mesh) -> jax.Array:
    """`[B, t]` -> `[m, b, t]`."""
    # Row r goes to part r % M, so that every device keeps the rows that it has.
    rows_mbt = rows_bt.reshape(-1, parts, rows_bt.shape[-1]).swapaxes(0, 1)
    spec = PartitionSpec(None, batch_axes(mesh))
    return jax.lax.with_sharding_constraint(rows_mbt, NamedSharding(mesh, spec))


def _split_time(tokens_bt: jax.Array, mesh: Mesh) -> jax.Array:
    """Says that time is split over "sequence", which everything that follows takes over."""
    if mesh.shape.get("sequence", 1) == 1:
        return tokens_bt
    spec = PartitionSpec(batch_axes(mesh), "sequence")
    return jax.lax.with_sharding_constraint(tokens_bt, NamedSharding(mesh, spec))


def make_evaluation_step(
    graphdef: Any,
    mesh: Mesh,
    parts: int = 1,
    *,
    to_layer_order: Callable[[Params], Params] = lambda params: params,
) -> Callable[[Params, dict[str, jax.Array]], Metrics]:
    """Builds the compiled sums over one batch of held-out text.

    Besides the loss it sums, for read r of n sources, the depth weights and their entropy over real
    tokens, and per depth the mean squares of what is read at all positions. The keys say which:
    `weight/03` is a vector over the sources of read 3.

    Args:
        graphdef: From `nnx.split(model, nnx.Param)`.
        mesh: Splits the batch over its axes "data" and "fsdp".
        parts: Parts of the batch that follow each other, to take no more memory than training.
        to_layer_order: Applied to the parameters first.

    Returns:
        `evaluation_step(params, batch)` for a batch of "tokens", int32 `[B, T + 1]`, and "weights",
        float32 `[B, T]`.
    """

    def part_sums(params: Params, tokens_bt: jax.Array, weights_bt: jax.Array) -> Metrics:
        model = nnx.merge(graphdef, params)
        logits_btv, capture = model(_split_time(tokens_bt[:, :-1], mesh), capture=True)
        nats, weight = cross_entropy(logits_btv, tokens_bt[:, 1:], weights_bt)
        sums = {"nats": nats, "tokens": weight}
        for read, alpha_nbt in enumerate(capture.get("depth_weights") or []):
            sums[f"weight/{read:02d}"] = jnp.einsum("nbt,bt->n", alpha_nbt, weights_bt)
            # xlogy: a weight that underflowed to zero adds no entropy, where 0 * log 0 is NaN.
            entropy_bt = -jnp.sum(jax.scipy.special.xlogy(alpha_nbt, alpha_nbt), axis=0)
            sums[f"entropy/{read:02d}"] = jnp.sum(entropy_bt * weights_bt)
        # Squares add up, over batches and over parts of one.
        sums["positions"] = jnp.float32(weights_bt.size)
        sums["hidden_square"] = jnp.square(capture["hidden_norm"]) * sums["positions"]
        return sums

    def evaluation_step(params: Params, batch: dict[str, jax.Array]) -> Metrics:
        params = whole_vectors(to_layer_order(params), mesh)
        arrays = batch["tokens"], batch["weights"]
        if parts == 1:
            return part_sums(params, *arrays)
        arrays_of_parts = tuple(_split_batch(array, parts, mesh) for array in arrays)

        def add(total: Metrics, arrays: tuple[jax.Array, ...]) -> tuple[Metrics, None]:
            return jax.tree.map(jnp.add, total, part_sums(params, *arrays)), None

        one = tuple(array[0] for array in arrays_of_parts)
        shapes = jax.eval_shape(part_sums, params, *one)
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add, zero, arrays_of_parts)[0]

    return jax.jit(evaluation_step, out_shardings=NamedSharding(mesh, PartitionSpec()))
