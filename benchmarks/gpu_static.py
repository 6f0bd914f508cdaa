"""What the Triton kernels compile to, for GPUs that are not there: a static count, not a timing.

    uv run --group aot python -m benchmarks.gpu_static [--json]

Compiles every launch of both phases and of the single-phase read down to machine code for compute
capabilities 8.0, 9.0 and 10.0, and counts registers, spills and bytes. One process on each core;
some minutes. Rows of a shape are printed when all of them are found.
"""

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import triton
import tyro
from rich.console import Console
from rich.progress import Progress
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.rows import print_rows
from pallas_kernels import gpus, triton_launch
from pallas_kernels.gpus import launches_for
from pallas_kernels.inter_block import gpu_launch as inter_block
from pallas_kernels.inter_block import triton_gpu as inter_block_kernels
from pallas_kernels.inter_block.call import Call as InterBlockCall
from pallas_kernels.inter_block.triton_tiling import GPUS
from pallas_kernels.merge import gpu_launch as merge
from pallas_kernels.merge import triton_gpu as merge_kernels
from pallas_kernels.merge.call import Call as MergeCall
from pallas_kernels.single_phase import gpu_launch as single_phase
from pallas_kernels.single_phase import triton_gpu as single_phase_kernels

STATIC = "Static counts from compiled machine code, not timings; no GPU was used."
TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TRITON_TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}


@dataclasses.dataclass(frozen=True)
class Multiprocessor:
    """Limits that decide how many programs run at once; from NVIDIA's CUDA programming guide."""

    shared_memory: int
    registers: int = 65536
    threads: int = 2048
    programs: int = 32


MULTIPROCESSORS = {
    80: Multiprocessor(164 * 1024),
    90: Multiprocessor(228 * 1024),
    100: Multiprocessor(228 * 1024),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """N sources, S reads, width D. The single-phase read has two sources whatever N is."""

    n: int
    s: int
    d: int
    dtype: str = "bfloat16"

    def rows(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        """An array `[t, d]`."""
        return _array(num_tokens, self.d, dtype=jnp.dtype(self.dtype))


SHAPES = (
    Shape(9, 12, 2048),
    Shape(10, 6, 2304),
    Shape(9, 8, 7168),
    Shape(8, 24, 7168),
    Shape(9, 4, 1168),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Which kernels are compiled."""

    num_tokens: int = 8192
    """Tokens of a launch."""
    capabilities: tuple[int, ...] = (80, 90, 100)
    """Compute capabilities, 90 for 9.0."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the rows."""
    processes: int = os.cpu_count() or 1
    """How many kernels are compiled at once."""
    json: bool = False
    """Print one JSON line a row instead of tables."""


def main(settings: Settings) -> None:
    """Compiles and prints a row for each launch, then one for each pass with the bytes it moves."""
    print(STATIC, flush=True)
    cases = [
        (name, dataclasses.replace(shape, dtype=settings.dtype), settings.num_tokens, capability)
        for capability in settings.capabilities
        for shape in SHAPES
        for name in PASSES
    ]
    # Not forked: JAX has threads.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(settings.processes, mp_context=context) as pool,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        futures = {case: pool.submit(pass_rows, *case) for case in cases}
        bar = progress.add_task("compiling", total=len(cases))
        try:
            for _ in as_completed(futures.values()):
                progress.advance(bar)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    found = [future.result() for future in futures.values()]
    print_rows("Kernels", [r for rows in found for r in rows[:-1]], as_json=settings.json)
    print_rows("Bytes of device memory", [rows[-1] for rows in found], as_json=settings.json)


# --- Passes and the least they can move ----------------------------------------------------------


def pass_rows(name: str, shape: Shape, num_tokens: int, capability: int) -> list[dict]:
    """Compiles a pass; returns a row for each of its launches and one for all of them."""
    minimum_rows, function, arguments = PASSES[name](shape, num_tokens)
    with mock.patch.object(gpus, "compute_capability", lambda: capability):
        launches = record(function, arguments)
    where = {"compute_capability": capability / 10, "n": shape.n, "s": shape.s, "d": shape.d}
    rows = [where | compiled(launch, capability) for launch in launches]
    moved = sum(launch.bytes_moved for launch in launches)
    minimum = minimum_rows * _bytes(shape.rows(num_tokens))
    return [
        *rows,
        where
        | {
            "pass": name,
            "launches": len(launches),
            "minimum_rows": minimum_rows,
            "mib": moved / 2**20,
            "over_minimum": moved / minimum,
        },
    ]


def _array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _inter_block(shape, num_tokens):
    values = (shape.rows(num_tokens),) * shape.n
    return InterBlockCall("triton_gpu", 1e-6, None, False), values, _array(shape.s, shape.d)


def _inter_block_forward(shape, num_tokens):
    call, values, folded = _inter_block(shape, num_tokens)
    run = functools.partial(inter_block.run_forward, call)
    return shape.n + shape.s, run, (values, folded, None, None)


def _inter_block_backward(shape, num_tokens, accumulate=False):
    call, values, folded = _inter_block(shape, num_tokens)
    statistics = (
        _array(shape.s, num_tokens),
        _array(shape.s, shape.n, num_tokens),
        _array(shape.n, num_tokens),
        _array(shape.s, num_tokens),
        None,
    )
    doutputs = (shape.rows(num_tokens),) * shape.s
    run = functools.partial(inter_block.run_backward, call)
    dvalues = values if accumulate else None
    rows = (3 if accumulate else 2) * shape.n + shape.s
    return rows, run, (values, folded, None, statistics, None, doutputs, dvalues)


def _merge(shape, num_tokens):
    call = MergeCall("triton_gpu", 1e-6, 1e-6, None, False)
    return call, shape.rows(num_tokens), _array(shape.d), _array(num_tokens)


def _merge_forward(shape, num_tokens):
    call, row, vector, scalars = _merge(shape, num_tokens)
    run = functools.partial(merge.run_forward, call)
    return 5, run, (row, scalars, row, row, vector, vector)


def _merge_backward(shape, num_tokens):
    call, row, vector, scalars = _merge(shape, num_tokens)
    run = functools.partial(merge.run_backward, call)
    statistics = _array(4, num_tokens)
    return 6, run, (row, row, vector, vector, statistics, row, row, scalars)


def _single_phase_forward(shape, num_tokens):
    call, row, vector, _ = _merge(shape, num_tokens)
    run = functools.partial(single_phase.run_forward, call)
    return 2 + 4, run, ((row,) * 2, row, row, vector, vector)


def _single_phase_backward(shape, num_tokens):
    call, row, vector, _ = _merge(shape, num_tokens)
    run = functools.partial(single_phase.run_backward, call)
    values, statistics = (row,) * 2, _array(7, num_tokens)
    arguments = (values, row, vector, vector, statistics, row, row, None, values)
    return 3 * 2 + 4, run, arguments


PASSES: dict[str, Callable] = {
    "inter_block_forward": _inter_block_forward,
    "inter_block_backward": _inter_block_backward,
    "inter_block_backward_accumulating": functools.partial(_inter_block_backward, accumulate=True),
    "merge_forward": _merge_forward,
    "merge_backward": _merge_backward,
    "single_phase_forward": _single_phase_forward,
    "single_phase_backward": _single_phase_backward,
}


# --- Launches, recorded instead of called --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Launch:
    """The arguments of `triton_launch.launch`, arrays as shapes."""

    kernel: Any
    name: str
    arguments: dict
    constants: dict
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    bytes_moved: int


def record(function, arguments) -> list[Launch]:
    """Traces a function of arrays and returns the kernels that it would launch."""
    launches = []

    def launch(kernel, *, name, inputs, outputs, constants, grid, num_warps, **options):
        made = {key: _array(*shape, dtype=dtype) for key, (shape, dtype) in outputs.items()}
        updated = options.get("updated") or {}
        changed = {key: _shapes(group) for key, group in updated.items()}
        inputs = {key: _shapes(x) for key, x in inputs.items()}
        launches.append(
            Launch(
                kernel=kernel,
                name=name,
                arguments={**inputs, **made, **changed, **dict.fromkeys(options.get("unused", ()))},
                constants=dict(constants),
                grid=grid,
                num_warps=num_warps,
                num_stages=options.get("num_stages", 1),
                bytes_moved=_bytes(inputs) + _bytes(made) + 2 * _bytes(changed),
            )
        )
        return {
            **{key: jnp.zeros(x.shape, x.dtype) for key, x in made.items()},
            **updated,
        }

    modules = triton_launch, inter_block_kernels, merge_kernels, single_phase_kernels
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "launch", launch))
        jax.eval_shape(function, *arguments)
    return launches


def _shapes(x):
    return jax.tree.map(lambda a: _array(*a.shape, dtype=a.dtype) if hasattr(a, "dtype") else a, x)


def _bytes(tree) -> int:
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)


# --- Compiling to machine code -------------------------------------------------------------------


def compiled(launch: Launch, capability: int) -> dict:
    """Compiles a launch and counts."""
    program = triton.compile(
        source_of(launch),
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "enable_fp_fusion": True,
        },
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "--print-line-info", file.name)
    registers = int(re.findall(r"REG:(\d+)", usage)[0])
    shared = program.metadata.shared
    spills = len(re.findall(r"\b(?:STL|LDL)\b", listing))
    limits = MULTIPROCESSORS[capability]
    threads = 32 * launch.num_warps
    resident = min(
        limits.registers // (-(-registers // 8) * 8 * threads),
        limits.shared_memory // (shared + 1024),
        limits.threads // threads,
        limits.programs,
    )
    widths = access_widths(listing, activation_lines(program.asm["ttir"]))
    read_twice = launch.name in ("inter_block_forward", "inter_block_backward")
    return {
        "kernel": launch.name,
        "programs": math.prod(launch.grid),
        "warps": launch.num_warps,
        "registers": registers,
        "spills": spills,
        "shared_bytes": shared,
        "occupancy": resident * threads / limits.threads,
        "access_bytes": "/".join(map(str, sorted(widths))) or "-",
        "of_cache": share_of_cache(launch, resident, capability) if read_twice else None,
    }


def share_of_cache(launch: Launch, resident: int, capability: int) -> float:
    """What a kernel will read again, of the second-level cache that it hopes to find it in.

    Counted are the rows of all programs that run at once, halved: on average a program has read
    half of them and not yet read them again.
    """
    gpu = launches_for(GPUS, jnp.bfloat16, capability)
    rows = [*launch.arguments["values"], *launch.arguments.get("doutputs", ())]
    of_a_token = sum(row.shape[-1] * row.dtype.itemsize for row in rows)
    programs = gpu.multiprocessors * resident
    return programs * launch.constants["TOKENS"] * of_a_token / 2 / gpu.cache


def source_of(launch: Launch) -> ASTSource:
    """A kernel with the types of its arguments; arrays are aligned, as XLA's are."""
    constants, types, attributes = dict(launch.constants), {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        argument = launch.arguments.get(parameter.name)
        if parameter.name in constants or argument is None or argument == 1:
            constants.setdefault(parameter.name, argument)
            types[parameter.name] = "constexpr"
        else:
            types[parameter.name] = _type(argument)
        for path in _array_paths(argument):
            attributes[(i, *path)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature=types, constexprs=constants, attrs=attributes)


def _type(argument):
    if isinstance(argument, tuple):
        return tuple(_type(x) for x in argument)
    if isinstance(argument, int):
        return "i32"
    return "fp32" if isinstance(argument, float) else TRITON_TYPES[jnp.dtype(argument.dtype).name]


def _array_paths(argument):
    if isinstance(argument, tuple):
        return [(i,) for i in range(len(argument))]
    return [()] if isinstance(argument, jax.ShapeDtypeStruct) else []


def activation_lines(ttir: str) -> set[tuple[str, int]]:
    """Source lines (file, number) that load or store arrays of the width.

    Those are of 16-bit elements, or of 32-bit words that hold two; statistics are float32. Nothing
    is found where the rows are float32 too.
    """
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttir, re.MULTILINE))

    def line_of(place: str) -> tuple[str, int] | None:
        text = places.get(place, "")
        if found := re.match(r'"([^"]*)":(\d+)', text):
            return pathlib.Path(found[1]).name, int(found[2])
        # An inlined function: where it is called from does not matter.
        found = re.match(r"(?:callsite\(|\"[^\"]*\"\()(#loc\d*)", text)
        return line_of(found[1]) if found else None

    accesses = re.findall(
        r"tt\.(?:load|store) .*tensor<[\dx]+x!tt\.ptr<(?:bf16|f16|i32)>.* loc\((#loc\d*)\)", ttir
    )
    return {line for place in accesses if (line := line_of(place))}


def access_widths(listing: str, lines: set[tuple[str, int]]) -> set[int]:
    """Bytes of each access of a thread to device memory that these source lines make."""
    widths, wanted, after_place = set(), False, False
    for line in listing.splitlines():
        if found := re.search(r'//## File "([^"]*)", line (\d+)', line):
            # The first of several is the innermost function's.
            if not after_place:
                wanted = (pathlib.Path(found[1]).name, int(found[2])) in lines
            after_place = True
            continue
        after_place = False
        if wanted and (found := re.search(r"\b(?:LDG|STG|LDGSTS)\b((?:\.\w+)*)", line)):
            modifiers = found[1].split(".")
            bits = [int(m) for m in modifiers if m in ("64", "128")]
            bits += [16 for m in modifiers if m in ("U16", "S16")]
            widths.add((bits or [32])[0] // 8)
    return widths


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [TOOLS / name, *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
