"""Kernels on a mesh: each device runs on its own tokens, and gradients of queries are summed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnres_jax import ops
from pallas_kernels.inter_block.op import inter_block
from pallas_kernels.merge.op import merge
from pallas_kernels.sharding import token_axes
from tests import oracles
from tests.pallas_kernels.programs import equations

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, D = 4, 4, 16
MESHES = {
    "data": ((4,), ("data",), P("data")),
    "data and sequence": ((2, 4), ("data", "sequence"), P("data", "sequence")),
    "data and tensor": ((2, 4), ("data", "tensor"), P("data")),
}


def mesh_of(name, kind=AxisType.Auto):
    shape, names, _ = MESHES[name]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def two_phases(inputs, kernels):
    """Everything that both phases return, also of a bank if there is one, in one number."""
    values, bank, vectors, partial_sum, update = inputs
    of_bank = []
    query_sd, gain_sd, norm_gain_d = vectors
    folded = query_sd * gain_sd
    if kernels:
        options = {"eps": 1e-3, "implementation": "mosaic_tpu", "interpret": True}
        outputs, lse, logits, *_ = inter_block(values, folded, **options)
        weights = jax.nn.softmax(logits, axis=1)
        if bank is not None:
            of_bank, *_ = inter_block(bank, folded[:1], count=jnp.int32(1), **options)
        results = merge(
            outputs[0],
            lse[0],
            partial_sum,
            update,
            folded[1],
            norm_gain_d,
            norm_eps=1e-3,
            **options,
        )
    else:
        options = {"eps": 1e-3, "implementation": "xla"}
        outputs, lse, weights = ops.inter_block(
            values, query_sd, gain_sd, return_weights=True, **options
        )
        if bank is not None:
            of_bank = [bank[0]]
        results = ops.merge(
            outputs[0],
            lse[0],
            partial_sum,
            update,
            query_sd[1],
            gain_sd[1],
            norm_gain_d=norm_gain_d,
            return_gate=True,
            **options,
        )
    everything = [*outputs, lse, weights, *of_bank, *results]
    cotangents = [oracles.normal(70 + i, *x.shape) for i, x in enumerate(everything)]
    return sum(
        jnp.sum(x * jnp.asarray(c, jnp.float32))
        for x, c in zip(everything, cotangents, strict=True)
    )


def inputs_of(with_bank=True):
    rows = tuple(oracles.normal(0, 4, B, T, D))
    vectors = oracles.normal(1, 2, D) / 2, 1 + 0.3 * oracles.normal(2, 2, D), oracles.normal(3, D)
    bank = oracles.normal(4, 2, B, T, D) if with_bank else None
    inputs = rows[:2], bank, vectors, rows[2], rows[3]
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), inputs)


@functools.cache
def expected(with_bank):
    gradient = jax.value_and_grad(functools.partial(two_phases, kernels=False))
    return jax.jit(gradient)(inputs_of(with_bank))


gradient_of_kernels = jax.value_and_grad(functools.partial(two_phases, kernels=True))


def placed(mesh, spec, with_bank=True):
    """The inputs, with their tokens cut as the spec says."""
    values, bank, vectors, *sums = inputs_of(with_bank)
    rows, of_bank, whole = (NamedSharding(mesh, s) for s in (spec, P(None, *spec), P()))
    values, sums = jax.device_put((values, sums), rows)
    return values, jax.device_put(bank, of_bank), jax.device_put(vectors, whole), *sums


@pytest.mark.parametrize("name", MESHES)
def test_values_and_gradients_equal_those_of_one_device(name):
    mesh, with_bank = mesh_of(name), name == "data and sequence"
    with jax.set_mesh(mesh):
        inputs = placed(mesh, MESHES[name][2], with_bank)
        value, gradients = jax.jit(gradient_of_kernels)(inputs)
    right_value, right = expected(with_bank)
    np.testing.assert_allclose(value, right_value, rtol=1e-5)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(right)]
    for which, a, b in zip(names, jax.tree.leaves(gradients), jax.tree.leaves(right), strict=True):
        assert oracles.relative_error(a, b) <= 2e-5, which


@pytest.mark.parametrize("spec", [P("data", "sequence"), P("data"), P(None, "data"), P()], ids=str)
def test_a_mesh_whose_axes_are_part_of_the_types(spec):
    # As `jax.make_mesh` makes them: nothing is cut otherwise than its type says.
    mesh = mesh_of("data and sequence", AxisType.Explicit)
    with jax.set_mesh(mesh):
        inputs = placed(mesh, spec)
        _, gradients = jax.eval_shape(gradient_of_kernels, inputs)
    for x, gradient in zip(jax.tree.leaves(inputs), jax.tree.leaves(gradients), strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
        assert gradient.sharding.spec == jax.typeof(x).sharding.spec


def test_every_kernel_runs_inside_a_shard_map_on_its_own_tokens():
    with jax.set_mesh(mesh_of("data and sequence")):
        jaxpr = jax.make_jaxpr(gradient_of_kernels)(inputs_of())
    assert not [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
    maps = [e for e in jaxpr.eqns if e.primitive.name == "shard_map"]
    kernels = [
        (kernel.params["name"], [x.aval.shape for x in kernel.invars])
        for e in maps
        for kernel in equations(e.params["jaxpr"])
        if kernel.primitive.name == "pallas_call"
    ]
    assert sorted(name for name, _ in kernels) == [
        "attnres_inter_block_backward",
        "attnres_inter_block_backward",
        "attnres_inter_block_forward",
        "attnres_inter_block_forward",
        "attnres_merge_backward",
        "attnres_merge_forward",
    ]
    for _, shapes in kernels:
        # Two of the eight devices' tokens.
        assert (B * T // 8, D) in shapes or (2, B * T // 8, D) in shapes
        assert not any(shape[-2:] == (B * T, D) for shape in shapes)
    # Gradients of queries and gains are summed over devices once for each backward kernel.
    sums = [e for m in maps for e in equations(m.params["jaxpr"]) if "psum" in e.primitive.name]
    assert all(set(e.params["axes"]) == {"data", "sequence"} for e in sums)
    assert sum(len(e.outvars) for e in sums) == 2 + 2  # two reads, and the merge's two vectors


def test_inside_a_shard_map_kernels_are_called_as_they_are():
    mesh = mesh_of("data and sequence")
    specs = P("data", "sequence"), P(None, "data", "sequence"), P(), *[P("data", "sequence")] * 2

    def local(inputs):
        # Gradients of a loss over the tokens of a device, and of parameters that all share.
        value, gradients = gradient_of_kernels(inputs)
        axes = ("data", "sequence")
        gradients = (*gradients[:2], jax.lax.psum(gradients[2], axes), *gradients[3:])
        return jax.lax.psum(value, axes), gradients

    def shapes(inputs):
        run = jax.shard_map(
            local, mesh=mesh, in_specs=(specs,), out_specs=(P(), specs), check_vma=False
        )
        return [
            e.primitive.name
            for e in jax.make_jaxpr(run)(inputs).eqns[0].params["jaxpr"].eqns
            if e.primitive.name in ("pallas_call", "shard_map")
        ]

    with jax.set_mesh(mesh):
        assert shapes(inputs_of()) == ["pallas_call"] * 6


# --- How tokens are cut --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, shape, spec",
    [
        ("data", (4, 3, 8), P(("data",), None)),
        ("data", (4, 8), P(("data",))),
        ("data", (4, 3, 5, 8), P(("data",), None, None)),
        ("data and sequence", (4, 4, 8), P(("data",), ("sequence",))),
        ("data and sequence", (4, 3, 8, 8), P(("data",), None, ("sequence",))),
        ("data and sequence", (4, 8), P(("data",))),  # tokens of one sequence, or of many
        ("data and tensor", (4, 3, 8), P(("data",), None)),
        ("data", (8,), P()),
    ],
)
def test_axes_cut_the_dimensions_that_their_names_say(name, shape, spec):
    with jax.set_mesh(mesh_of(name)):
        assert token_axes(shape) == spec


def test_all_axes_that_cut_no_other_dimension_cut_the_batch():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "stage"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        assert token_axes((4, 3, 8)) == P(("data", "fsdp"), None)


def test_nothing_is_cut_without_devices_to_cut_it_for():
    assert token_axes((3, 5, 8)) is None
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))):
        assert token_axes((3, 5, 8)) is None


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("data", (6, 4, 8), r"dimension 0 of \[6, 4, 8\] .* 4 devices of mesh axes \['data'\]"),
        ("data and sequence", (4, 6, 8), r"dimension 1 of \[4, 6, 8\] .*4 devices.*'sequence'"),
        ("data and sequence", (3, 4, 8), r"dimension 0 of \[3, 4, 8\] .*2 devices.*'data'"),
        ("data and tensor", (3, 8), r"dimension 0 of \[3, 8\] .* pad it, or use another mesh"),
    ],
)
def test_dimensions_that_do_not_divide_are_refused(name, shape, message):
    values, folded = (jnp.ones(shape),) * 2, jnp.ones((1, 8))
    with jax.set_mesh(mesh_of(name)):
        with pytest.raises(ValueError, match=f"sources: {message}"):
            inter_block(values, folded, eps=1e-6, implementation="mosaic_tpu")
        with pytest.raises(ValueError, match=message):
            merge(
                values[0],
                jnp.ones(shape[:-1]),
                values[0],
                None,
                folded[0],
                None,
                eps=1e-6,
                norm_eps=1e-6,
                implementation="mosaic_tpu",
            )
