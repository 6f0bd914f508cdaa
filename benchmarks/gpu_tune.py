"""Times each Triton kernel alone for many launches: where the tables of `triton_tiling` come from.

    python -m benchmarks.gpu_tune [--n=8 --s=8 --d=2048] [--json]

Needs an NVIDIA GPU and jax-triton, and no network; about a minute a shape. Every kernel is compiled
with each of its candidates and timed as the difference of a program that repeats it 11 times and
one that repeats it 3 times, so that calling a program costs nothing. A row is a candidate: its
time, the bytes that it has to move by that, and the ratio to a copy. The fastest of each kernel is
last: what belongs into `LAUNCHES` (phase 1) or `GPUS` (phase 2).
"""

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import tyro

from benchmarks.rows import print_rows
from pallas_kernels import gpus
from pallas_kernels.inter_block import triton_gpu as phase_1
from pallas_kernels.inter_block.triton_tiling import Step
from pallas_kernels.inter_block.triton_tiling import choose_tiling as choose_phase_1
from pallas_kernels.merge import triton_gpu as phase_2
from pallas_kernels.merge.triton_tiling import choose_tiling as choose_phase_2

EPS = 1e-6
REPETITIONS = (3, 11)
STEPS = {  # warps, tokens, columns, stages
    "forward": [
        (*tile, stages)
        for tile in [(4, 2, 64), (4, 4, 64), (8, 2, 128), (8, 4, 64), (8, 4, 128)]
        for stages in (2, 3)
    ],
    "backward": [
        (*tile, stages)
        for tile in [(4, 1, 64), (4, 1, 128), (4, 2, 64), (8, 2, 64), (8, 2, 128), (16, 1, 256)]
        for stages in (2, 3)
    ],
    "query_gradients": [
        (*tile, stages)
        for tile in [(4, 2, 64), (4, 2, 128), (4, 4, 64), (4, 4, 128)]
        for stages in (2, 3)
    ],
}
ROW_TOKENS = (128, 256)
MERGE = [(4, 1), (4, 2), (8, 1), (8, 2), (16, 1), (16, 2)]  # warps, tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The shape."""

    n: int = 8
    """Finished sources."""
    s: int = 8
    """Reads."""
    d: int = 2048
    """Width."""
    tokens: int = 8192
    """Tokens."""
    threads: int = 14
    """Programs that are compiled at once."""
    json: bool = False
    """Print one JSON line a row instead of a table."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A launch of a kernel: `function(values, cotangents)` runs it alone."""

    kernel: str
    launch: str
    rows: int
    function: Callable


def main(settings: Settings) -> None:
    """Compiles, then times, then prints."""
    if jax.default_backend() != "gpu":
        sys.exit(f"benchmarks.gpu_tune needs an NVIDIA GPU; JAX sees {jax.devices()[0]}")
    phase_1.launch = _seen
    arrays = inputs_of(settings)
    found = candidates(settings, *arrays)
    copied = [jnp.full((2**27,), i, jnp.bfloat16) for i in range(REPETITIONS[1])]
    copies = [jax.jit(lambda xs, count=count: [x + 1 for x in xs[:count]]) for count in REPETITIONS]
    copy = 2 * copied[0].nbytes / seconds_of([partial(copying, copied) for copying in copies])
    copied.clear()
    with ThreadPoolExecutor(settings.threads) as pool:
        programs = list(pool.map(lambda candidate: compiled(candidate, arrays), found))
    rows = []
    for candidate, program in zip(found, programs, strict=True):
        row: dict[str, Any] = {"kernel": candidate.kernel, "launch": candidate.launch}
        if isinstance(program, str):
            rows.append(row | {"microseconds": None, "gb_per_s": None, "of_copy": None})
            continue
        seconds = seconds_of([partial(repeating, *arrays) for repeating in program])
        moved = candidate.rows * settings.tokens * settings.d * 2 / seconds
        rows.append(
            row | {"microseconds": 1e6 * seconds, "gb_per_s": moved / 1e9, "of_copy": moved / copy}
        )
    timed = [row for row in rows if row["microseconds"]]
    best = [
        min((row for row in timed if row["kernel"] == kernel), key=lambda row: row["microseconds"])
        for kernel in dict.fromkeys(row["kernel"] for row in timed)
    ]
    print_rows("Candidates", rows, as_json=settings.json)
    print_rows(f"Fastest; a copy moves {copy / 1e9:.0f} GB/s", best, as_json=settings.json)


def inputs_of(settings: Settings) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Sources, and cotangents of the reads."""
    row = jax.jit(lambda k: jax.random.normal(k, (settings.tokens, settings.d), jnp.bfloat16))
    keys = jax.random.split(jax.random.key(0), settings.n + settings.s)
    return tuple(map(row, keys[: settings.n])), tuple(map(row, keys[settings.n :]))


# --- Kernels one by one --------------------------------------------------------------------------


class _Spy(threading.local):
    """Sees the launches of phase 1 in this thread; those in `given` it replaces."""

    found: dict[str, Any] | None = None
    given: dict[str, Any] | None = None


_spy = _Spy()
_launch = phase_1.launch


def _seen(kernel, *, name: str, **options):
    result = (_spy.given or {}).get(name) or _launch(kernel, name=name, **options)
    if _spy.found is not None:
        _spy.found[name] = result
    return result


def only(name: str, function: Callable, given: dict[str, Any] | None = None) -> Callable:
    """A function of what the named launch returns; XLA leaves out launches that nothing needs."""

    def run(*arrays):
        _spy.found, _spy.given = {}, given
        try:
            function(*arrays)
            return _spy.found[name]
        finally:
            _spy.found = _spy.given = None

    return run


def candidates(settings: Settings, values, cotangents) -> list[Candidate]:
    """All launches of all kernels."""
    n, s, d, t = settings.n, settings.s, settings.d, settings.tokens
    capability = gpus.compute_capability()
    assert capability is not None
    query_sd = jax.random.normal(jax.random.key(1), (s, d)) / d**0.5
    gain_d = jnp.ones(d)
    base = choose_phase_1(n, s, d, jnp.bfloat16, compute_capability=capability)

    def forward(values, tiling):
        return phase_1.forward(values, query_sd, eps=EPS, tiling=tiling)

    _, lse_st, logits_snt, inverse_rms_nt = jax.jit(lambda values: forward(values, base))(values)

    def backward(values, cotangents, tiling):
        return phase_1.backward(
            *(values, query_sd, lse_st, logits_snt, inverse_rms_nt, cotangents, None),
            eps=EPS,
            tiling=tiling,
        )

    before = {
        "inter_block_backward": jax.jit(
            only("inter_block_backward", partial(backward, tiling=base))
        )(values, cotangents)
    }
    found = []
    of_kernel = {"forward": n + s, "backward": 2 * n + s, "query_gradients": n}
    for kernel, rows in of_kernel.items():
        for step in STEPS[kernel]:
            for row_tokens in ROW_TOKENS if kernel == "query_gradients" else (base.row_tokens,):
                changes: dict[str, Any] = {kernel: Step(*step), "row_tokens": row_tokens}
                tiling = dataclasses.replace(base, **changes)
                name = f"inter_block_{kernel}"
                if kernel == "forward":
                    function = only(name, lambda v, _, tiling=tiling: forward(v, tiling))
                else:
                    given = before if kernel == "query_gradients" else None
                    function = only(name, lambda v, c, t=tiling: backward(v, c, t), given)
                label = f"{Step(*step)}, row_tokens={row_tokens}"
                found.append(Candidate(name, label, rows, function))

    lse_t, scalars_kt = lse_st[0], jnp.abs(logits_snt[0, :1]).repeat(4, 0)

    def merge(values, cotangents, tiling):
        return phase_2.forward(
            *(values[1], lse_t, cotangents[0], values[0], query_sd[0], gain_d),
            eps=EPS,
            norm_eps=EPS,
            tiling=tiling,
        )

    def merge_backward(values, cotangents, tiling):
        return phase_2.backward(
            *(values[1], values[0], query_sd[0], gain_d, scalars_kt, None, cotangents[0], None),
            tiling=tiling,
        )

    for back, function in ((False, merge), (True, merge_backward)):
        base_2 = choose_phase_2(t, d, jnp.bfloat16, compute_capability=capability, backward=back)
        for warps, tokens in MERGE:
            columns = 256 * warps // tokens
            for row_tokens in (32, 64, base_2.row_tokens) if back else (base_2.row_tokens,):
                tiling = dataclasses.replace(
                    base_2,
                    num_warps=warps,
                    tokens=tokens,
                    half=columns // 2,
                    chunks=-(-d // columns),
                    row_tokens=row_tokens,
                )
                name = "merge_backward" if back else "merge_forward"
                run = partial(function, tiling=tiling)
                found.append(Candidate(name, str(tiling), 5, run))
    return found


# --- Timing --------------------------------------------------------------------------------------


def compiled(candidate: Candidate, arrays) -> list[Callable] | str:
    """The two programs of a candidate, or why there are none."""

    def repeated(count):
        def run(values, cotangents):
            # Rotated, or XLA would find all repetitions the same.
            orders = [values, values[::-1]]
            return [
                candidate.function(
                    _rotated(orders[i // len(values) % 2], i), _rotated(cotangents, i)
                )
                for i in range(count)
            ]

        return run

    try:
        return [jax.jit(repeated(count)).lower(*arrays).compile() for count in REPETITIONS]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _rotated(arrays: tuple, i: int) -> tuple:
    return arrays[i % len(arrays) :] + arrays[: i % len(arrays)]


def seconds_of(calls: list[Callable]) -> float:
    """Seconds of one repetition."""
    best = []
    for call in calls:
        jax.block_until_ready(call())
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
        best.append(min(times))
    return (best[1] - best[0]) / (REPETITIONS[1] - REPETITIONS[0])


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
