"""The Triton kernels inside a jitted function, compiled for an H200 that is not there.

Needs the dependency group `aot`. Proves that the program compiles, calls the kernels and stacks
nothing; nothing is run or timed.
"""

import importlib.util
import json
import os
import pathlib
import re
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

# A process of its own, because JAX reads its platforms when it is imported.
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from functools import partial
from tests.pallas_kernels.described_gpu import h200
from pallas_kernels.inter_block import triton_gpu as inter_block
from pallas_kernels.inter_block.triton_tiling import choose_tiling
from pallas_kernels.merge import triton_gpu as merge
from pallas_kernels.merge.triton_tiling import choose_tiling as choose_merge_tiling

sharding = h200()
def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
N, S, T, D = 3, 2, 256, 512
settings = dict(compute_capability=90)
tiling = choose_tiling(N, S, 512, jnp.bfloat16, **settings)
ahead = choose_merge_tiling(T, D, jnp.bfloat16, backward=False, **settings)
back = choose_merge_tiling(T, D, jnp.bfloat16, backward=True, **settings)

# A block of two sub-layers, their outputs given, and its gradients: phase 1 and one merge.
def block(values, folded, gain, update, dhidden, dsummed, dvalues):
    outputs, *statistics = inter_block.forward(values, folded, eps=1e-6, tiling=tiling)
    summed, hidden, gate, kept = merge.forward(
        outputs[1], statistics[0][1], update, update, folded[1], gain,
        eps=1e-6, norm_eps=1e-6, tiling=ahead)
    do, dlse, dsum, dquery, dgain = merge.backward(
        outputs[1], summed, folded[1], gain, kept, dsummed, dhidden, None, tiling=back)
    dvalues, dfolded = inter_block.backward(
        values, folded, *statistics, (dhidden, do), jnp.stack([0 * dlse, dlse]),
        dvalues=dvalues, eps=1e-6, tiling=tiling)
    return hidden, dvalues, dfolded, dsum, dquery, dgain

row = array(T, D)
arguments = ((row,) * N, array(S, D, dtype=jnp.float32), array(D, dtype=jnp.float32),
             row, row, row, (row,) * N)
jitted = jax.jit(block, donate_argnums=(6,))
lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
compiled = lowered.compile()
memory = compiled.memory_analysis()
print("FOUND" + json.dumps({
    "hlo": compiled.as_text(),
    "barriers": lowered.as_text().count("optimization_barrier"),
    "temporary": memory.temp_size_in_bytes,
    "aliased": memory.alias_size_in_bytes,
}))
"""


def test_a_program_for_a_described_h200_calls_the_kernels():
    import triton

    # Triton's ptxas knows the PTX that XLA writes; the system's may be older or missing.
    tools = pathlib.Path(importlib.util.find_spec("nvidia").submodule_search_locations[0]) / "cu13"
    path = os.pathsep.join([str(tools / "bin"), os.environ["PATH"]])
    settings = {"JAX_PLATFORMS": "cpu", "PATH": path}
    assert triton.__version__
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | settings,
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    found = json.loads(line.removeprefix("FOUND"))
    hlo = found["hlo"]
    calls = re.findall(r'custom_call_target="triton_kernel_call_ffi"', hlo)
    # One kernel of phase 1 forward and two backward, one of phase 2 each way, and the sums over
    # partial rows of three gradients of parameters.
    assert len(calls) == 8
    row = 256 * 512 * 2
    # The sources' gradients are added in place.
    assert found["aliased"] >= 3 * row
    # Phase 1's gradients come together: put off, the queries' would keep all sources until then.
    assert found["barriers"] == 1
    # Nothing stacks the sources or the outputs of the reads.
    assert not re.findall(r"bf16\[[2-9],256,512\]", hlo)
    assert found["temporary"] < 6 * row
