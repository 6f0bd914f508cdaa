"""What `benchmarks.gpu` times: reads, merges and whole blocks, each several times in one program.

A whole block is phase 1 and its merges with the sub-layers cut out: their outputs, and the
gradients that they would hand back, are given arrays. So nothing but Attention Residuals runs, and
as many bytes move as in a model.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attnres_jax import inter_block, merge
from attnres_jax.ops import Implementation

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """One row group of the table.

    Attributes:
        what: "phase 1", "phase 2" (a chain of S merges) or "block".
        n: Finished sources.
        s: Reads.
        d: Width.
        t: Tokens.
        direction: "forward", "backward" (of kept residuals), or "both".
        peers: Whether other packages are timed too.
    """

    what: str
    n: int
    s: int
    d: int
    direction: str
    t: int = 8192
    peers: bool = False

    @property
    def rows(self) -> int:
        """Least rows of d a token that have to move."""
        n, s = self.n, self.s
        forward, backward = {
            "phase 1": (n + s, 2 * n + s),
            "phase 2": (5 * s, 6 * s),
            # The first merge has no partial sum yet.
            "block": (n + 6 * s - 7, 2 * n + 7 * s - 6),
        }[self.what]
        return {"forward": forward, "backward": backward, "both": forward + backward}[
            self.direction
        ]

    @property
    def bytes_moved(self) -> int:
        """The same in bytes of bfloat16."""
        return self.rows * self.t * self.d * 2

    @property
    def repetitions(self) -> int:
        """Of the operation in one program: so many that the host keeps ahead of the GPU."""
        return max(1, min(10, math.ceil(8e9 / self.bytes_moved)))


CASES = (
    Case("phase 1", 9, 12, 2048, "forward"),
    Case("phase 1", 9, 12, 2048, "backward"),
    Case("phase 2", 1, 8, 2048, "forward", t=32768),
    Case("phase 2", 1, 8, 2048, "backward", t=32768),
    Case("block", 8, 8, 2048, "forward", peers=True),
    Case("block", 8, 8, 2048, "both", peers=True),
    Case("block", 8, 24, 7168, "forward", peers=True),
    Case("block", 8, 24, 7168, "both", peers=True),
    Case("phase 1", 9, 1, 7168, "forward", peers=True),
    Case("phase 1", 9, 1, 7168, "both", peers=True),
    Case("phase 1", 9, 1, 7168, "backward"),
    Case("phase 1", 8, 8, 7168, "forward"),
    Case("phase 1", 8, 8, 7168, "backward"),
    Case("phase 2", 1, 8, 7168, "forward"),
    Case("phase 2", 1, 8, 7168, "backward"),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of a case; one function takes what it needs of them."""

    values: tuple[jax.Array, ...]  # n
    updates: tuple[jax.Array, ...]  # s, outputs of sub-layers
    outputs: tuple[jax.Array, ...]  # s, of phase 1
    cotangents: tuple[jax.Array, ...]  # s + 1
    query_sd: jax.Array
    norm_gain_d: jax.Array
    lse_st: jax.Array


jax.tree_util.register_dataclass(Inputs)


def inputs_of(case: Case) -> Inputs:
    """Random arrays; those that the case does not read are not made."""
    of_phase_1, of_phase_2 = case.what == "phase 1", case.what == "phase 2"
    sizes = (
        0 if of_phase_2 else case.n,
        0 if of_phase_1 else case.s,
        case.s if of_phase_2 else 0,
        0 if case.direction == "forward" else case.s + 1,
    )

    # One program for all rows: a program of tens of generators takes minutes to compile.
    row = jax.jit(lambda key: jax.random.normal(key, (case.t, case.d), jnp.bfloat16))
    *keys, query_key, gain_key, lse_key = jax.random.split(jax.random.key(0), 7)
    return Inputs(
        *(
            tuple(row(k) for k in jax.random.split(key, max(size, 1))[:size])
            for size, key in zip(sizes, keys, strict=True)
        ),
        query_sd=jax.random.normal(query_key, (case.s, case.d)) / case.d**0.5,
        norm_gain_d=1 + 0.1 * jax.random.normal(gain_key, (case.d,)),
        lse_st=1 + 0.1 * jax.random.normal(lse_key, (case.s, case.t)),
    )


# --- The operations ------------------------------------------------------------------------------


@jax.custom_vjp
def sublayer(hidden: jax.Array, update: jax.Array, dhidden: jax.Array) -> jax.Array:
    """A sub-layer that costs nothing: its output, and its gradient to `hidden`, are given."""
    return update


def _sublayer_forward(hidden, update, dhidden):
    return update, dhidden


def _sublayer_backward(dhidden, dupdate):
    return dhidden, None, None


sublayer.defvjp(_sublayer_forward, _sublayer_backward)


def phase_1(query_sd, inputs: Inputs, implementation: Implementation):
    """Outputs and log-sum-exp of S reads; no hidden states besides."""
    ones = jnp.ones_like(query_sd)
    read = inter_block(inputs.values, query_sd, ones, eps=EPS, implementation=implementation)
    return read, ()


def phase_2(query_sd, inputs: Inputs, implementation: Implementation):
    """Hidden state and gate of the last of a chain of S merges, and everything else it computes."""
    summed, hiddens, gate = _merges(
        inputs.outputs, inputs.lse_st, inputs.updates[0], query_sd, inputs, implementation
    )
    return (hiddens[-1], gate), (summed, *hiddens[:-1])


def block(query_sd, inputs: Inputs, implementation: Implementation):
    """Sum and last hidden state of a block, whose first read is phase 1's alone."""
    (outputs, lse_st), _ = phase_1(query_sd, inputs, implementation)
    first = sublayer(outputs[0], inputs.updates[0], _cotangent(inputs, 0))
    after_first = dataclasses.replace(
        inputs, updates=(first, *inputs.updates[1:]), cotangents=inputs.cotangents[1:]
    )
    summed, hiddens, gate = _merges(
        outputs[1:], lse_st[1:], None, query_sd[1:], after_first, implementation
    )
    return (summed, hiddens[-1]), (outputs[0], *hiddens[:-1], gate)


def _merges(outputs, lse_st, summed, query_sd, inputs, implementation):
    hiddens, gate, update = [], None, inputs.updates[0]
    for s, output in enumerate(outputs):
        summed, hidden, gate = merge(
            output,
            lse_st[s],
            summed,
            update,
            query_sd[s],
            jnp.ones_like(query_sd[s]),
            norm_gain_d=inputs.norm_gain_d,
            eps=EPS,
            implementation=implementation,
            return_gate=True,
        )
        hiddens.append(hidden)
        if s + 1 < len(outputs):
            update = sublayer(hidden, inputs.updates[s + 1], _cotangent(inputs, s))
    return summed, hiddens, gate


def _cotangent(inputs: Inputs, s: int):
    return inputs.cotangents[s] if inputs.cotangents else jnp.zeros(())


OPERATIONS: dict[str, Callable] = {"phase 1": phase_1, "phase 2": phase_2, "block": block}


# --- Programs ------------------------------------------------------------------------------------


def program_of(
    case: Case, implementation: Implementation, inputs: Inputs
) -> tuple[Callable, tuple]:
    """A function of a small array and of others that runs the case once, and its arguments."""
    operation = OPERATIONS[case.what]
    names = {
        "phase 1": ("values",),
        "phase 2": ("outputs", "lse_st", "norm_gain_d"),
        "block": ("values", "norm_gain_d"),
    }[case.what]

    def differentiate(query_sd, inputs):
        def function(query_sd, differentiated):
            changed = dataclasses.replace(inputs, **differentiated)
            return operation(query_sd, changed, implementation)

        differentiated = {name: getattr(inputs, name) for name in names}
        return jax.vjp(function, query_sd, differentiated, has_aux=True)

    def forward(query_sd, inputs):
        return operation(query_sd, inputs, implementation)

    def both(query_sd, inputs):
        results, pullback, hiddens = differentiate(query_sd, inputs)
        return results, hiddens, pullback(cotangents_of(case, inputs, inputs.lse_st))

    def backward(lse_st, arguments):
        pullback, inputs = arguments
        return pullback(cotangents_of(case, inputs, lse_st))

    if case.direction == "backward":
        kept = jax.jit(lambda *arguments: differentiate(*arguments)[1])(inputs.query_sd, inputs)
        return backward, (inputs.lse_st, (kept, inputs))
    return {"forward": forward, "both": both}[case.direction], (inputs.query_sd, inputs)


def cotangents_of(case: Case, inputs: Inputs, lse_st: jax.Array):
    """Of the results of the case's operation; the scalars' are taken from `lse_st`."""
    return {
        "phase 1": (inputs.cotangents[:-1], lse_st),
        "phase 2": (inputs.cotangents[0], lse_st[0]),
        "block": (inputs.cotangents[0], inputs.cotangents[-1]),
    }[case.what]


def repeated(function: Callable, repetitions: int) -> Callable:
    """Runs `function(small, arguments)` several times, one after another.

    The compiler can neither merge two runs, as it cannot see through the barriers, nor reorder
    them, as each takes a number from the results of the one before. `small` is float32.
    """

    def run(small, arguments):
        for _ in range(repetitions):
            small, arguments = jax.lax.optimization_barrier((small, arguments))
            results: Any = jax.lax.optimization_barrier(function(small, arguments))
            firsts = [x[(0,) * x.ndim].astype(jnp.float32) for x in jax.tree.leaves(results)]
            small = small + 1e-30 * sum(firsts)
        return small

    return run


def copy_program() -> tuple[Callable, tuple]:
    """Reads and writes 1 GiB."""
    return lambda small, x: x + small.astype(x.dtype), (
        jnp.zeros(()),
        jnp.zeros((2**29,), jnp.bfloat16),
    )


COPY_BYTES = 2 * 2**30
COPY_REPETITIONS = 10
