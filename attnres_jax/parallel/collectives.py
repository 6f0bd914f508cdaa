"""Counts what devices exchange, from a jaxpr and from compiled HLO.

The jaxpr has the program's own dtypes and says which axis a collective runs along; inside a manual
region it holds every collective that we wrote. The HLO also holds what the compiler added. (XLA for
CPUs sends bfloat16 as float32: there its bytes are twice those of the jaxpr.)
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

_PRIMITIVES = {
    "ppermute": "collective-permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}
KINDS = tuple(dict.fromkeys(_PRIMITIVES.values()))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program, as one device sees it.

    Attributes:
        kind: As HLO calls it, one of `KINDS`.
        shape: Of the result on one device.
        dtype: Its dtype, as HLO abbreviates it.
        count: How often it runs in one step.
        in_loop: Whether a loop runs it.
        over: Mesh axes (of a jaxpr) or pairs or groups of devices (of HLO).
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    in_loop: bool
    over: Any

    @property
    def bytes(self) -> int:
        """Bytes of all its results in one step."""
        return self.count * math.prod(self.shape) * _bytes_of(self.dtype)


def collectives_of_jaxpr(jaxpr: Any) -> list[Collective]:
    """Lists the collectives of a jaxpr such as `jax.make_jaxpr(step)(...)` returns.

    Loops count as often as they run, every branch of a conditional once.
    """
    return list(_walk(getattr(jaxpr, "jaxpr", jaxpr), 1, False))


def _walk(jaxpr: Any, times: int, in_loop: bool) -> Iterator[Collective]:
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        kind = _PRIMITIVES.get(name)
        if kind:
            axes = params.get("axes", params.get("axis_name"))
            axes = axes if isinstance(axes, tuple) else (axes,)
            over = (axes, params["perm"]) if name == "ppermute" else axes
            for result in equation.outvars:
                aval = result.aval
                dtype = _HLO_NAMES[aval.dtype.name]
                yield Collective(kind, tuple(aval.shape), dtype, times, in_loop, over)
        loops = name in ("scan", "while")
        for inner in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _walk(
                    getattr(inner, "jaxpr", inner),
                    times * params.get("length", 1) if loops else times,
                    in_loop or loops,
                )


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


_HLO_NAMES = {
    "bool": "pred",
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
} | {f"{sign}int{bits}": f"{sign or 's'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def _bytes_of(dtype: str) -> int:
    return 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_CALLEES = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TYPE = re.compile(r"\b(pred|bf16|[fsu]\d+)\[([\d,]*)\]")


def collectives_of_hlo(text: str) -> list[Collective]:
    """Lists the collectives of a compiled program, `compiled.as_text()`.

    Raises:
        ValueError: A loop that does not say how often it runs has a collective inside.
    """
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[1]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif line == "}":  # Attributes of several lines may begin one with a brace too.
            name = ""
        elif name:
            bodies[name].append(line)
    return list(_walk_hlo(bodies, entry, 1, False))


def _walk_hlo(bodies, name, times, in_loop) -> Iterator[Collective]:
    for line in bodies.get(name, ()):
        if match := _OPERATION.search(line):
            if times is None:
                raise ValueError(
                    "a collective is in a loop whose number of turns the program does not state:"
                    f" {line.strip()[:200]}"
                )
            over = re.search(r"(?:source_target_pairs|replica_groups)=(\S+?\}\}|\S+)", line)
            results = _TYPE.findall(match["type"])
            if match["start"] and match["kind"] != "all-reduce":
                # What starts asynchronously returns its operands, its results and its own state.
                results = [one for one in results if one != ("u32", "")]
                results = results[len(results) // 2 :]
            for dtype, shape in results:
                dims = tuple(int(size) for size in shape.split(",") if size)
                yield Collective(
                    match["kind"], dims, dtype, times, in_loop, over[1].rstrip(",") if over else ""
                )
        if match := _WHILE.search(line):
            turns = _turns(line, bodies.get(match[1], ()))
            inside = None if turns is None or times is None else times * turns
            yield from _walk_hlo(bodies, match[2], inside, True)
        else:
            for callees in _CALLEES.findall(line):
                for callee in re.findall(r"[\w.\-]+", callees):
                    yield from _walk_hlo(bodies, callee, times, in_loop)


def _turns(line: str, condition: list[str]) -> int | None:
    """How often a loop runs: as the compiler noted, or the only constant of its condition."""
    if match := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(match[1])
    constants = re.findall(r"s32\[\][^=]* constant\((\d+)\)", "\n".join(condition))
    return int(constants[0]) if len(constants) == 1 else None


def total_bytes(collectives: list[Collective], kind: str) -> int:
    """Bytes of all operations of a kind in one step."""
    return int(np.sum([one.bytes for one in collectives if one.kind == kind], dtype=np.int64))
