"""The gradient of single reads: added to in place from read to read, also on sharded tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.single_phase.op import single_phase, unsupported
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")


def two_reads(values, update, folded_2d, norm_gain):
    """The second reads what the first hands on."""
    settings = {
        "eps": 1e-6,
        "norm_eps": 1e-6,
        "implementation": "mosaic_tpu",
        "interpret": True,
    }
    first = single_phase(values, None, update, folded_2d[0], norm_gain, **settings)
    second = single_phase(
        first.values, first.summed, first.hidden, folded_2d[1], norm_gain, **settings
    )
    return second.hidden, second.weights


def inputs(leading):
    *values, update = [jnp.asarray(oracles.normal(i, *leading, 16), jnp.float32) for i in range(3)]
    folded, norm_gain = jnp.asarray(oracles.normal(4, 2, 16)), jnp.asarray(oracles.normal(5, 16))
    return tuple(values), update, folded.astype(jnp.float32), norm_gain.astype(jnp.float32)


def gradients(*arguments):
    results, pullback = jax.vjp(two_reads, *arguments)
    return results, pullback(jax.tree.map(lambda x: jnp.cos(x), results))


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(getattr(inner, "jaxpr", inner))


def test_gradients_of_the_sources_are_added_in_place():
    jaxpr = jax.make_jaxpr(gradients)(*inputs((128,))).jaxpr
    found = list(equations(jaxpr))
    backward = [
        dict(e.params["input_output_aliases"])
        for e in found
        if e.primitive.name == "pallas_call" and e.params["name"].endswith("backward")
    ]
    assert sorted(map(len, backward)) == [1, 3]  # The last read writes them, the one before adds.
    sums = [e.outvars[0].aval.shape for e in found if e.primitive.name == "add_any"]
    assert (128, 16) not in sums


def test_sharded_tokens_give_the_same():
    arguments = inputs((4, 6))
    expected = jax.jit(gradients)(*arguments)
    mesh = jax.make_mesh(
        (2, 2), ("data", "sequence"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    with jax.set_mesh(mesh):
        spec = PartitionSpec("data", "sequence")
        values, update = jax.device_put(arguments[:2], jax.sharding.NamedSharding(mesh, spec))
        actual = jax.jit(gradients)(values, update, *arguments[2:])
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_the_kernels_do_not_take():
    rows = jnp.zeros((2, 16))
    assert unsupported((rows,) * 2, rows, "mosaic_tpu") is None
    assert "up to 2 sources, got 3" in str(unsupported((rows,) * 3, rows, "mosaic_tpu"))
    half = rows.astype(jnp.float16)
    assert "float16" in str(unsupported((half,), half, "mosaic_tpu"))
    wide = jax.ShapeDtypeStruct((8192, 10**6), jnp.float32)
    assert "no tile of width 1000000" in str(unsupported((wide,), wide, "mosaic_tpu"))
