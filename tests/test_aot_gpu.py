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

# Every kernel of the shapes that gpu_static counts, of which an H200 must keep all in registers.
SPILLS = """
import json
from unittest import mock
from benchmarks.gpu_static import PASSES, SHAPES, compiled, record
from pallas_kernels import gpus

launches = {}
with mock.patch.object(gpus, "compute_capability", lambda: 90):
    for shape in SHAPES:
        for name in PASSES:
            _, function, arguments = PASSES[name](shape, 8192)
            for launch in record(function, arguments):
                launches[launch.name, repr(launch.arguments), repr(launch.constants)] = launch
found = [(launch, compiled(launch, 90)["spills"]) for launch in launches.values()]
spilled = [f"{launch.name} at D={launch.constants.get('D')}: {n}" for launch, n in found if n]
print(json.dumps({"kernels": sorted({launch.name for launch, _ in found}), "spilled": spilled}))
"""


def found_by(*command):
    """What a Python program of its own prints, which compiles for an H200."""
    # Triton's ptxas knows the PTX that XLA writes; the system's may be older or missing.
    tools = pathlib.Path(importlib.util.find_spec("nvidia").submodule_search_locations[0]) / "cu13"
    settings = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PATH": os.pathsep.join([str(tools / "bin"), os.environ["PATH"]]),
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
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


def test_a_training_step_runs_the_kernels_and_stacks_nothing():
    steps = [
        found_by("-m", "tests.aot.compile_step", json.dumps({"gpu": True, "implementation": name}))
        for name in ("triton_gpu", "xla")
    ]
    kernels, xla = steps
    found = kernels["kernels"]
    # Eight sub-layers in two blocks: phase 1 once a block and once for the final read, where the
    # outputs of the first block are its one source; phase 2 before every sub-layer but the first of
    # a block.
    assert found["merge_forward"] == found["merge_backward"] == 6
    assert {name: n for name, n in found.items() if name.startswith("inter_block")} == {
        "inter_block_logits": 3,
        "inter_block_outputs": 2,
        "inter_block_scalars": 3,
        "inter_block_gradients": 3,
    }
    # The peak is at the loss, where either way keeps as many rows.
    assert kernels["temporary_mib"] <= 1.01 * xla["temporary_mib"]
    assert not xla["kernels"]
    assert not kernels["stacks"]


def test_a_block_needs_less_than_half_of_the_memory_that_xla_needs():
    found = found_by("-c", BLOCK)
    assert found["triton_gpu"] < found["xla"] / 2


def test_no_kernel_spills_registers():
    found = found_by("-c", SPILLS)
    # Phase 1 has two each way, phase 2 and the single-phase read one, and sums of partial rows.
    assert len(found["kernels"]) == 9
    assert not found["spilled"]
