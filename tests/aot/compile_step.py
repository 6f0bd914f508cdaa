"""Compiles a training step of a small block model for described TPUs or a described H200.

    python -m tests.aot.compile_step '{"mesh": {"data": 8}, "implementation": null}'
    python -m tests.aot.compile_step '{"gpu": true, "implementation": "triton_gpu"}'

Prints one JSON line about the compiled program. Run by `tests/test_aot.py`, in a process of its own
because libtpu reads its settings when it is loaded.
"""

import collections
import json
import math
import re
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attnres_jax import ModelConfig, TransformerLM
from tests.aot.compile_kernels import kernels_in
from tests.pallas_kernels.described_gpu import h200_devices
from train.step import initial_state, make_train_step

B, T, D = 2, 384, 200
"""Sequences along each position of "data", tokens in them, and width; D occurs as nothing else, and
no parameter has a multiple of B * T * D elements: the shape of an array says what it holds. Not a
multiple of 128, D is a width that the TPU compiler likes to lay along something else than lanes."""
LAYERS, BLOCK_SIZE = 4, 4
GPU_BATCH = 32
"""Many tokens, so that activations are most of what a step keeps."""


def tpu_mesh(shape: dict[str, int]) -> Mesh:
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x2")
    devices = np.array(topology.devices[: math.prod(shape.values())])
    return Mesh(
        devices.reshape(*shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )


def gpu_mesh() -> Mesh:
    return Mesh(np.array(h200_devices()), ("data",), axis_types=(AxisType.Auto,))


def compile_step(
    mesh: Mesh,
    implementation: str | None,
    remat: str,
    attention: str,
    batch_size: int = B,
    num_layers: int = LAYERS,
    block_size: int = BLOCK_SIZE,
) -> jax.stages.Compiled:
    """AdamW on the loss of a model; blocks of the default size are too short to scan anything."""
    config = ModelConfig(
        vocab_size=512,
        width=D,
        num_layers=num_layers,
        num_heads=2,
        feed_forward_width=640,
        block_size=block_size,
        compute_dtype="bfloat16",
        attention=attention,
        implementation=implementation,
        remat=remat,
    )
    model = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    optimizer, schedule = optax.adamw(1e-3), optax.constant_schedule(1e-3)
    state = jax.eval_shape(lambda params: initial_state(params, optimizer), params)
    batch = {"tokens": jax.ShapeDtypeStruct((batch_size * mesh.shape["data"], T + 1), jnp.int32)}

    def on_mesh(tree, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    with jax.set_mesh(mesh):
        step = make_train_step(graphdef, optimizer, schedule, mesh)
        traced = step.trace(on_mesh(state), on_mesh(batch, "data"))
        platform = "tpu" if mesh.devices.flat[0].platform == "tpu" else "cuda"
        return traced.lower(lowering_platforms=(platform,)).compile()


def activations(shape: list[int], tokens: int) -> int:
    """How many `[b, t, d]` of one device an array holds; 0 if it holds anything else."""
    whole, rest = divmod(math.prod(shape), tokens * D)
    return whole if D in shape and not rest else 0


def stacks_in(hlo: str, tokens: int) -> list[str]:
    """Shapes of arrays that hold more than one activation, and concatenates that make one."""
    shapes = set(re.findall(r"\b(?:bf16|f16|f32)\[([\d,]+)\]", hlo))
    stacked = [x for x in shapes if activations(list(map(int, x.split(","))), tokens) > 1]
    joined = [
        line.strip()[:200]
        for line in hlo.splitlines()
        for x in re.findall(r" = \w+\[([\d,]+)\]\S* concatenate\(", line)
        if activations(list(map(int, x.split(","))), tokens)
    ]
    return stacked + joined


def copies_in(hlo: str, tokens: int) -> list[str]:
    """Activations that are copied, as when what computes and what reads lay them out unlike."""
    shapes = re.findall(r" = \w+\[([\d,]+)\]\S* copy\(", hlo)
    return [x for x in shapes if activations(list(map(int, x.split(","))), tokens)]


def gathers_in(hlo: str) -> list[str]:
    """What devices collect from each other, besides sums: shapes of arrays as wide as the model."""
    found = re.findall(r" = (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", hlo)
    shapes = [x for types in found for x in re.findall(r"\[([\d,]+)\]", types)]
    return [x for x in shapes if str(D) in x.split(",")]


# Characters of HLO's strings, as in C; other bytes are two hexadecimal digits.
ESCAPED = {"n": "0A", "t": "09", "r": "0D", '"': "22", "'": "27", "\\": "5C"}


def triton_kernels_in(hlo: str) -> dict[str, int]:
    """How often a compiled program launches each Triton kernel of ours."""
    found = collections.Counter()
    for text in re.findall(r'triton_kernel_call_ffi".*?opaque = "((?:[^"\\]|\\.)*)"', hlo):
        call = re.sub(r"\\([0-9A-F]{2}|.)", lambda m: chr(int(ESCAPED.get(m[1], m[1]), 16)), text)
        name = re.search(
            rb"(?:inter_block|merge|single_phase)_[a-z_]+|sum_rows",
            zlib.decompress(call.encode("latin1")),
        )
        found[name[0].decode() if name else "?"] += 1
    return dict(found)


def stacking_read() -> jax.stages.Compiled:
    """The gradient of reads of a stack of sources, as the paper's pseudo-code has it."""

    def loss(sources, query_sd):
        values = jnp.stack(sources).astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.square(values).mean(-1, keepdims=True) + 1e-6)
        logits = jnp.einsum("sd,nbtd->snbt", query_sd, values * scale)
        weights = jax.nn.softmax(logits, axis=1).astype(jnp.bfloat16)
        outputs = jnp.einsum("snbt,nbtd->sbtd", weights, jnp.stack(sources))
        return jnp.square(outputs.astype(jnp.float32)).sum()

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x2")
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    source = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16, sharding=sharding)
    query = jax.ShapeDtypeStruct((4, D), jnp.float32, sharding=sharding)
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower((source,) * 3, query).compile()


def main(settings: dict) -> None:
    if settings == {"stacking_read": True}:
        compiled, tokens = stacking_read(), B * T
    else:
        gpu = settings.get("gpu", False)
        mesh = gpu_mesh() if gpu else tpu_mesh(settings["mesh"])
        batch_size = settings.get("batch_size", GPU_BATCH if gpu else B)
        compiled = compile_step(
            mesh,
            settings["implementation"],
            settings.get("remat", "none"),
            settings.get("attention", "xla" if gpu else "splash"),
            batch_size,
            settings.get("num_layers", LAYERS),
            settings.get("block_size", BLOCK_SIZE),
        )
        tokens = batch_size * T // mesh.shape.get("sequence", 1)
    hlo = compiled.as_text()
    print(
        json.dumps(
            {
                "kernels": triton_kernels_in(hlo) if settings.get("gpu") else kernels_in(hlo),
                "stacks": stacks_in(hlo, tokens),
                "copies": copies_in(hlo, tokens),
                "gathered": gathers_in(hlo),
                "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
