"""`TransformerLM` on meshes of emulated devices: loss, every gradient, and what is exchanged."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import ModelConfig
from attnres_jax.parallel import (
    AXES,
    MeshConfig,
    PipelineConfig,
    abstract_params,
    collectives_of_hlo,
    collectives_of_jaxpr,
    make_loss,
    make_mesh,
    make_plan,
    parameter_shardings,
    to_layer_order,
    to_pipeline,
    total_bytes,
)
from tests.models import programs, reference
from tests.pallas_kernels.programs import count_launches

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=14,
    width=8,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_width=2,
    feed_forward_width=12,
    rope_theta=50.0,
    block_size=4,
)
T = 4


def mesh_of(**sizes):
    config = MeshConfig(**{"data": 1} | sizes)
    devices = int(np.prod([getattr(config, axis) for axis in AXES]))
    return make_mesh(config, jax.devices()[:devices])


def batch_of(plan, sequences_each=1, seed=0):
    shape = plan.mesh.shape
    size = plan.microbatches * shape["data"] * shape["fsdp"] * sequences_each
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (size, T + 1), dtype=np.int32)
    weights = rng.integers(0, 2, (size, T)).astype(np.float32) * 1.5
    return tokens, weights


@functools.cache
def unsharded(config):
    """`(params, tokens, weights) -> (mean loss, gradients)` of the plain model, compiled."""

    def loss(params, tokens, weights):
        log_p = jax.nn.log_softmax(programs.apply(config, params, tokens[:, :-1]))
        nats = -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(nats * weights) / jnp.sum(weights)

    return jax.jit(jax.value_and_grad(loss))


def step_of(plan):
    loss = make_loss(plan)

    def mean(params, tokens, weights):
        nats, weight = loss(params, tokens, weights)
        return nats / weight

    return jax.value_and_grad(mean)


def check(config, mesh_sizes, virtual_stages, microbatches, executor):
    settings = PipelineConfig(
        virtual_stages=virtual_stages, microbatches=microbatches, executor=executor
    )
    plan = make_plan(config, mesh_of(**mesh_sizes), settings)
    params = reference.random_params(config)
    tokens, weights = batch_of(plan)
    expected_loss, expected = unsharded(config)(params, tokens, weights)
    shardings = parameter_shardings(abstract_params(plan), plan.mesh)
    staged = jax.device_put(to_pipeline(params, plan.partition), shardings)
    compiled = jax.jit(step_of(plan)).lower(staged, tokens, weights).compile()
    loss, gradients = compiled(staged, tokens, weights)
    for leaf, sharding in zip(*map(jax.tree.leaves, (gradients, shardings)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    gradients = to_layer_order(gradients, plan.partition)
    for (name, one), (_, other) in zip(
        *(reference.leaves(tree) for tree in (expected, gradients)), strict=True
    ):
        error = np.max(np.abs(one - other)) / np.max(np.abs(one))
        assert error < 1e-5, f"{name}: {error}"
    return plan, compiled


FULL = dataclasses.replace(CONFIG, residual="full", num_layers=2, tie_embeddings=False)
SPANNING = dataclasses.replace(CONFIG, num_layers=3, block_size=4)
SHORT = dataclasses.replace(CONFIG, num_layers=3, block_size=3, tie_embeddings=False)
RETROFIT = dataclasses.replace(SHORT, num_layers=2, retrofit=True, reads_per_group=1)
STANDARD = dataclasses.replace(CONFIG, residual="standard", num_layers=5, remat="full")

# Model, mesh, virtual stages, microbatches, executor.
CASES = {
    "P=2, Full, sequence, tensor": (
        FULL,
        {"stage": 2, "sequence": 2, "tensor": 2},
        1,
        2,
        "one_f_one_b",
    ),
    "P=2, V=3, a block of two chunks, data, fsdp, M of no multiple": (
        SPANNING,
        {"stage": 2, "data": 2, "fsdp": 2},
        3,
        3,
        "one_f_one_b",
    ),
    "P=2, V=2, uneven chunks, fsdp, tensor": (
        SHORT,
        {"stage": 2, "fsdp": 2, "tensor": 2},
        2,
        4,
        "two_scan",
    ),
    "retrofitted, differentiated by JAX": (RETROFIT, {"stage": 2}, 1, 2, "autodiff"),
    "P=2, V=2, standard": (STANDARD, {"stage": 2, "data": 2}, 2, 4, "one_f_one_b"),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient_equal_those_of_one_device(name):
    check(*CASES[name])


def collectives_of(plan):
    tokens, weights = batch_of(plan)
    # JAX's own attention promotes bfloat16.
    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(step_of(plan))(abstract_params(plan), tokens, weights)
    return collectives_of_jaxpr(jaxpr)


def plan_of(virtual_stages, microbatches, exchange, executor="two_scan", **changes):
    config = dataclasses.replace(CONFIG, num_layers=4 * virtual_stages, block_size=2, **changes)
    settings = PipelineConfig(
        virtual_stages=virtual_stages,
        microbatches=microbatches,
        exchange=exchange,
        executor=executor,
    )
    return make_plan(config, mesh_of(stage=4, data=2), settings)


def check_exchange(plan, found, blocks, itemsize):
    permutes = [one for one in found if one.kind == "collective-permute"]
    block_bytes = T * CONFIG.width * itemsize
    assert sum(one.bytes for one in permutes) == blocks * block_bytes
    assert plan.payload.exchanged_bytes(plan.schedule, block_bytes) == blocks * block_bytes
    # Of the loops, those over ticks have permutes, and no loop has anything else.
    assert [one.kind for one in found if one.in_loop] == ["collective-permute"] * len(permutes)
    return permutes


EXCHANGED = {
    (1, "cached"): 88,
    (1, "naive"): 110,
    (2, "cached"): 152,
    (2, "naive"): 342,
    (4, "cached"): 280,
    (4, "naive"): 1190,
}
"""Block representations that each of four stages sends for eight microbatches, by V."""


@pytest.mark.parametrize(
    "virtual_stages, exchange, executor",
    [
        *((*key, "two_scan") for key in EXCHANGED),
        *((2, exchange, "one_f_one_b") for exchange in ("cached", "naive")),
        *((1, exchange, "autodiff") for exchange in ("cached", "naive")),
    ],
)
def test_only_blocks_cross_stages_and_as_many_as_the_formula_says(
    virtual_stages, exchange, executor
):
    plan = plan_of(virtual_stages, 8, exchange, executor, compute_dtype="bfloat16")
    found = collectives_of(plan)
    permutes = check_exchange(plan, found, EXCHANGED[virtual_stages, exchange], itemsize=2)
    ring = {(stage, (stage + 1) % 4) for stage in range(4)}
    for one in permutes:
        axes, pairs = one.over
        assert axes == ("stage",) and one.dtype == "bf16"
        assert set(pairs) in (ring, {(b, a) for a, b in ring})
        assert one.shape[1:] == (1, T, CONFIG.width)
        assert one.shape[0] in (plan.payload.window, plan.payload.early, plan.payload.late)


def test_the_compiled_program_is_right_and_exchanges_the_same():
    config = dataclasses.replace(CONFIG, num_layers=8, block_size=2)
    plan, compiled = check(config, {"stage": 4, "data": 2}, 2, 8, "two_scan")
    found = collectives_of_hlo(compiled.as_text())
    check_exchange(plan, found, EXCHANGED[2, "cached"], itemsize=4)


def test_a_standard_residual_crosses_as_one_block():
    for exchange in ("cached", "naive"):
        plan = plan_of(2, 8, exchange, residual="standard")
        found = collectives_of(plan)
        check_exchange(plan, found, 2 * 19, itemsize=4)


def test_kernels_read_and_merge_in_the_manual_region():
    config = dataclasses.replace(CONFIG, num_layers=2, block_size=2, implementation="mosaic_tpu")
    plan = make_plan(config, mesh_of(stage=2, data=2))
    assert set(count_launches(step_of(plan), abstract_params(plan), *batch_of(plan))) == {
        f"attnres_{phase}_{direction}"
        for phase in ("inter_block", "merge")
        for direction in ("forward", "backward")
    }


def test_an_open_block_crosses_in_its_own_dtype():
    config = dataclasses.replace(
        CONFIG, num_layers=8, block_size=4, compute_dtype="bfloat16", float32_partial_sum=True
    )
    plan = make_plan(config, mesh_of(stage=4), PipelineConfig(virtual_stages=2, microbatches=4))
    found = collectives_of(plan)
    block = T * CONFIG.width
    assert plan.payload.carries_partial_sum
    assert total_bytes(found, "collective-permute") == (
        plan.payload.exchanged_bytes(plan.schedule, 2 * block, 4 * block)
    )


@pytest.mark.parametrize(
    "config, mesh_sizes, settings, parts",
    [
        (CONFIG, {"stage": 4}, PipelineConfig(virtual_stages=3), ["12 chunks", "8 sub-layers"]),
        (CONFIG, {"tensor": 4}, PipelineConfig(), ["attention.key_kernel", "axis g", "tensor=4"]),
        (
            dataclasses.replace(CONFIG, attention="splash"),
            {"sequence": 2},
            PipelineConfig(),
            ["splash", "sequence=1"],
        ),
    ],
)
def test_what_cannot_be_split_is_refused(config, mesh_sizes, settings, parts):
    with pytest.raises(ValueError) as error:
        make_plan(config, mesh_of(**mesh_sizes), settings)
    assert all(part in str(error.value) for part in parts), error.value


def test_a_batch_or_context_that_cannot_be_split_is_refused():
    plan = make_plan(CONFIG, mesh_of(stage=2, data=2, tensor=2), PipelineConfig(microbatches=4))
    loss, params = make_loss(plan), abstract_params(plan)
    with pytest.raises(
        ValueError, match=r"batch of 12 .* microbatches=4 .* data=2 .* multiple of 8"
    ):
        jax.eval_shape(loss, params, jax.ShapeDtypeStruct((12, 5), jnp.int32))
    with pytest.raises(ValueError, match=r"context of 5 tokens .* tensor=2; .* multiple of 2"):
        jax.eval_shape(loss, params, jax.ShapeDtypeStruct((8, 6), jnp.int32))


def test_unknown_settings_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"pipeline\.executor: .* did you mean 'one_f_one_b'"):
        PipelineConfig(executor="one_forward_one_backward")
    with pytest.raises(ValueError, match=r"pipeline\.microbatches: expected a whole number"):
        PipelineConfig(microbatches=0)
