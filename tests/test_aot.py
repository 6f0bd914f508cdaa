"""The training gradient through the real TPU compiler, for chips that are not there.

Needs the dependency group `aot`. Proves that the program compiles and what it contains; nothing is
run or timed.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: uv run --group aot pytest -m aot",
    ),
]

# A process of its own, because libtpu reads its settings when JAX is imported.
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from attnres_jax import ModelConfig, TransformerLM

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
devices = np.array(topology.devices)[: int(sys.argv[1])]
mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
config = ModelConfig(
    vocab_size=512, width=256, num_layers=3, num_heads=2, feed_forward_width=512,
    block_size=2, compute_dtype="bfloat16", attention="splash",
)
graphdef, params = nnx.split(
    nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0))), nnx.Param
)

def on_mesh(leaf, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

def loss(params, tokens_bt):
    return jnp.mean(jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens_bt))[..., 0])

tokens_bt = on_mesh(jax.ShapeDtypeStruct((4, 128), jnp.int32), "data")
with jax.set_mesh(mesh):
    compiled = jax.jit(jax.grad(loss)).lower(jax.tree.map(on_mesh, params), tokens_bt).compile()
print("HLO" + json.dumps(compiled.as_text()))
"""


@pytest.mark.parametrize("num_devices", [1, 4])
def test_training_gradient_compiles_for_tpus_with_splash_attention(num_devices):
    settings = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(num_devices)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("HLO")]
    hlo = json.loads(line.removeprefix("HLO"))
    # Forward, and backward with respect to queries and to keys and values, of three layers.
    assert hlo.count('custom_call_target="tpu_custom_call"') >= 9
    # The TPU compiler writes a stack without a concatenate, so what counts is that none exists.
    stacked = rf"\[[2-9],{4 // num_devices},128,256\]"
    assert not re.findall(stacked, hlo)
