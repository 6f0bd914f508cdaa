"""Holds the GPU kernels to the float64 oracle, on the GPU, before anything is timed.

Errors of bfloat16 results are in units of the error of rounding the exact result once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import inter_block, merge
from benchmarks.gpu_programs import EPS
from tests import oracles

LARGEST_OVER_ROUNDING, LARGEST_FLOAT32 = 1.05, 2e-5


@dataclasses.dataclass(frozen=True)
class Check:
    """An operation at a shape."""

    what: str
    n: int
    s: int
    d: int
    t: int = 77

    def arrays(self) -> tuple:
        """Rows, float32 vectors, and float32 scalars."""
        count = self.n + self.s if self.what == "phase 1" else 5
        rows = [jnp.asarray(x, jnp.bfloat16) for x in oracles.normal(0, count, self.t, self.d)]
        query_sd = jnp.asarray(2 * oracles.normal(1, self.s, self.d) / self.d**0.5, jnp.float32)
        gains = jnp.asarray(1 + 0.3 * oracles.normal(2, 2, self.d), jnp.float32)
        return tuple(rows), query_sd, gains, jnp.asarray(oracles.normal(3, self.s, self.t), "f4")

    def program(self) -> Callable:
        """A function of `arrays`: results, and all gradients."""
        if self.what == "phase 1":

            def run(rows, query_sd, gains, scalars_st):
                def read(values, query_sd):
                    gain_sd = jnp.broadcast_to(gains[0], query_sd.shape)
                    return inter_block(
                        values, query_sd, gain_sd, eps=EPS, implementation="triton_gpu"
                    )

                results, pullback = jax.vjp(read, rows[: self.n], query_sd)
                return results, pullback((rows[self.n :], scalars_st))
        else:

            def run(rows, query_sd, gains, scalars_st):
                def join(output, lse, update, query_d, norm_gain_d):
                    return merge(
                        output,
                        lse,
                        rows[1],
                        update,
                        query_d,
                        gains[0],
                        norm_gain_d=norm_gain_d,
                        eps=EPS,
                        implementation="triton_gpu",
                        return_gate=True,
                    )

                results, pullback = jax.vjp(
                    join, rows[0], scalars_st[0], rows[2], query_sd[0], gains[1]
                )
                return results, pullback((rows[3], rows[4], scalars_st[0]))

        return run

    def expected(self, summed: Any) -> tuple[tuple, tuple]:
        """The same by the oracle; `summed` is the rounded sum of a merge."""
        arrays: Any = oracles.float64(self.arrays())
        rows, query_sd, (gain, norm_gain), scalars_st = arrays
        if self.what == "phase 1":
            gain_sd = np.broadcast_to(gain, query_sd.shape)
            values, doutputs = rows[: self.n], rows[self.n :]
            reads = oracles.group_read(values, query_sd, gain_sd, EPS)
            grads = oracles.group_read_gradients(
                values, query_sd, gain_sd, doutputs, scalars_st, eps=EPS
            )
            results = tuple(r.output for r in reads), np.stack([r.lse for r in reads])
            return results, (tuple(grads.sources), grads.query)
        exact = oracles.float64(summed)
        joined = oracles.merge(
            rows[0], scalars_st[0], exact, query_sd[0], gain, norm_gain, EPS, EPS
        )
        grads = oracles.merge_gradients(
            rows[0],
            scalars_st[0],
            exact,
            query_sd[0],
            gain,
            rows[3],
            rows[4],
            scalars_st[0],
            norm_gain,
            EPS,
            EPS,
        )
        results = rows[1] + rows[2], joined.hidden, joined.gate
        return results, (grads.output, grads.lse, grads.summed, grads.query, grads.norm_gain)


CHECKS = (
    Check("phase 1", 9, 12, 2048),
    Check("phase 1", 8, 24, 7168),
    Check("phase 1", 9, 1, 7168),
    Check("phase 1", 5, 3, 1168),
    Check("phase 2", 1, 1, 2048),
    Check("phase 2", 1, 1, 7168),
)


def row_of(check: Check, found: tuple) -> dict:
    """Compares what the program of a check has returned with the oracle."""
    summed = found[0][0] if check.what == "phase 2" else None
    over_rounding, float32 = [0.0], [0.0]
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(check.expected(summed)), strict=True)
    for actual, exact in pairs:
        error = oracles.relative_error(actual, exact)
        if actual.dtype == jnp.bfloat16:
            over_rounding.append(error / oracles.rounding_floor(exact, np.dtype(jnp.bfloat16)))
        else:
            float32.append(error)
    right = max(over_rounding) <= LARGEST_OVER_ROUNDING and max(float32) <= LARGEST_FLOAT32
    return {
        "check": check.what,
        "n": check.n,
        "s": check.s,
        "d": check.d,
        "bfloat16_error_over_rounding": max(over_rounding),
        "float32_error": max(float32),
        "right": right,
    }
