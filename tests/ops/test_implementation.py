"""Kernels and XLA compute the same, and the choice between them is announced or refused."""

import importlib.util
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from attnres_jax.ops import (
    Bank,
    FinishedSources,
    depth_attention,
    implementation,
    inter_block,
    merge,
)
from attnres_jax.ops.block import run_blocks
from tests import oracles
from tests.pallas_kernels.programs import count_launches, launches

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, D = 2, 3, 16
EPS = 1e-4
BF16 = jnp.bfloat16


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


SOURCES = list(oracles.normal(0, 3, B, T, D))
VECTORS = (oracles.normal(1, 2, D) / 2, 1 + 0.3 * oracles.normal(2, 2, D))
LSE = oracles.normal(3, B, T)


# --- The same values and gradients ---------------------------------------------------------------


def one_read(sources, vectors, **options):
    query, gain = vectors
    return depth_attention(sources, query[0], gain[0], return_weights=True, **options)


def two_groups(sources, vectors, **options):
    options |= {"return_weights": True, "return_sources": True}
    first, second = ([x[i : i + 1] for x in vectors] for i in range(2))
    one = inter_block(sources[:2], *first, **options)
    two = inter_block(one[-1].append(sources[2]), *second, **options)
    assert isinstance(two[-1], FinishedSources)
    return one[:3], two[:3], two[-1].values


def of_a_bank(sources, vectors, **options):
    # The last row holds NaN, and does not count.
    values = jnp.stack([*sources[:2], jnp.full_like(sources[2], jnp.nan)])
    read = inter_block(
        Bank(values, jnp.int32(2)), *vectors, return_weights=True, return_sources=True, **options
    )
    assert isinstance(read[-1], Bank)
    return read[:3], read[-1].values[:2], read[-1].count.astype(jnp.float32)


def merged(output, lse, partial_sum, update, vectors, norm_gain, **options):
    query, gain = vectors
    return merge(
        output,
        lse,
        partial_sum,
        update,
        query[0],
        gain[0],
        norm_gain_d=norm_gain,
        norm_eps=1e-2,
        return_gate=True,
        **options,
    )


def in_blocks(embedding, vectors, slopes, **options):
    sublayers = [lambda x, slope=slope: jnp.tanh(slope[None, None] * x) for slope in slopes]
    query, gain = (jnp.concatenate([x, 2 * x[:1]]) for x in vectors)
    sources, weights = run_blocks(
        embedding, sublayers, query, gain, block_size=2, reads_per_group=2, **options
    )
    return sources.values, weights


NORM_GAIN = oracles.normal(4, D)
ROWS = oracles.normal(5, 3, B, T, D)
PROGRAMS = {
    "a read": (one_read, (SOURCES, VECTORS)),
    "two groups of reads": (two_groups, (SOURCES, VECTORS)),
    "a bank": (of_a_bank, (SOURCES, VECTORS)),
    "a merge": (merged, (ROWS[0], LSE, ROWS[1], ROWS[2], VECTORS, NORM_GAIN)),
    "a merge of a first update": (merged, (ROWS[0], LSE, None, ROWS[2], VECTORS, NORM_GAIN)),
    "a merge without update or norm": (merged, (ROWS[0], LSE, ROWS[1], None, VECTORS, None)),
    "blocks": (in_blocks, (SOURCES[0], VECTORS, oracles.normal(6, 3, D))),
}


def value_and_gradients(function, arguments, name):
    """Of the inner product with fixed cotangents; run on the CPU, whatever computes."""
    options = {"eps": EPS, "implementation": name}

    @jax.jit
    def run(arguments):
        results, pullback = jax.vjp(lambda *xs: function(*xs, **options), *arguments)
        leaves, structure = jax.tree.flatten(results)
        cotangents = [
            jnp.asarray(oracles.normal(80 + i, *x.shape), x.dtype) for i, x in enumerate(leaves)
        ]
        return results, pullback(structure.unflatten(cotangents))

    with pltpu.force_tpu_interpret_mode(True):
        return run(arguments)


def assert_equal(function, arguments, rounding=0.0):
    actual = value_and_gradients(function, arguments, "mosaic_tpu")
    expected = value_and_gradients(function, arguments, "xla")
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for part, tolerance in ((0, 1e-5), (1, 2e-5)):
        leaves = jax.tree.leaves_with_path(actual[part]), jax.tree.leaves(expected[part])
        for (path, a), b in zip(*leaves, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            if a.dtype != jnp.float32:
                assert oracles.relative_error(a, b) <= rounding, path
            elif np.any(b):
                assert oracles.relative_error(a, b) <= tolerance, path
            else:
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_equal_xla(name):
    function, arguments = PROGRAMS[name]
    assert_equal(function, float32(arguments))


def test_kernels_equal_xla_in_bfloat16_with_a_float32_partial_sum():
    output, update = (jnp.asarray(x, BF16) for x in (ROWS[0], ROWS[2]))
    lse, partial_sum, vectors, norm_gain = float32((LSE, ROWS[1], VECTORS, NORM_GAIN))
    arguments = output, lse, partial_sum, update, vectors, norm_gain
    # Both round once: a difference in the last bit of float32 seldom shows.
    assert_equal(merged, arguments, rounding=5e-4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_phase_is_computed_by_kernels(name):
    function, arguments = PROGRAMS[name]

    def loss(arguments):
        results = function(*arguments, eps=EPS, implementation="mosaic_tpu")
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results))

    found = count_launches(jax.grad(loss), float32(arguments))
    phases = {"merge": 1} if "merge" in name else {"inter_block": 2 if "groups" in name else 1}
    if name == "blocks":
        phases = {"inter_block": 2, "merge": 1}
    assert found == {
        f"attnres_{phase}_{direction}": number
        for phase, number in phases.items()
        for direction in ("forward", "backward")
    }


def test_a_later_read_computes_the_inverse_rms_of_new_sources_alone():
    program, arguments = PROGRAMS["two groups of reads"]

    def read(arguments):
        return program(*arguments, eps=EPS, implementation="mosaic_tpu")

    first, second = (
        [x.aval.shape for x in launch.outvars][-1] for launch in launches(read, float32(arguments))
    )
    assert (first, second) == ((2, B * T), (1, B * T))


@pytest.mark.parametrize("name, layouts", [("mosaic_tpu", [(0, 1, 2)]), ("xla", [])])
def test_sources_that_kernels_read_lie_row_after_row(name, layouts):
    def grow(embedding, block_sum, query_sd, gain_sd):
        *_, sources = inter_block(
            (embedding,), query_sd, gain_sd, implementation=name, return_sources=True
        )
        return sources.append(2 * block_sum).values

    row, vectors = jnp.ones((2, 3, 16)), jnp.ones((2, 16))
    equations = jax.make_jaxpr(grow)(row, row, vectors, vectors).eqns
    found = [e.params["layout"] for e in equations if e.primitive.name == "layout_constraint"]
    assert [layout.major_to_minor for layout in found] == layouts


def test_kernels_refuse_forward_mode_and_xla_does_not():
    sources, (query, gain) = float32((SOURCES, VECTORS))

    def tangent(query, name):
        def read(query):
            return depth_attention(sources, query, gain[0], implementation=name)

        return jax.jvp(read, (query,), (query,))

    run = jax.jit(tangent, static_argnames="name")
    run.lower(query[0], name="xla")
    with pltpu.force_tpu_interpret_mode(True), pytest.raises(TypeError, match="forward-mode"):
        run.lower(query[0], name="mosaic_tpu")


@pytest.mark.parametrize("name", ["xla", "mosaic_tpu", None])
def test_bad_input_is_refused_whatever_computes(name):
    sources, (query, gain) = float32((SOURCES, VECTORS))
    for bad, message in [([], "sources"), ([sources[0], sources[1][:1]], r"sources\[1\]")]:
        with pytest.raises(ValueError, match=message):
            inter_block(bad, query, gain, implementation=name)
    with pytest.raises(ValueError, match="query_sd"):
        inter_block(sources, query[:0], gain[:0], implementation=name)
    with pytest.raises(ValueError, match="lse"):
        merge(sources[0], LSE[:1], sources[1], None, query[0], gain[0], implementation=name)


# --- The choice ----------------------------------------------------------------------------------


@pytest.fixture
def log(caplog):
    """Messages since the start of the test, which may repeat what an earlier one has logged."""
    implementation._log_once.cache_clear()
    caplog.set_level(logging.DEBUG, logger="attnres_jax")
    return caplog


def on_a_described(kind, platform):
    device = AbstractDevice(kind, 1, platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=device))


def launches_of(name, dtype=jnp.float32, function=depth_attention):
    row, vector = jax.ShapeDtypeStruct((B, T, D), dtype), jax.ShapeDtypeStruct((D,), jnp.float32)
    lse = jax.ShapeDtypeStruct((B, T), jnp.float32)

    def read(row, vector, lse):
        return depth_attention([row] * 3, vector, vector, implementation=name)

    def join(row, vector, lse):
        return merge(row, lse, row, row, vector, vector, implementation=name)

    return count_launches(join if function is merge else read, row, vector, lse)


both_phases = pytest.mark.parametrize("function", [depth_attention, merge])


@both_phases
def test_none_is_xla_on_a_cpu_without_a_word(log, function):
    assert not launches_of(None, function=function)
    assert not log.records


@both_phases
def test_none_is_kernels_on_a_tpu_without_a_word(log, function):
    with on_a_described("TPU v5", "tpu"):
        assert sum(launches_of(None, function=function).values()) == 1
        assert not launches_of("xla", function=function)
    assert not log.records


@both_phases
def test_what_kernels_cannot_compute_goes_to_xla_with_one_line(log, function):
    with on_a_described("TPU v5", "tpu"):
        for _ in range(2):
            assert not launches_of(None, jnp.float16, function)
    (record,) = log.records
    assert record.name == "attnres_jax" and record.levelno == logging.WARNING
    assert "through XLA, not mosaic_tpu" in record.message and "float16" in record.message


@both_phases
def test_what_named_kernels_cannot_compute_is_refused(log, function):
    with pytest.raises(ValueError, match="float16") as error:
        launches_of("mosaic_tpu", jnp.float16, function)
    assert 'implementation="mosaic_tpu"' in str(error.value)
    assert 'implementation="xla" has no such limit' in str(error.value)
    assert not log.records


@both_phases
def test_kernels_for_gpus_are_refused_where_they_cannot_run(log, function, monkeypatch):
    reason = "(jax-triton is not installed|the program is not for an NVIDIA GPU)"
    with pytest.raises(ValueError, match=f'implementation="triton_gpu": {reason}'):
        launches_of("triton_gpu", function=function)
    assert not log.records
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with on_a_described("NVIDIA H100 80GB HBM3", "cuda"):
        assert not launches_of(None, function=function)
    (record,) = log.records
    assert "through XLA, not triton_gpu: jax-triton is not installed" in record.message


@both_phases
@pytest.mark.parametrize("name", ["pallas", "mosaic", "XLA", "", 0, True])
def test_unknown_names_are_refused(name, function):
    with pytest.raises(ValueError, match=r"implementation: .* xla, mosaic_tpu, triton_gpu") as e:
        launches_of(name, function=function)
    assert repr(name) in str(e.value)


def test_several_devices_without_a_mesh_go_to_xla_with_one_line(log, monkeypatch):
    assert jax.device_count() > 1
    monkeypatch.setattr(implementation, "_platform", lambda: "tpu")
    for function in (depth_attention, merge):
        assert not launches_of(None, function=function)
    (record,) = log.records
    assert "jax.set_mesh(mesh)" in record.message
    # Who names the kernels knows what is on the devices.
    assert launches_of("mosaic_tpu")
    # A mesh in context, of any size, says it.
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert launches_of(None)
    assert len(log.records) == 1


def test_one_device_needs_no_mesh(log, monkeypatch):
    monkeypatch.setattr(implementation, "_platform", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert launches_of(None)
    assert not log.records
