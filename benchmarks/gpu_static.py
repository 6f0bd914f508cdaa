"""What the Triton kernels compile to, for GPUs that are not there: a static count, not a timing.

`uv run --group aot python -m benchmarks.gpu_static` compiles every launch of both phases down to
machine code for compute capabilities 8.0, 9.0 and 10.0, and counts registers, spills and bytes.
"""

import dataclasses
import functools
import math
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import triton
import tyro
from rich.console import Console
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.rows import print_rows
from pallas_kernels import triton_launch, triton_tiles
from pallas_kernels.inter_block import triton_gpu as inter_block
from pallas_kernels.inter_block import triton_kernels as inter_block_kernels
from pallas_kernels.inter_block import triton_tiling as inter_block_tiling
from pallas_kernels.merge import triton_gpu as merge
from pallas_kernels.merge import triton_tiling as merge_tiling
from pallas_kernels.single_phase import triton_gpu as single_phase

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


SHAPES = (Shape(9, 12, 2048), Shape(10, 6, 2304), Shape(9, 8, 7168), Shape(9, 4, 1168))


@dataclasses.dataclass(frozen=True)
class Settings:
    """Which kernels are compiled.

    Attributes:
        num_tokens: Tokens of a launch.
        capabilities: Compute capabilities, 90 for 9.0.
        json: One JSON object a line instead of a table.
    """

    num_tokens: int = 8192
    capabilities: tuple[int, ...] = (80, 90, 100)
    json: bool = False


def main(settings: Settings) -> None:
    """Compiles and prints a row for each launch, then one for each pass with the bytes it moves."""
    cases = [
        (capability, shape, name)
        for capability in settings.capabilities
        for shape in SHAPES
        for name in PASSES
    ]
    kernels, passes = [], []
    console = Console(stderr=True)
    for capability, shape, name in track(cases, "compiling", console=console, transient=True):
        found = pass_rows(name, shape, settings.num_tokens, capability)
        kernels += found[:-1]
        passes.append(found[-1])
    if not settings.json:
        print(STATIC)
    print_rows("Kernels", kernels, as_json=settings.json)
    print_rows("Bytes of device memory", passes, as_json=settings.json)


# --- Passes and the least they can move ----------------------------------------------------------


def pass_rows(name: str, shape: Shape, num_tokens: int, capability: int) -> list[dict]:
    """Compiles a pass; returns a row for each of its launches and one for all of them."""
    minimum_rows, function, arguments = PASSES[name](shape, num_tokens, capability)
    launches = record(function, arguments)
    where = {"compute_capability": capability / 10, "n": shape.n, "s": shape.s, "d": shape.d}
    rows = [where | compiled(launch, capability) for launch in launches]
    moved = sum(launch.bytes_moved for launch in launches)
    minimum = minimum_rows * num_tokens * shape.d * 2
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


def _array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


_f32 = functools.partial(_array, dtype=jnp.float32)


def _inter_block(shape, num_tokens, capability):
    tiling = inter_block_tiling.choose_tiling(
        shape.n, shape.d, jnp.bfloat16, compute_capability=capability
    )
    return tiling, (_array(num_tokens, shape.d),) * shape.n, _f32(shape.s, shape.d)


def _inter_block_forward(shape, num_tokens, capability):
    tiling, values, folded = _inter_block(shape, num_tokens, capability)
    function = functools.partial(inter_block.forward, eps=1e-6, tiling=tiling)
    return shape.n + shape.s, function, (values, folded)


def _inter_block_backward(shape, num_tokens, capability, accumulate=False):
    tiling, values, folded = _inter_block(shape, num_tokens, capability)
    arguments = (
        values,
        folded,
        _f32(shape.s, num_tokens),
        _f32(shape.s, shape.n, num_tokens),
        _f32(shape.n, num_tokens),
        (_array(num_tokens, shape.d),) * shape.s,
        _f32(shape.s, num_tokens),
    )

    def function(*arguments, dvalues=None):
        return inter_block.backward(*arguments, dvalues=dvalues, eps=1e-6, tiling=tiling)

    if accumulate:
        return (
            3 * shape.n + shape.s,
            lambda dvalues, *rest: function(*rest, dvalues=dvalues),
            (values, *arguments),
        )
    return 2 * shape.n + shape.s, function, arguments


def _merge_forward(shape, num_tokens, capability):
    tiling = merge_tiling.choose_tiling(
        num_tokens, shape.d, jnp.bfloat16, compute_capability=capability, backward=False
    )
    row, vector = _array(num_tokens, shape.d), _f32(shape.d)
    function = functools.partial(merge.forward, eps=1e-6, norm_eps=1e-6, tiling=tiling)
    return 5, function, (row, _f32(num_tokens), row, row, vector, vector)


def _merge_backward(shape, num_tokens, capability):
    tiling = merge_tiling.choose_tiling(
        num_tokens, shape.d, jnp.bfloat16, compute_capability=capability, backward=True
    )
    row, vector = _array(num_tokens, shape.d), _f32(shape.d)
    function = functools.partial(merge.backward, tiling=tiling)
    arguments = (row, row, vector, vector, _f32(4, num_tokens), row, row, _f32(num_tokens))
    return 6, function, arguments


def _single_phase_forward(shape, num_tokens, capability):
    tiling = merge_tiling.choose_tiling(
        num_tokens, shape.d, jnp.bfloat16, compute_capability=capability, backward=False
    )
    row, vector, n = _array(num_tokens, shape.d), _f32(shape.d), single_phase.MAX_SOURCES
    function = functools.partial(single_phase.forward, eps=1e-6, norm_eps=1e-6, tiling=tiling)
    return n + 4, function, ((row,) * n, row, row, vector, vector)


def _single_phase_backward(shape, num_tokens, capability):
    tiling = merge_tiling.choose_tiling(
        num_tokens, shape.d, jnp.bfloat16, compute_capability=capability, backward=True
    )
    row, vector, n = _array(num_tokens, shape.d), _f32(shape.d), single_phase.MAX_SOURCES
    statistics = _f32(2 * n + 3, num_tokens)

    def function(values, dvalues, *arguments):
        return single_phase.backward(values, *arguments, dvalues=dvalues, tiling=tiling)

    arguments = ((row,) * n, (row,) * n, row, vector, vector, statistics, row, row)
    return 3 * n + 4, function, arguments


PASSES = {
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

    modules = (triton_launch, inter_block, merge, single_phase)
    original = triton_launch.launch
    for module in modules:
        module.launch = launch
    try:
        jax.eval_shape(function, *arguments)
    finally:
        for module in modules:
            module.launch = original
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
    widths = tile_widths(listing)
    return {
        "kernel": launch.name,
        "programs": math.prod(launch.grid),
        "warps": launch.num_warps,
        "registers": registers,
        "spills": spills,
        "shared_bytes": shared,
        "occupancy": resident * threads / limits.threads,
        "access_bytes": "/".join(map(str, sorted(widths))) or "-",
    }


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


def tile_widths(listing: str) -> set[int]:
    """Bytes of each access to rows of the width, told by the source line that it comes from.

    Those are in `load_tile` and `store_tile`, and the sources in the kernel of the queries'
    gradient; every other access is to statistics, parameters or shared memory.
    """
    tiles = pathlib.Path(triton_tiles.__file__)
    first = _line(tiles, "def load_tile")
    last = _line(tiles, "def vector_columns")
    gradient = pathlib.Path(inter_block_kernels.__file__)
    of_sources = _line(gradient, "        v = tl.load(")
    widths, is_tile = set(), False
    for line in listing.splitlines():
        if found := re.search(r'//## File "([^"]*)", line (\d+)(.*)', line):
            file, number = pathlib.Path(found[1]), int(found[2])
            if "inlined" not in found[3] or not is_tile:
                is_tile = False
            is_tile = is_tile or (file.name == tiles.name and first <= number < last)
            is_tile = is_tile or (file.name == gradient.name and number == of_sources)
        elif found := re.search(r"\b(?:LDG|STG|LDGSTS)\b((?:\.\w+)*)", line):
            if is_tile:
                modifiers = found[1].split(".")
                bits = [int(m) for m in modifiers if m in ("64", "128")]
                bits += [16 for m in modifiers if m in ("U16", "S16")]
                widths.add((bits or [32])[0] // 8)
    return widths


def _line(path: pathlib.Path, start: str) -> int:
    lines = path.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.startswith(start))


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [TOOLS / name, *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
