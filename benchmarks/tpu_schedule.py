"""What the TPU compiler makes of each kernel: cycles to compute, beside cycles to move the bytes.

    uv run --group aot python -m benchmarks.tpu_schedule [--json]

Compiles every TPU kernel for TPU generations that need not be there, and reads the schedule of one
grid step. Where its bundles are fewer than the cycles in which memory moves the step's bytes, the
kernel is bound by memory, which is as fast as this operation can be. Nothing is run.

    columns             that a row of d takes in memory, whose tiles are 128 wide: 1280 of D=1168
    tokens              rows of each array in a grid step
    cores               cores that share the memory; a kernel may leave one of two unused
    bundles, stalls     of one grid step, loops multiplied out: with instructions, and empty ones
                        that the compiler has put where a core waits for a result
    hbm_cycles          in which a core's share of the bandwidth moves what a step reads and writes
    bundles_over_hbm    their ratio
    with_stalls         the same ratio, stalls included
    busiest, busy       instructions that take most of their slots, and how many, stalls included
    bytes_over_minimum  bytes moved, statistics included, over the rows that must move, as they lie
                        in memory
    vmem_mib            windows, scratch and spilled registers

A second table holds what XLA's cost model says of phase 1 in its plain form, a stack of the sources
and products over it, without any kernel. The minimum there is that of rows of d columns, without
what fills tiles: XLA may transpose arrays so that nothing does.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import multiprocessing
import os
import pathlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track

from benchmarks import bundles
from benchmarks.launches import DTYPE, KERNELS, PLAIN, Shape, moved_bytes, tile
from benchmarks.rows import print_rows
from pallas_kernels import chips

NOTICE = (
    "Static schedules by the TPU compiler (libtpu {version}), and no timings: they hold the latency"
    " of every instruction, not how memory or clock behave under load."
)
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Lets libtpu compile where there is no TPU."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU generation.

    Attributes:
        topology: A slice of it, as the compiler knows it.
        bandwidth: Bytes a second of a chip's memory.
        clock: Cycles a second.
        devices: Devices that JAX sees in a chip, and that share its memory.
    """

    topology: str
    bandwidth: float
    clock: float
    devices: int = 1


# Bandwidths and peaks are those of Google Cloud's page of each generation. Clocks follow from the
# peak of bfloat16, two operations for each cell of a matrix unit and each row that it takes:
# v5e 197e12 = 4 units * 128**2 * 2 * 1.5e9; v5p 459e12 = 2 cores * 4 units * 128**2 * 2 * 1.75e9;
# v6e 918e12 = 2 units * 256**2 * 2 rows * 2 * 1.75e9;
# v7x 2307e12 = 2 cores * 2 units * 256**2 * 2 rows * 2 * 2.2e9.
CHIPS = {
    "v5e": Chip("v5e:2x2", 819e9, 1.5e9),
    "v5p": Chip("v5p:2x2x1", 2765e9, 1.75e9),
    "v6e": Chip("v6e:2x2", 1640e9, 1.75e9),
    "v7x": Chip("tpu7x:2x2x1", 7380e9, 2.2e9, devices=2),
}
SHAPES = {
    "base": Shape(9, 12, 2048),
    "48b": Shape(10, 6, 2304),
    "k3": Shape(9, 8, 7168),
    "436m": Shape(9, 4, 1168),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compiled: bfloat16, 8192 tokens."""

    chips: tuple[Literal["v5e", "v5p", "v6e", "v7x"], ...] = ("v5e", "v5p", "v6e", "v7x")
    """TPU generations."""
    shapes: tuple[Literal["base", "48b", "k3", "436m"], ...] = ("base", "48b", "k3", "436m")
    """Sources, reads and width. base: N=9 S=12 D=2048; 48b (of the paper): N=10 S=6 D=2304;
    k3 (Kimi K3, 8 of a block's 24 reads): N=9 D=7168; 436m (of the paper): N=9 S=4 D=1168."""
    jobs: int = 1
    """Processes that compile."""
    json: bool = False
    """Print one JSON line a row instead of tables."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: a kernel, or a plain program."""

    chip: str
    shape: str
    name: str
    is_kernel: bool

    def __str__(self) -> str:
        return f"{self.chip} {SHAPES[self.shape]} {self.name}"


def start_process(folder: str) -> None:
    """Prepares a process that compiles: where the compiler dumps, and where its messages go."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one.
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={_dump_folder(folder)} --xla_jf_dump_llo_text=true"
        f" --xla_jf_dump_llo_pass_label_regex={bundles.PASSES}"
    )
    messages = os.open(pathlib.Path(folder, "messages"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(messages, 2)


def _dump_folder(folder: str) -> pathlib.Path:
    return pathlib.Path(folder, str(os.getpid()))


def measure(case: Case, folder: str) -> dict:
    """Compiles one program, in a process that `start_process` has prepared, and returns its row."""
    chip, shape = CHIPS[case.chip], SHAPES[case.shape]
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
    mesh = Mesh(np.array(topology.devices[:1]), ("device",))
    with jax.set_mesh(mesh):
        core = chips.current()
        assert core is not None, "the mesh in context is one of TPUs"
        program = KERNELS[case.name](shape, core) if case.is_kernel else PLAIN[case.name][0](shape)
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())
            ),
            program.arguments,
        )
        dump = _dump_folder(folder)
        shutil.rmtree(dump, ignore_errors=True)
        compiled = jax.jit(program.function).lower(*arguments).compile()
    itemsize = jnp.dtype(DTYPE).itemsize
    minimum = program.rows * shape.t * shape.d * itemsize
    row: dict = {"chip": case.chip, "shape": str(shape)}
    if program.kernel is None:
        moved = sum(moved_bytes(KERNELS[name](shape, core))[0] for name in PLAIN[case.name][1])
        cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
        assert isinstance(cost, dict) and memory is not None, "libtpu knows what it compiles"
        return row | {
            "program": case.name,
            "xla_bytes_over_minimum": cost["bytes accessed"] / minimum,
            "kernel_bytes_over_minimum": moved / minimum,
            "times_fewer_bytes": cost["bytes accessed"] / moved,
            "xla_temporary_mib": memory.temp_size_in_bytes / 2**20,
        }
    schedule = bundles.read(dump, program.kernel, cores=core.cores)
    moved, steps = moved_bytes(program)
    _, width = tile((shape.t, shape.d), itemsize)
    columns = math.ceil(shape.d / width) * width
    cores = schedule.cores * chip.devices
    memory_cycles = moved / steps * chip.clock / (chip.bandwidth / cores)
    step = schedule.step
    busiest, share = step.busiest
    return row | {
        "kernel": case.name,
        "columns": columns,
        "tokens": program.tokens,
        "cores": cores,
        "bundles": step.bundles,
        "stalls": step.stalls,
        "hbm_cycles": round(memory_cycles),
        "bundles_over_hbm": step.bundles / memory_cycles,
        "with_stalls": (step.bundles + step.stalls) / memory_cycles,
        "busiest": busiest,
        "busy": share,
        "bytes_over_minimum": moved / (program.rows * shape.t * columns * itemsize),
        "vmem_mib": schedule.vmem_bytes / 2**20,
    }


def measure_all(cases: list[Case], jobs: int) -> Iterator[dict | Exception]:
    """Yields the row of each case, or why there is none, in order."""
    os.environ |= ENVIRONMENT  # Those that start now import JAX with it.
    with tempfile.TemporaryDirectory() as folder:
        pool = ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), start_process, (folder,)
        )
        try:
            results = [pool.submit(measure, case, folder) for case in cases]
            for result in results:
                error = result.exception()
                if isinstance(error, BrokenProcessPool):
                    last = pathlib.Path(folder, "messages").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the compiler has crashed; its last words:\n{last}")
                yield error if isinstance(error, Exception) else result.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
                process.join()


def main(settings: Settings) -> int:
    """Prints a row for each kernel and each plain program."""
    if importlib.util.find_spec("libtpu") is None:
        print(
            "The TPU compiler is not installed. To have it for this command:"
            " uv run --group aot python -m benchmarks.tpu_schedule",
            file=sys.stderr,
        )
        return 2
    notice = NOTICE.format(version=importlib.metadata.version("libtpu"))
    print(notice, file=sys.stderr if settings.json else sys.stdout, flush=True)
    cases = [
        Case(chip, shape, name, names is KERNELS)
        for chip in settings.chips
        for shape in settings.shapes
        for names in (KERNELS, PLAIN)
        for name in names
    ]
    results = track(
        measure_all(cases, settings.jobs),
        "compiling",
        total=len(cases),
        console=Console(stderr=True),
        transient=True,
    )
    tables: dict[bool, list[dict]] = {True: [], False: []}
    failed = False
    for case, result in zip(cases, results, strict=True):
        if isinstance(result, Exception):
            failed = True
            print(f"{case}: {result}", file=sys.stderr)
        elif settings.json:
            print_rows("", [result | {"source": notice}], as_json=True)
        else:
            tables[case.is_kernel].append(result)
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "240")  # Else rich folds what is piped to 80 columns.
    titles = {
        True: "One grid step of each kernel: bundles, next to the cycles in which its bytes move",
        False: "Bytes that XLA accesses for phase 1 in plain form, next to what the kernels move",
    }
    for is_kernel, rows in tables.items():
        if rows:
            print_rows(titles[is_kernel], rows, as_json=False)
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Settings, description=__doc__)))
    except KeyboardInterrupt:
        sys.exit(130)
