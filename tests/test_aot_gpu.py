"""A training step through XLA's GPU compiler and Triton, for an H200 that is not there.

Needs the dependency group `aot`. Proves that the step compiles, what it contains and how much
memory the compiler plans for it; nothing is run or timed.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_triton") is None,
        reason="needs jax-triton and the CUDA compiler: uv run --group aot pytest -m aot",
    ),
]


# Forward and backward of a block whose sub-layers are given arrays, 8 sources and 8 sub-layers.
BLOCK = """
import json, jax
from benchmarks.gpu_programs import Case, inputs_of, program_of
from tests.pallas_kernels.described_gpu import h200

case, sharding, found = Case("block", 8, 8, 2048, "both"), h200(), {}
with jax.set_mesh(sharding.mesh):
    for implementation in ("triton_gpu", "xla"):
        inputs = jax.eval_shape(lambda: inputs_of(case))
        function, arguments = program_of(case, implementation, inputs)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
        found[implementation] = lowered.compile().memory_analysis().temp_size_in_bytes
print(json.dumps(found))
"""


def rows_from(*command):
    """What a Python program of its own prints, which compiles for GPUs."""
    settings = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | settings,
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def step(**settings):
    (row,) = rows_from("-m", "tests.aot.compile_step", json.dumps({"gpu": True} | settings))
    return row


def test_a_training_step_runs_the_kernels_and_stacks_nothing():
    found = step(implementation="triton_gpu")
    # Eight sub-layers in two blocks: phase 1 once a block and once for the final read; phase 2
    # before every sub-layer but the first of a block.
    kernels = found["kernels"]
    assert kernels["merge_forward"] == kernels["merge_backward"] == 6
    assert {name: n for name, n in kernels.items() if name.startswith("inter_block")} == {
        "inter_block_forward": 3,
        "inter_block_backward": 3,
        "inter_block_query_gradients": 3,
    }
    assert not found["stacks"]


def test_a_training_step_needs_less_memory_than_through_xla():
    deep = {"num_layers": 16, "block_size": 8, "remat": "block"}
    kernels, xla = (step(implementation=name, **deep) for name in ("triton_gpu", "xla"))
    assert kernels["kernels"]["merge_backward"]
    assert not xla["kernels"]
    assert kernels["temporary_mib"] < xla["temporary_mib"]


def test_a_block_needs_less_than_half_of_the_memory_that_xla_needs():
    (found,) = rows_from("-c", BLOCK)
    assert found["triton_gpu"] < found["xla"] / 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_hold_rows_in_registers_and_move_them_once_16_bytes_at_a_time(dtype):
    rows = rows_from("-m", "benchmarks.gpu_static", "--json", f"--dtype={dtype}")
    kernels = [row for row in rows if "kernel" in row]
    # Phase 1 has one forward and two backward, phase 2 and the single-phase read one each way; and
    # sums of partial rows.
    assert len({row["kernel"] for row in kernels}) == 8
    # Five float32 rows of 7168, and the sums over them, are more than there are registers for.
    held = [row for row in kernels if dtype != "float32" or row["d"] < 7168]
    assert not [row for row in held if row["spills"]]
    wide = {row["access_bytes"] for row in kernels if row["kernel"] != "sum_rows"}
    assert wide == ({"-"} if dtype == "float32" else {"16"})
    # What a kernel of phase 1 reads again is in the cache; float32 rows are too long for that.
    shares = [row["of_cache"] for row in kernels if row["kernel"].startswith("inter_block")]
    assert dtype == "float32" or max(share for share in shares if share) <= 1

    moved = [row for row in rows if "pass" in row]
    once = [row for row in moved if not row["pass"].startswith("inter_block_backward")]
    assert len({row["pass"] for row in once}) == 5
    assert max(row["over_minimum"] for row in once) <= 1.02
    assert max(row["over_minimum"] for row in moved) < 1.5
