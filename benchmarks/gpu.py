"""Times the kernels on an NVIDIA GPU: first right, then fast.

    python -m benchmarks.gpu [--json]

Needs a GPU of compute capability 8.0 or newer and jax-triton, and no network; about four minutes.
The kernels are first held to the float64 oracle. Then come phase 1, phase 2, whole blocks and
single reads, through this library's Triton kernels and through XLA, beside a copy (the ceiling of
what memory can do) and other packages where they are installed: fla, flash_attn_res, torch.compile.
Last is a training step of the 436M model, block against standard.

Every timed program repeats its operation, so that calling it costs nothing beside it, and moves far
more than a second-level cache holds. Paths are timed in turns and a row is a median. Nothing is
compiled while anything is timed. Rows are printed as they are found; a path that is missing or
fails keeps its row, with the reason.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# Other packages allocate on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import tyro
from rich.console import Console

from attnres_jax import scaling_law_model
from benchmarks import gpu_check, gpu_peers, gpu_programs
from benchmarks.gpu_programs import CASES, Case
from benchmarks.step_overhead import gradient_step

CONSOLE = Console(stderr=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is timed, and for how long."""

    rounds: int = 7
    """Turns of each path of a case."""
    milliseconds: float = 20.0
    """A path runs at least so long in each turn."""
    threads: int = 14
    """Programs that are compiled at once."""
    seconds: float = 230.0
    """Nothing is begun after this time."""
    peers: bool = True
    """Whether other packages are timed."""
    model: bool = True
    """Whether the training step is timed."""
    json: bool = False
    """Print one JSON line a row instead of columns."""


@dataclasses.dataclass(frozen=True)
class Path:
    """Something to time: `call` starts `repetitions` of the operation, `wait` ends them."""

    call: Callable[[], Any] | None
    repetitions: int = 1
    note: str = ""
    wait: Callable[[Any], Any] = jax.block_until_ready


def main(settings: Settings) -> None:
    """Checks, then times."""
    started = time.perf_counter()
    device = jax.devices()[0]
    if device.platform != "gpu":
        sys.exit(f"benchmarks.gpu needs an NVIDIA GPU; JAX sees {device.device_kind}")
    emit(environment(), settings)

    def elapsed() -> float:
        return time.perf_counter() - started

    with ThreadPoolExecutor(settings.threads) as pool:
        checks = [(check, check.arrays()) for check in gpu_check.CHECKS]
        checking = [pool.submit(compiled, check.program(), *given) for check, given in checks]
        wrong = False
        for (check, given), future in zip(checks, checking, strict=True):
            row = gpu_check.row_of(check, future.result()(*given))
            wrong = wrong or not row["right"]
            emit(row, settings)
        if wrong:
            sys.exit("wrong values: nothing is timed")
        CONSOLE.print(f"{elapsed():.0f} s: right; compiling what is timed")
        copying = pool.submit(repeated_path, *gpu_programs.copy_program(), 10)
        timing = {case: start_compiling(case, pool) for case in CASES}
        steps = start_compiling_steps(pool) if settings.model else {}
        CONSOLE.print(f"{elapsed():.0f} s: other packages warm up, programs compile")
        peers = {case: warm_peers(case, settings, elapsed) for case in CASES if case.peers}
        paths = {
            case: {k: f.result() for k, f in futures.items()} for case, futures in timing.items()
        }
        copy = copying.result()
        training = {name: future.result() for name, future in steps.items()}
    CONSOLE.print(f"{elapsed():.0f} s: everything is compiled")
    for case in CASES:
        if elapsed() > settings.seconds:
            CONSOLE.print(f"no time left for {case}")
            continue
        others = {name: peer_path(call) for name, call in peers.pop(case, {}).items()}
        time_case(case, paths.pop(case) | others, copy, settings)
    if training and elapsed() < settings.seconds:
        time_training_step(training, settings)
    CONSOLE.print(f"{elapsed():.0f} s in all")


# --- Compiling -----------------------------------------------------------------------------------


def compiled(function: Callable, *arguments) -> Callable:
    """Compiles a function for its arguments."""
    return jax.jit(function).lower(*arguments).compile()


def repeated_path(function: Callable, arguments: tuple, repetitions: int) -> Path:
    """A path of a program that repeats `function`, or the reason why there is none."""
    try:
        program = compiled(gpu_programs.repeated(function, repetitions), *arguments)
    except Exception as error:
        return Path(None, note=f"{type(error).__name__}: {error}".replace("\n", " ")[:200])
    return Path(lambda: program(*arguments), repetitions)


def start_compiling(case: Case, pool: ThreadPoolExecutor) -> dict[str, Future]:
    """Begins to compile this library's paths of a case."""
    inputs = gpu_programs.inputs_of(case)

    def path(implementation):
        try:
            function, arguments = gpu_programs.program_of(case, implementation, inputs)
        except Exception as error:
            return Path(None, note=f"{type(error).__name__}: {error}"[:200])
        return repeated_path(function, arguments, case.repetitions)

    return {name: pool.submit(path, name) for name in ("triton_gpu", "xla")}


def warm_peers(case: Case, settings: Settings, elapsed: Callable[[], float]) -> dict[str, Any]:
    """Other packages' calls; torch.compile, which is slow to compile, only while there is time."""
    if not settings.peers:
        return {}
    names = gpu_peers.NAMES if elapsed() < settings.seconds / 2 else gpu_peers.NAMES[:2]
    late = dict.fromkeys(gpu_peers.NAMES, "no time to compile it")
    return late | gpu_peers.warm_calls(case, names)


def peer_path(call: Any) -> Path:
    """The path of a warm call, or of the reason why there is none."""
    if isinstance(call, str):
        return Path(None, note=call)
    call, note = gpu_peers.captured(call)
    return Path(call, note=note, wait=lambda _: gpu_peers.synchronize())


# --- Timing --------------------------------------------------------------------------------------


def median_seconds(paths: dict[str, Path], settings: Settings) -> dict[str, float]:
    """Median over turns of the time of one operation, in rounds that visit every path."""
    calls, seconds = {}, {name: [] for name in paths}
    for name, path in paths.items():
        run(path, 1)
        calls[name] = max(1, round(settings.milliseconds / 1e3 / run(path, 1)))
    for _ in range(settings.rounds):
        for name, path in paths.items():
            taken = run(path, calls[name])
            seconds[name].append(taken / calls[name] / path.repetitions)
    return {name: statistics.median(times) for name, times in seconds.items()}


def run(path: Path, calls: int) -> float:
    """Seconds of so many calls in a row."""
    start, last = time.perf_counter(), None
    assert path.call is not None
    for _ in range(calls):
        last = path.call()
    path.wait(last)
    return time.perf_counter() - start


def time_case(case: Case, paths: dict[str, Path], copy: Path, settings: Settings) -> None:
    """Prints a row for each path of a case."""
    paths = {"copy": copy} | paths
    runnable: dict[str, Path] = {}
    for name, path in paths.items():
        try:
            if path.call is not None:
                run(path, 1)
                runnable[name] = path
        except Exception as error:
            note = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
            paths = paths | {name: Path(None, note=note)}
    medians = median_seconds(runnable, settings)
    ceiling = gpu_programs.COPY_BYTES / medians["copy"]
    ours = medians.get("triton_gpu")
    for name, path in paths.items():
        seconds = medians.get(name)
        moved = gpu_programs.COPY_BYTES if name == "copy" else case.bytes_moved
        emit(
            {
                "what": case.what,
                "direction": case.direction,
                "n": case.n,
                "s": case.s,
                "d": case.d,
                "tokens": case.t,
                "path": name,
                "microseconds": seconds and 1e6 * seconds,
                "minimum_gb_per_s": seconds and moved / seconds / 1e9,
                "of_copy": seconds and moved / seconds / ceiling,
                "over_triton_gpu": None if name == "copy" else seconds and ours and seconds / ours,
                "note": path.note,
            },
            settings,
        )


# --- A training step -----------------------------------------------------------------------------

STEPS = {
    "standard": {"residual": "standard"},
    "block, triton_gpu": {"residual": "block", "implementation": "triton_gpu"},
    "block, xla": {"residual": "block", "implementation": "xla"},
}


def start_compiling_steps(pool: ThreadPoolExecutor) -> dict[str, Future]:
    """Begins to compile loss and gradients of the 436M model, 4096 tokens."""
    tokens_bt = jax.random.randint(jax.random.key(0), (2, 2049), 0, 32_000)

    def path(fields):
        try:
            config = scaling_law_model(
                "436m", vocab_size=32_000, compute_dtype="bfloat16", remat="block", **fields
            )
            step, params = gradient_step(config)
            program = step.lower(params, tokens_bt).compile()
        except Exception as error:
            return Path(None, note=f"{type(error).__name__}: {error}"[:200]), 0
        memory = program.memory_analysis()
        return Path(lambda: program(params, tokens_bt)), memory.temp_size_in_bytes if memory else 0

    return {name: pool.submit(path, fields) for name, fields in STEPS.items()}


def time_training_step(steps: dict[str, tuple[Path, int]], settings: Settings) -> None:
    """Prints a row for each kind of residual."""
    paths = {name: path for name, (path, _) in steps.items() if path.call is not None}
    medians = median_seconds(paths, settings)
    for name, (path, temporary) in steps.items():
        seconds, standard = medians.get(name), medians.get("standard")
        emit(
            {
                "what": "training step, 436M, 4096 tokens",
                "path": name,
                "milliseconds": seconds and 1e3 * seconds,
                "over_standard": seconds and standard and seconds / standard,
                "temporary_mib": temporary / 2**20,
                "note": path.note,
            },
            settings,
        )


# --- Printing ------------------------------------------------------------------------------------


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


_printed_names: list[str] = []


def emit(row: dict, settings: Settings) -> None:
    """Prints a row at once: JSON, or columns, under their names where these change."""
    if settings.json:
        print(json.dumps(row), flush=True)
        return
    widths = [max(len(name), 10) for name in row]
    values = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()]
    if _printed_names != list(row):
        _printed_names[:] = list(row)
        print("\n" + "  ".join(k.rjust(w) for k, w in zip(row, widths, strict=True)))
    print("  ".join(v.rjust(w) for v, w in zip(values, widths, strict=True)), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
