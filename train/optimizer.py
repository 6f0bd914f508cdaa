"""The update rule: labelled parameter groups, AdamW or Muon on each, one learning-rate schedule.

    clip by global norm -> scale each group by its own rule -> decoupled decay -> learning rate

Every leaf belongs to exactly one group, chosen by its name and never by its number of axes: scanned
layers stack pseudo-queries and gains into what looks like a matrix, and orthogonalising that would
mix layers.

    group      what                           adamw run        muon run
    matrix     kernels inside the layers      AdamW, decayed   Muon, decayed
    head       kernel of an untied head       AdamW, decayed   AdamW, decayed
    embedding  the token table                AdamW            AdamW
    vector     pseudo-queries and norm gains  AdamW            AdamW

Parameters and moments are float32 whatever the model computes in, so the parameters are themselves
the master copy: an update smaller than half a bfloat16 ulp is kept.
"""

import math
from collections.abc import Hashable
from typing import Any

import jax
import optax
import rich.table

from train.config import OptimizerConfig

DECAYED = ("matrix", "head")

_MUON_MOMENTUM = 0.95  # https://kellerjordan.github.io/posts/muon/
_MUON_UPDATE_RMS = 0.2  # arXiv:2502.16982, section 2.2: AdamW's, so that both share a learning rate


def make_optimizer(
    config: OptimizerConfig, steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Builds the optimizer and the schedule that it follows.

    Args:
        config: The update rule.
        steps: Updates in the whole run, which the schedules are stretched over.

    Returns:
        The gradient transformation, and the learning rate as a function of the number of updates
        made so far.
    """
    schedule = make_schedule(config, steps)
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    decay = optax.add_decayed_weights(config.weight_decay)
    matrix = adam
    if config.name == "muon":
        matrix = optax.chain(
            optax.contrib.scale_by_muon(
                beta=_MUON_MOMENTUM, weight_dimension_numbers=_dimension_numbers
            ),
            optax.stateless(_scale_to_consistent_rms),
        )
    rules: dict[Hashable, optax.GradientTransformation] = {
        "matrix": optax.chain(matrix, decay),
        "head": optax.chain(adam, decay),
        "embedding": adam,
        "vector": adam,
    }
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    optimizer = optax.chain(
        clip,
        optax.partition(rules, parameter_groups),
        optax.scale_by_learning_rate(schedule),
    )
    return optimizer, schedule


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up, then constant, one cosine, or stable and linear decay (WSD).

    The first update already has a rate above zero, update `warmup_steps` has the peak, and the last
    one has `final_fraction` of it (not for constant).

    Args:
        config: Peak, shape and warm-up.
        steps: Updates in the whole run.

    Returns:
        The learning rate as a function of the number of updates made so far.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    last = max(steps - 1, warmup + 1)
    rise = optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1))
    if config.schedule == "constant":
        return optax.join_schedules([rise, optax.constant_schedule(peak)], [warmup])
    if config.schedule == "cosine":
        fall = optax.cosine_decay_schedule(peak, last - warmup, config.final_fraction)
        return optax.join_schedules([rise, fall], [warmup])
    decay_steps = max(round(config.decay_fraction * steps), 1)
    turn = max(last - decay_steps, warmup)
    fall = optax.linear_schedule(peak, peak * config.final_fraction, last - turn)
    return optax.join_schedules([rise, optax.constant_schedule(peak), fall], [warmup, turn])


def parameter_groups(params: Any) -> Any:
    """Names the optimizer group of every leaf.

    Args:
        params: Nested dict of arrays, or of anything with a shape.

    Returns:
        The same tree with "matrix", "head", "embedding" or "vector" at the leaves.

    Raises:
        ValueError: A leaf has a name that no rule covers.
    """
    return jax.tree.map_with_path(lambda path, _: _group(_names(path)), params)


def parameter_table(params: Any, config: OptimizerConfig) -> rich.table.Table:
    """Lists every leaf with its shape, group, update rule and decay.

    Args:
        params: Nested dict of arrays or of `jax.ShapeDtypeStruct`.
        config: The update rule.

    Returns:
        A table to print with rich.
    """
    leaves = jax.tree.leaves_with_path(params)
    count = sum(math.prod(leaf.shape) for _, leaf in leaves)
    table = rich.table.Table(title=f"{count:,} parameters in {len(leaves)} leaves")
    # Folding keeps whole names and shapes on a narrow terminal; the default would cut them.
    for column in ("parameter", "shape", "group", "rule", "decay"):
        table.add_column(column, overflow="fold")
    for path, leaf in leaves:
        names = _names(path)
        group = _group(names)
        rule = "muon" if group == "matrix" and config.name == "muon" else "adamw"
        decay = f"{config.weight_decay:g}" if group in DECAYED else "0"
        table.add_row(".".join(names), str(tuple(leaf.shape)), group, rule, decay)
    return table


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(entry.key) for entry in path)


def _group(names: tuple[str, ...]) -> str:
    words = names[-1].split("_")
    if "kernel" in words:
        return "head" if "head" in words else "matrix"
    if "table" in words:
        return "embedding"
    if words[0] in ("query", "gain"):
        return "vector"
    raise ValueError(
        f"parameter {'.'.join(names)} has no optimizer group: its name must contain 'kernel' or"
        " 'table', or start with 'query' or 'gain'"
    )


def _matrix_axes(path: tuple[Any, ...], kernel: jax.Array) -> tuple[tuple[int, ...], ...]:
    """The axes that a kernel sums over and those that it writes.

    An output projection sums over heads and their width, `[h, k, d]`; every other kernel sums over
    one axis. The axes before those count layers: one, or three in pipeline layout.
    """
    name = _names(path)[-1]
    num_inputs = 2 if name == "output_kernel" else 1
    num_axes = 2 if name in ("gate_kernel", "up_kernel", "down_kernel") else 3
    first = kernel.ndim - num_axes
    middle = first + num_inputs
    return tuple(range(first, middle)), tuple(range(middle, kernel.ndim))


def _dimension_numbers(updates: Any) -> Any:
    return jax.tree.map_with_path(
        lambda path, leaf: optax.contrib.MuonDimensionNumbers(*_matrix_axes(path, leaf)), updates
    )


def _scale_to_consistent_rms(updates: Any, params: Any) -> Any:
    """Scales orthogonal updates to one root-mean-square whatever the kernel's shape."""
    del params

    def scale(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
        axes = _matrix_axes(path, update)
        larger = max(math.prod(update.shape[axis] for axis in side) for side in axes)
        return update * (math.sqrt(larger) * _MUON_UPDATE_RMS)

    return jax.tree.map_with_path(scale, updates)
