"""What a training step computes, exchanges and keeps, counted from its program; and a bound on it.

The products (`flops`) are counted from the jaxpr, in which every loop says how often it runs: those
of recomputation and of a pipeline's idle ticks are among them, those inside kernels are not. The
collectives are those of the compiled program, where the compiler's own are among them. Nothing is
timed: each bound divides a count by what the chip's maker states, and takes everything else to be
free and all to overlap.
"""

import dataclasses
import math
import re
from typing import Any

import jax

from attnres_jax.parallel import Collective
from train.topology import Chip


def products(jaxpr: Any) -> float:
    """Multiplications and additions of all matrix products on all devices.

    Args:
        jaxpr: Of a traced step.
    """
    return _products(getattr(jaxpr, "jaxpr", jaxpr))


def _products(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _product(equation)
        elif name == "cond":  # At most one branch runs; which, the program alone knows.
            total += max(_products(branch.jaxpr) for branch in params["branches"])
        elif name != "pallas_call":
            times = params["length"] if name == "scan" else 1
            if name == "shard_map":  # Inside, shapes are those of one device.
                times *= params["mesh"].size
            inner = [leaf for leaf in jax.tree.leaves(params, is_leaf=_is_jaxpr) if _is_jaxpr(leaf)]
            total += times * sum(_products(getattr(one, "jaxpr", one)) for one in inner)
    return total


def _product(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    summed = math.prod(left[axis] for axis in contracted)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * summed


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device, by the compiler's plan.

    Attributes:
        state: Parameters, moments and the batch, which go in and, but for the batch, come out in
            the same place.
        temporary: Everything that lives within a step.
        program: Instructions.
        capacity: What a device has.
    """

    state: int
    temporary: int
    program: int
    capacity: int

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.state + self.temporary + self.program

    @property
    def excess(self) -> int:
        """What does not fit; 0 if all does."""
        return max(0, self.total - self.capacity)


def memory_of(compiled: Any, capacity: int) -> Memory:
    """Reads the compiler's plan of a step that donates its state."""
    analysis = compiled.memory_analysis()
    kept = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return Memory(
        state=analysis.argument_size_in_bytes + max(0, kept),
        temporary=analysis.temp_size_in_bytes,
        program=analysis.generated_code_size_in_bytes,
        capacity=capacity,
    )


def refused_memory(message: str) -> tuple[float, float] | None:
    """Bytes wanted, at least, and available where a compiler gave up for want of memory.

    Args:
        message: Of the compiler's error.

    Returns:
        None where it is about something else.
    """
    size = r"([\d.]+)([KMGT])"
    patterns = (
        rf"temporaries \({size}\) exceeds available HBM \({size}\)",
        rf"[Uu]sed {size} of {size} hbm",
    )
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    for pattern in patterns:
        if match := re.search(pattern, message):
            wanted, available = (float(match[i]) * units[match[i + 1]] for i in (1, 3))
            return wanted, available
    return None


def count_by_kind(collectives: list[Collective]) -> list[dict[str, Any]]:
    """For each kind: operations in a step, those of them in loops, and bytes of their results."""
    rows: dict[str, dict[str, Any]] = {}
    for one in collectives:
        new = {"kind": one.kind, "count": 0, "in_loops": 0, "bytes": 0}
        row = rows.setdefault(one.kind, new)
        row["count"] += one.count
        row["in_loops"] += one.count * one.in_loop
        row["bytes"] += one.bytes
    return [rows[kind] for kind in sorted(rows)]


_RECEIVED = {"all-gather": 0.5, "all-to-all": 0.5}
"""Least share of the bytes of a result that came from other devices: with two, half."""


def bounds(
    chip: Chip,
    *,
    flops: float,
    memory_bytes: float,
    collectives: list[dict[str, Any]],
    chips_in_a_device: float = 1.0,
) -> dict[str, float]:
    """Least seconds of a step, for each of what limits it.

    Args:
        chip: Its maker's figures.
        flops: Of one device.
        memory_bytes: That one device moves from and to its memory.
        collectives: From `count_by_kind`.
        chips_in_a_device: A half where a chip shows up as two devices.
    """
    received = sum(row["bytes"] * _RECEIVED.get(row["kind"], 1.0) for row in collectives)
    return {
        "compute": flops / (chip.flops * chips_in_a_device),
        "memory": memory_bytes / (chip.memory_bandwidth * chips_in_a_device),
        "exchange": received / (chip.exchange_bandwidth * chips_in_a_device),
    }


def model_flops(params: Any, tokens: int, layers: int, width: int, context: int) -> float:
    """What the model itself needs for a step, as the field counts it.

    6 N tokens for the N parameters of kernels, forward and backward, and 6 layers width context
    tokens for attention over half of the positions (arXiv:2204.02311, appendix B, halved). Nothing
    recomputed, no idle tick.

    Args:
        params: Arrays or their shapes, in layer order.
        tokens: Of a batch.
        layers: Of attention.
        width: Of all its heads together.
        context: Tokens of a sequence.
    """
    kernels = [
        math.prod(leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(params)
        if "kernel" in path[-1].key
    ]
    tied = "head_kernel" not in params
    table = math.prod(params["embedding_table"].shape) if tied else 0
    return 6.0 * (sum(kernels) + table) * tokens + 6.0 * layers * width * context * tokens
