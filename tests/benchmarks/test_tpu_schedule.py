"""Bytes of a launch, and real schedules of kernels with a known number of turns."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from benchmarks import launches, tpu_schedule
from pallas_kernels.chips import UNKNOWN

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu: uv run --group aot pytest -m aot",
)


def test_windows_are_counted_when_they_move_and_only_inside_their_arrays_in_whole_tiles():
    def copy(x, table, total):
        return pl.pallas_call(
            lambda *refs: None,
            grid=(2, 3),
            in_specs=[
                pl.BlockSpec((16, 200), lambda i, j: (3 * i + j, 0)),  # 92 rows: the last has 12.
                pl.BlockSpec((5, 8), lambda i, j: (0, 0)),
                pl.BlockSpec((None, 3, 300), lambda i, j: (i, 0, 0)),
            ],
            out_specs=[pl.BlockSpec((None, 3, 300), lambda i, j: (i, 0, 0))],
            out_shape=[jax.ShapeDtypeStruct((2, 3, 300), jnp.float32)],
            input_output_aliases={2: 0},
        )(x, table, total)

    arguments = tuple(
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [
            ((92, 200), jnp.bfloat16),
            ((5, 8), jnp.float32),
            ((2, 3, 300), jnp.float32),
        ]
    )
    moved = launches.moved_bytes(launches.Program(copy, arguments, rows=2))
    # Columns fill registers of 128; rows fill tiles of 8, or of 4 where there are 3.
    assert moved == (2 * 96 * 256 + 4 * 8 * 128 + 2 * (4 * 2 * 4 * 384), 6)


@pytest.mark.parametrize(
    "rows, itemsize, sublanes",
    [(1, 4, 1), (2, 4, 2), (3, 4, 4), (5, 4, 8), (36, 4, 8), (1, 2, 2), (3, 2, 4), (12, 2, 8)],
)
def test_tiles_of_memory_are_those_of_the_compiler(rows, itemsize, sublanes):
    """As compiled programs name them: `f32[3,300]{1,0:T(4,128)}`, `bf16[1,300]{1,0:T(2,128)}`."""
    assert launches.tile((rows, 300), itemsize) == (sublanes, 128)


@pytest.mark.parametrize("d, columns", [(4096, 4096), (1168, 1280)])
@pytest.mark.parametrize(
    "name, rows", list(zip(launches.KERNELS, [5, 5, 11, 8, 5, 6, 6, 10, 8], strict=True))
)
def test_kernels_move_the_least_rows_and_their_statistics(name, rows, d, columns):
    n, s, t = 3, 2, 1024
    program = launches.KERNELS[name](launches.Shape(n, s, d, t), UNKNOWN)
    assert program.rows == rows
    moved, _ = launches.moved_bytes(program)
    least = rows * t * columns * 2
    # Queries, gains and their gradients are read and written once, in float32 or in parts of it.
    # Statistics of 3 sources lie in 4 rows.
    statistics = 4 * t * (2 * s * 4 + 2 * 4 + 3 * s + 8)
    assert least < moved <= least + statistics + 16 * 4 * 6 * columns


@pytest.mark.parametrize("chip", tpu_schedule.CHIPS.values())
def test_clocks_give_the_published_peaks(chip):
    units_of_a_chip = {
        "v5e": (4, 128, 1),
        "v5p": (8, 128, 1),
        "v6e": (2, 256, 2),
        "tpu7x": (4, 256, 2),
    }
    peaks = {"v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "tpu7x": 2307e12}
    name = chip.topology.split(":")[0]
    units, width, rows = units_of_a_chip[name]
    assert units * width**2 * rows * 2 * chip.clock == pytest.approx(peaks[name], rel=2e-3)


def test_without_the_compiler_one_line_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tpu_schedule.main(tpu_schedule.Settings()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "uv run --group aot python -m benchmarks.tpu_schedule" in captured.err


# A process of its own, because libtpu reads its settings when it is loaded.
LOOPS = """
import pathlib, sys
from benchmarks import bundles, tpu_schedule
tpu_schedule.start_process(sys.argv[1])
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

def compiled_step(turns, set_up):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            for _ in range(set_up):
                o_ref[...] = jnp.sqrt(x_ref[...] + o_ref[...])
        def turn(i, carry):
            o_ref[pl.ds(8 * i, 8), :] += jnp.exp(x_ref[pl.ds(8 * i, 8), :])
            return carry
        jax.lax.fori_loop(0, turns, turn, 0)

    replicated = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=replicated)
    call = pl.pallas_call(
        kernel, grid=(8,), in_specs=[pl.BlockSpec((128, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((128, 128), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((128, 128), jnp.float32), name=f"loops_{turns}_{set_up}",
    )
    jax.jit(call).lower(x).compile()
    dump = tpu_schedule._dump_folder(sys.argv[1])
    return bundles.read(dump, f"loops_{turns}_{set_up}", cores=1).step.bundles

topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2")
mesh = Mesh(np.array(topology.devices[:1]), ("device",))
print([compiled_step(*case) for case in [(4, 1), (8, 1), (16, 1), (8, 40)]])
"""


@pytest.mark.aot
@needs_libtpu
def test_turns_of_a_compiled_loop_are_counted(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LOOPS, str(tmp_path)],
        env=os.environ | tpu_schedule.ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    messages = (tmp_path / "messages").read_text()
    assert done.returncode == 0, messages[-3000:]
    four, eight, sixteen, long_set_up = json.loads(done.stdout)
    assert sixteen - eight == 2 * (eight - four) > 0
    assert (eight - four) % 4 == 0
    # What sets up the first step alone is no part of the others.
    assert abs(long_set_up - eight) <= 2


@pytest.mark.aot
@needs_libtpu
def test_a_kernel_is_compiled_and_read_in_a_process_of_its_own():
    case = tpu_schedule.Case("v6e", "436m", "merge forward", is_kernel=True)
    missing = tpu_schedule.Case("v6e", "436m", "no such kernel", is_kernel=True)
    row, error = tpu_schedule.measure_all([case, missing], jobs=1)
    assert isinstance(error, KeyError)
    assert isinstance(row, dict)
    assert 0 < row["bundles"] and 0 < row["busy"] < 1
    assert row["columns"] == 1280  # 1168 numbers, in registers of 128
    assert row["hbm_cycles"] == pytest.approx(
        5 * row["tokens"] * 1280 * 2 * 1.75e9 / 1640e9, rel=0.02
    )
    assert 1 <= row["bytes_over_minimum"] <= 1.02
    assert 0 < row["vmem_mib"] < 128
