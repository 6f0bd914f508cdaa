"""Running consecutive sub-layers of stacked parameters, scanned in pairs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

KINDS = ("attention", "feed_forward")
"""Sub-layer l of a model is `KINDS[l % 2]`."""


class Run(NamedTuple):
    """Sub-layers `start` to `stop - 1`."""

    start: int
    stop: int

    @property
    def kinds(self) -> list[str]:
        """The kind of each of its sub-layers."""
        return [KINDS[index % 2] for index in range(self.start, self.stop)]

    @property
    def scanned_pairs(self) -> int:
        """How many pairs of an attention and a feed-forward sub-layer a scan goes over."""
        pairs = (self.stop - self.start) // 2
        return pairs if pairs > 1 else 0  # A scan of one pair would only add its overhead.


def split_leading(stacked: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts every leaf of a pytree along its leading axis into pieces of these sizes.

    The transpose of this split is one concatenate; that of slices would be a sum of padded arrays.
    """
    leaves, treedef = jax.tree.flatten(stacked)
    pieces = [jax.lax.split(leaf, sizes, axis=0) for leaf in leaves]
    return [treedef.unflatten([piece[i] for piece in pieces]) for i in range(len(sizes))]


def split_into_runs(stacked: dict[str, Any], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Gives each run its share of parameters that are stacked over layers, kind by kind."""
    shares = {
        kind: split_leading(parameters, [run.kinds.count(kind) for run in runs])
        for kind, parameters in stacked.items()
    }
    return [{kind: shares[kind][i] for kind in stacked} for i in range(len(runs))]


def run_sublayers(
    step: Callable[[str, Any, Any, Any], tuple[Any, Any]],
    carry: Any,
    run: Run,
    parameters: dict[str, Any],
    reads: Sequence[Any],
) -> tuple[Any, list[Any]]:
    """Folds `step` over the sub-layers of a run.

    Args:
        step: `(kind, carry, parameters, read) -> (carry, captured)` for one sub-layer.
        carry: Passed from sub-layer to sub-layer; one structure throughout.
        run: Which sub-layers.
        parameters: For each kind, a pytree stacked over the run's sub-layers of that kind.
        reads: What else each sub-layer takes: a pytree for each, alike in structure and shapes.

    Returns:
        The last carry, and what each sub-layer captured.
    """
    kinds, pairs = run.kinds, run.scanned_pairs
    queues = {
        kind: split_leading(parameters[kind], [pairs] + [1] * (kinds.count(kind) - pairs))
        for kind in set(kinds)
    }
    captured = []
    if pairs:
        pair_of_kinds = kinds[:2]

        def pair_step(carry, pair):
            captured = []
            for kind, (layer, read) in zip(pair_of_kinds, pair, strict=True):
                carry, one = step(kind, carry, layer, read)
                captured.append(one)
            return carry, captured

        stacked = [
            (queues[kind][0], jax.tree.map(lambda *x: jnp.stack(x), *reads[i : 2 * pairs : 2]))
            for i, kind in enumerate(pair_of_kinds)
        ]
        carry, by_kind = jax.lax.scan(pair_step, carry, stacked)
        for i in range(pairs):
            captured += [jax.tree.map(lambda x, i=i: x[i], one) for one in by_kind]
    used = dict.fromkeys(KINDS, 0)
    for index in range(2 * pairs, len(kinds)):
        kind = kinds[index]
        used[kind] += 1
        layer = jax.tree.map(lambda x: x[0], queues[kind][used[kind]])
        carry, one = step(kind, carry, layer, reads[index])
        captured.append(one)
    return carry, captured


@jax.custom_jvp
def gradients_together(tree: Any) -> Any:
    """Returns a pytree of arrays, of whose gradients none is used before all are there.

    What a sub-layer reads goes through this with the sub-layer's parameters, so that the backward
    pass computes the parameters' gradients before it goes on to earlier sub-layers. As these are
    needed at the very end only, compilers otherwise put them off, and keep all activations and
    cotangents until then, recomputed or not.
    """
    return tree


@partial(gradients_together.defjvp, symbolic_zeros=True)
def _gradients_together_jvp(primals, tangents):
    # What is not differentiated has no cotangent to wait for.
    leaves, treedef = jax.tree.flatten(tangents[0], is_leaf=_is_zero)
    held = iter(jax.lax.optimization_barrier([x for x in leaves if not _is_zero(x)]))
    return primals[0], treedef.unflatten([x if _is_zero(x) else next(held) for x in leaves])


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)
