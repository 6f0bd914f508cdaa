"""Times the kernels on an NVIDIA GPU: first right, then fast.

    python -m benchmarks.gpu [--json]

Needs a GPU of compute capability 8.0 or newer and jax-triton, and no network. The kernels are first
held to the float64 oracle. Then each shape is timed in interleaved rounds, and a row is a median:
this library's Triton kernels, the same through XLA, a copy that moves as many bytes as the read
has to (the ceiling), and other packages where they are installed (`fla`, `flash_attn_res`,
torch.compile). The second-level cache is flushed before each call. Last comes a training step of
the 436M model, block against standard. A path that is missing or fails keeps its row.
"""

import dataclasses
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# Other packages allocate on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from attnres_jax.models.presets import scaling_law_model
from attnres_jax.ops import inter_block as xla_inter_block
from attnres_jax.ops import merge as xla_merge
from benchmarks.rows import print_rows
from benchmarks.step_overhead import gradient_step
from pallas_kernels.inter_block import triton_gpu as phase_1
from pallas_kernels.inter_block import triton_tiling as phase_1_tiling
from pallas_kernels.merge import triton_gpu as phase_2
from pallas_kernels.merge import triton_tiling as phase_2_tiling
from tests import oracles

EPS = 1e-6
CONSOLE = Console(stderr=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is timed, and for how long."""

    num_tokens: int = 8192
    """Tokens of every read."""
    rounds: int = 15
    """Timed rounds of each shape."""
    calls: int = 8
    """Calls of a path in a round."""
    seconds: float = 330.0
    """No shape is begun after this time."""
    json: bool = False
    """Print one JSON line a row instead of a table."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """N finished sources, S reads, width D; what of them is timed."""

    n: int
    s: int
    d: int
    whole_block: bool


SHAPES = (
    Shape(8, 8, 2048, whole_block=True),
    Shape(8, 24, 7168, whole_block=True),
    Shape(9, 1, 7168, whole_block=False),
    Shape(9, 12, 2048, whole_block=False),
)


# --- A block: phase 1, then S - 1 merges ---------------------------------------------------------
# A sub-layer is the identity here, so that nothing but Attention Residuals is timed.


def xla_block(values, query_sd, gain_d, *, whole_block):
    """The outputs of phase 1, or the last hidden of a block and its sum."""
    outputs, lse_st = xla_inter_block(values, query_sd, jnp.ones_like(query_sd), eps=EPS)
    if not whole_block:
        return outputs
    summed, update = None, outputs[0]
    for s in range(1, len(outputs)):
        summed, update = xla_merge(
            *(outputs[s], lse_st[s], summed, update, query_sd[s], jnp.ones_like(query_sd[s])),
            norm_gain_d=gain_d,
            eps=EPS,
        )
    return summed, update


@dataclasses.dataclass(frozen=True)
class Tilings:
    """Launches of both phases."""

    phase_1: phase_1_tiling.Tiling
    merge_forward: phase_2_tiling.Tiling
    merge_backward: phase_2_tiling.Tiling

    @classmethod
    def choose(cls, n: int, num_tokens: int, width: int, capability: int) -> "Tilings":
        """For bfloat16 arrays of `num_tokens` rows."""
        options = {"compute_capability": capability}
        merge = functools.partial(
            phase_2_tiling.choose_tiling, num_tokens, width, jnp.bfloat16, **options
        )
        return cls(
            phase_1_tiling.choose_tiling(n, width, jnp.bfloat16, **options),
            merge(backward=False),
            merge(backward=True),
        )


def triton_block(values, query_sd, gain_d, *, whole_block, tilings):
    """Like `xla_block`, with what the backward pass keeps."""
    outputs, *statistics = phase_1.forward(values, query_sd, eps=EPS, tiling=tilings.phase_1)
    if not whole_block:
        return outputs, (outputs, statistics, [])
    summed, update, kept = None, outputs[0], []
    for s in range(1, len(outputs)):
        summed, update, _, scalars = phase_2.forward(
            *(outputs[s], statistics[0][s], summed, update, query_sd[s], gain_d),
            eps=EPS,
            norm_eps=EPS,
            tiling=tilings.merge_forward,
        )
        kept.append((summed, scalars))
    return (summed, update), (outputs, statistics, kept)


def triton_gradients(values, query_sd, gain_d, cotangents, *, whole_block, tilings):
    """Gradients of `triton_block` to sources, queries and gain, as its reverse."""
    _, (outputs, statistics, kept) = triton_block(
        values, query_sd, gain_d, whole_block=whole_block, tilings=tilings
    )
    lse_st, logits_snt, inverse_rms_nt = statistics
    if not whole_block:
        return phase_1.backward(
            *(values, query_sd, lse_st, logits_snt, inverse_rms_nt, cotangents, None),
            eps=EPS,
            tiling=tilings.phase_1,
        )
    dsummed, dupdate = cotangents
    doutputs, dlse = list(outputs), [jnp.zeros_like(lse_st[0])] * len(outputs)
    dquery, dgain = jnp.zeros_like(query_sd), jnp.zeros_like(gain_d)
    for s in reversed(range(1, len(outputs))):
        summed, scalars = kept[s - 1]
        doutputs[s], dlse[s], dsummed, dquery_d, dgain_d = phase_2.backward(
            *(outputs[s], summed, query_sd[s], gain_d, scalars, dsummed, dupdate, None),
            tiling=tilings.merge_backward,
        )
        dupdate = dsummed
        dquery, dgain = dquery.at[s].add(dquery_d), dgain + jnp.asarray(dgain_d)
    doutputs[0] = dupdate
    dvalues, dfolded = phase_1.backward(
        *(values, query_sd, lse_st, logits_snt, inverse_rms_nt, tuple(doutputs), jnp.stack(dlse)),
        eps=EPS,
        tiling=tilings.phase_1,
    )
    return dvalues, dfolded + dquery, dgain


def xla_gradients(values, query_sd, gain_d, cotangents, *, whole_block):
    """The same by autodiff."""
    function = functools.partial(xla_block, whole_block=whole_block)
    if not whole_block:
        return jax.vjp(lambda v, q: function(v, q, gain_d), values, query_sd)[1](cotangents)
    return jax.vjp(function, values, query_sd, gain_d)[1](cotangents)


def inputs_of(shape: Shape, num_tokens: int):
    """Sources, queries, gain of the norm, and cotangents of what `xla_block` returns."""
    keys = jax.random.split(jax.random.key(0), shape.n + shape.s + 3)

    def row(key):
        return jax.random.normal(key, (num_tokens, shape.d), jnp.bfloat16)

    values = tuple(row(key) for key in keys[: shape.n])
    query_sd = jax.random.normal(keys[-1], (shape.s, shape.d)) / shape.d**0.5
    gain_d = 1 + 0.1 * jax.random.normal(keys[-2], (shape.d,))
    count = 2 if shape.whole_block else shape.s
    cotangents = tuple(row(key) for key in keys[shape.n : shape.n + count])
    return values, query_sd, gain_d, cotangents


# --- Right ---------------------------------------------------------------------------------------


def check(capability: int) -> list[dict]:
    """Holds a read of every width and its gradients to the float64 oracle; exits if one is wrong.

    The errors of bfloat16 results are in units of the error of rounding the exact result once.
    """
    rows = []
    for shape in SHAPES:
        read = dataclasses.replace(shape, s=min(shape.s, 8), whole_block=False)
        values, query_sd, gain_d, cotangents = inputs_of(read, 64)
        tilings = Tilings.choose(read.n, 64, read.d, capability)
        options = {"whole_block": False, "tilings": tilings}
        outputs = jax.jit(functools.partial(triton_block, **options))(values, query_sd, gain_d)[0]
        dvalues, dquery = jax.jit(functools.partial(triton_gradients, **options))(
            values, query_sd, gain_d, cotangents
        )
        sources = [oracles.float64(value) for value in values]
        queries = np.float64(query_sd)
        gains = np.ones(query_sd.shape)
        reads = oracles.group_read(sources, queries, gains, EPS)
        right = oracles.group_read_gradients(
            sources, queries, gains, oracles.float64(cotangents), eps=EPS
        )
        bfloat16 = np.dtype(jnp.bfloat16)
        pairs = [
            *zip(outputs, [read.output for read in reads], strict=True),
            *zip(dvalues, right.sources, strict=True),
        ]
        errors = [
            oracles.relative_error(a, b) / oracles.rounding_floor(b, bfloat16) for a, b in pairs
        ]
        of_query = oracles.relative_error(dquery, right.query)
        of_block = block_difference(shape, capability)
        rows.append(
            {
                "n": read.n,
                "s": read.s,
                "d": read.d,
                "largest_error_over_rounding": max(errors),
                "query_gradient_error": of_query,
                "block_difference_from_xla": of_block,
            }
        )
        # A block rounds its sum to bfloat16 S times.
        if not (max(errors) <= 1.05 and of_query <= 2e-5 and of_block <= 2e-2):
            print_rows("Correctness", rows, as_json=False)
            sys.exit("wrong values: nothing is timed")
    return rows


def block_difference(shape: Shape, capability: int) -> float:
    """Largest relative difference from XLA of a whole block's gradients, over its arguments."""
    block = dataclasses.replace(shape, s=min(max(shape.s, 2), 8), whole_block=True)
    arguments = inputs_of(block, 64)
    tilings = Tilings.choose(block.n, 64, block.d, capability)
    triton = functools.partial(triton_gradients, whole_block=True, tilings=tilings)
    xla = functools.partial(xla_gradients, whole_block=True)
    found = jax.tree.leaves(jax.jit(triton)(*arguments))
    expected = jax.tree.leaves(jax.jit(xla)(*arguments))
    return max(oracles.relative_error(a, b) for a, b in zip(found, expected, strict=True))


# --- Fast ----------------------------------------------------------------------------------------


def minimum_rows(shape: Shape, *, gradients: bool) -> int:
    """Least rows of the width a token that the forward pass, or both passes, must move."""
    n, s = shape.n, shape.s
    forward = n + 6 * s - 5 if shape.whole_block else n + s
    if not gradients:
        return forward
    return forward + (2 * n + 7 * s - 6 if shape.whole_block else 2 * n + s)


def paths(shape: Shape, num_tokens: int, capability: int, *, gradients: bool) -> dict[str, Any]:
    """A call without arguments for each path, or the reason why there is none."""
    values, query_sd, gain_d, cotangents = inputs_of(shape, num_tokens)
    tilings = Tilings.choose(shape.n, num_tokens, shape.d, capability)
    arguments = (values, query_sd, gain_d, *((cotangents,) if gradients else ()))
    xla = xla_gradients if gradients else xla_block
    triton = triton_gradients if gradients else triton_block
    block = {"whole_block": shape.whole_block}
    rows = minimum_rows(shape, gradients=gradients)
    copied = jnp.zeros((rows // 2, num_tokens, shape.d), jnp.bfloat16)
    found: dict[str, Any] = {
        "triton": _jitted(functools.partial(triton, **block, tilings=tilings), *arguments),
        "xla": _jitted(functools.partial(xla, **block), *arguments),
        "copy": _jitted(lambda x: x + 1, copied),
    }
    return found | torch_paths(shape, num_tokens, gradients=gradients)


def _jitted(function: Callable, *arguments) -> Callable[[], Any] | str:
    try:
        compiled = jax.jit(function).lower(*arguments).compile()
        jax.block_until_ready(compiled(*arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return lambda: compiled(*arguments)


def torch_paths(shape: Shape, num_tokens: int, *, gradients: bool) -> dict[str, Any]:
    """Other packages' single reads, one query at a time, and torch.compile of the equation.

    They have no whole block; S of their reads of N sources are what they need for phase 1.
    """
    names = ("fla", "flash_attn_res", "torch_compile")
    if shape.whole_block:
        return {}
    try:
        import torch
    except ImportError:
        return dict.fromkeys(names, "torch is not installed")
    if not torch.cuda.is_available():
        return dict.fromkeys(names, "torch sees no GPU")

    def tensor(*sizes):
        x = torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)
        return x.requires_grad_(gradients)

    sources = [tensor(1, num_tokens, shape.d) for _ in range(shape.n)]
    queries = [tensor(shape.d) for _ in range(shape.s)]
    gain = torch.ones(shape.d, device="cuda", dtype=torch.bfloat16)
    cotangent = torch.randn_like(sources[0])

    def equation(query, *sources):
        v = torch.stack(sources).float()
        logits = (v * query.float()).sum(-1) * (v.square().mean(-1) + EPS).rsqrt()
        return (logits.softmax(0)[..., None] * v).sum(0).to(torch.bfloat16)

    def run(read):
        def call():
            outputs = [read(query) for query in queries]
            if gradients:
                for source in sources:
                    source.grad = None
                torch.autograd.backward(outputs, [cotangent] * len(outputs))
            return outputs

        return _torch_call(torch, call)

    found: dict[str, Any] = {}
    try:
        from fla.ops.attnres import fused_attnres

        found["fla"] = run(lambda query: fused_attnres(query, sources, gain, rms_eps=EPS))
    except ImportError as error:
        found["fla"] = f"not installed: {error}"
    try:
        from flash_attn_res.ops.phase_1 import phase_1_batched_attention_triton_op

        def two_phase():
            stacked, query_sd = torch.stack(sources), torch.stack(queries)
            outputs, _ = phase_1_batched_attention_triton_op(stacked, query_sd, EPS)
            if gradients:
                for source in sources:
                    source.grad = None
                outputs.backward(cotangent.expand_as(outputs))
            return outputs

        found["flash_attn_res"] = _torch_call(torch, two_phase)
    except ImportError as error:
        found["flash_attn_res"] = f"not installed: {error}"
    compiled = torch.compile(equation)
    found["torch_compile"] = run(lambda query: compiled(query, *sources))
    return found


def _torch_call(torch, call) -> Callable[[], Any] | str:
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]

    def finished():
        call()
        return _Synchronised(torch)

    return finished


class _Synchronised:
    """Lets `jax.block_until_ready` wait for torch."""

    def __init__(self, torch):
        self.torch = torch

    def block_until_ready(self):
        self.torch.cuda.synchronize()
        return self


def median_seconds(calls: dict[str, Callable], flush: Callable, settings: Settings) -> dict:
    """Median over rounds of the time of a call, in rounds that visit every path."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(settings.rounds):
        for name, call in calls.items():
            alone = _seconds(lambda: None, flush, settings.calls)
            both = _seconds(call, flush, settings.calls)
            seconds[name].append((both - alone) / settings.calls)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _seconds(call: Callable, flush: Callable, calls: int) -> float:
    start, flushed, last = time.perf_counter(), None, None
    for _ in range(calls):
        flushed, last = flush(), call()
    jax.block_until_ready((flushed, last))
    if isinstance(last, _Synchronised):
        last.block_until_ready()
    return time.perf_counter() - start


def time_shape(shape: Shape, settings: Settings, capability: int, flush, *, gradients) -> list:
    """A row for each path of a shape."""
    found = paths(shape, settings.num_tokens, capability, gradients=gradients)
    calls = {name: call for name, call in found.items() if callable(call)}
    medians = median_seconds(calls, flush, settings)
    moved = minimum_rows(shape, gradients=gradients) * settings.num_tokens * shape.d * 2
    what = ("block" if shape.whole_block else "phase 1") + (" with gradients" if gradients else "")
    ceiling = medians.get("copy", float("nan"))
    return [
        {
            "what": what,
            "n": shape.n,
            "s": shape.s,
            "d": shape.d,
            "path": name,
            "microseconds": 1e6 * medians[name] if name in medians else None,
            "minimum_gb_per_s": moved / medians[name] / 1e9 if name in medians else None,
            "copy_over_path": ceiling / medians[name] if name in medians else None,
            "note": "" if name in medians else found[name],
        }
        for name in found
    ]


def time_training_step(settings: Settings, flush) -> list[dict]:
    """Loss and gradients of the 436M-shaped model: standard, and Block Attention Residuals.

    The library chooses how the reads are computed.
    """
    seconds, temporary = {}, {}
    for residual in ("standard", "block"):
        config = scaling_law_model(
            "436m", vocab_size=32_000, residual=residual, compute_dtype="bfloat16", remat="block"
        )
        step, params = gradient_step(config)
        tokens_bt = jax.random.randint(jax.random.key(0), (2, 2049), 0, 32_000)
        compiled = step.lower(params, tokens_bt).compile()
        jax.block_until_ready(compiled(params, tokens_bt))
        calls = {residual: functools.partial(compiled, params, tokens_bt)}
        fewer = dataclasses.replace(settings, rounds=5, calls=2)
        seconds |= median_seconds(calls, flush, fewer)
        memory = compiled.memory_analysis()
        temporary[residual] = memory.temp_size_in_bytes if memory else 0
    return [
        {
            "residual": residual,
            "milliseconds": 1e3 * seconds[residual],
            "over_standard": seconds[residual] / seconds["standard"],
            "temporary_mib": temporary[residual] / 2**20,
        }
        for residual in seconds
    ]


def environment() -> dict:
    """Date, card, driver and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
        card = done.stdout.strip()
    except OSError as error:
        card = str(error)
    import triton

    return {
        "date": time.strftime("%Y-%m-%d"),
        "card": card,
        "jax": jax.__version__,
        "triton": triton.__version__,
    }


def main(settings: Settings) -> None:
    """Checks, then times; prints three tables."""
    started = time.perf_counter()
    device = jax.devices()[0]
    if device.platform != "gpu":
        sys.exit(f"benchmarks.gpu needs an NVIDIA GPU; JAX sees {device.device_kind}")
    capability = round(10 * float(device.compute_capability))
    print_rows("Environment", [environment()], as_json=settings.json)
    print_rows("Correctness", check(capability), as_json=settings.json)
    # Four times the largest second-level cache.
    scratch = jnp.zeros((2**28,), jnp.int8)
    compiled = jax.jit(lambda x: x + 1).lower(scratch).compile()

    def flush():
        return compiled(scratch)

    jax.block_until_ready(flush())
    rows = []
    for shape in SHAPES:
        for gradients in (False, True):
            if time.perf_counter() - started > settings.seconds:
                CONSOLE.print(f"out of time before {shape}, gradients={gradients}")
                continue
            CONSOLE.print(f"{shape}, gradients={gradients}")
            rows += time_shape(shape, settings, capability, flush, gradients=gradients)
    print_rows("Times", rows, as_json=settings.json)
    if time.perf_counter() - started < settings.seconds:
        steps = time_training_step(settings, flush)
        print_rows("Training step, 436M, 4096 tokens", steps, as_json=settings.json)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
