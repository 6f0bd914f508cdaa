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


def step(implementation):
    # Triton's ptxas knows the PTX that XLA writes; the system's may be older or missing.
    tools = pathlib.Path(importlib.util.find_spec("nvidia").submodule_search_locations[0]) / "cu13"
    settings = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PATH": os.pathsep.join([str(tools / "bin"), os.environ["PATH"]]),
    }
    chosen = json.dumps({"gpu": True, "implementation": implementation})
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot.compile_step", chosen],
        env=os.environ | settings,
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


def test_a_training_step_runs_the_kernels_stacks_nothing_and_needs_less_memory_than_xla():
    rows = {name: step(name) for name in ("triton_gpu", "xla")}
    kernels, xla = rows.values()
    found = kernels["kernels"]
    # Eight sub-layers in two blocks: phase 1 once a block and once for the final read, phase 2
    # before every sub-layer but the first of each block.
    assert found["merge_forward"] == found["merge_backward"] == 6
    of_phase_1 = {name: count for name, count in found.items() if name.startswith("inter_block")}
    assert len(of_phase_1) >= 2 and set(of_phase_1.values()) == {3}
    assert not xla["kernels"]
    assert not kernels["stacks"]
    print(
        f"temporary MiB: triton_gpu {kernels['temporary_mib']:.0f}, xla {xla['temporary_mib']:.0f}"
    )
    assert kernels["temporary_mib"] < xla["temporary_mib"]
