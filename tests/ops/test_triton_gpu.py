"""The public functions with implementation="triton_gpu", in Triton's interpreter on the CPU.

Values and gradients against the float64 oracle or XLA, under jax's transformations, and what is
refused. That the same programs compile for a GPU is in `tests/pallas_kernels/test_triton_aot.py`.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
)

from attnres_jax.ops import Bank, depth_attention, inter_block, merge, single_phase
from pallas_kernels import gpus
from tests import oracles
from tests.models import reference
from tests.models.programs import cotangent, logits_and_gradients, tiny, tokens
from tests.ops import test_implementation, test_single_phase
from tests.pallas_kernels import interpreter

interpreter.load()
pytestmark = pytest.mark.usefixtures("quick_compilation")

EPS = 1e-6
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@pytest.fixture
def gpu(monkeypatch):
    interpreter.use(monkeypatch)


def assert_near(actual, expected, tolerance, name=""):
    if actual.dtype != jnp.float32:
        tolerance = 1.05 * oracles.rounding_floor(expected, np.dtype(actual.dtype))
    error = oracles.relative_error(actual, expected)
    assert error <= tolerance, f"{name}: {error}, tolerance {tolerance}"


# --- Values and gradients ------------------------------------------------------------------------


def read_group(n, s, tokens, d, dtype, *, scale=None, bank=False):
    """Values and all gradients of S reads by their functions, and by the oracle."""
    values = tuple(jnp.asarray(oracles.normal(i, *tokens, d), dtype) for i in range(n))
    scale = d**-0.5 if scale is None else scale
    query = jnp.asarray(scale * oracles.normal(50, s, d), F32)
    gain = jnp.asarray(1 + 0.3 * oracles.normal(51, s, d), F32)
    doutputs = tuple(jnp.asarray(x, dtype) for x in oracles.normal(52, s, *tokens, d))
    dlse = jnp.asarray(oracles.normal(53, s, *tokens), F32)
    dweights = jnp.asarray(oracles.normal(54, s, n, *tokens), F32)

    @jax.jit
    def run(values, query, gain):
        def function(values, query, gain):
            sources = values
            if bank:  # One more row, which does not count.
                sources = Bank(jnp.stack([*values, jnp.full_like(values[0], jnp.nan)]), n)
            outputs, lse, weights = inter_block(
                sources, query, gain, eps=EPS, implementation="triton_gpu", return_weights=True
            )
            return outputs, lse, weights[:, :n]

        results, pullback = jax.vjp(function, values, query, gain)
        return results, pullback((doutputs, dlse, dweights))

    (outputs, lse, weights), gradients = run(values, query, gain)
    exact = oracles.float64((values, query, gain))
    reads = oracles.group_read(*exact, EPS)
    for i, read in enumerate(reads):
        assert_near(outputs[i], read.output, 1e-5, f"output {i}")
        assert_near(lse[i], read.lse, 1e-5, "lse")
        assert_near(weights[i], read.weights, 1e-4 if scale == 1 else 1e-5, "weights")
    right = oracles.group_read_gradients(
        *exact, *oracles.float64((doutputs, dlse, dweights)), eps=EPS
    )
    dvalues, dquery, dgain = gradients
    for i, expected in enumerate(right.sources):
        assert_near(dvalues[i], expected, 2e-5, f"source {i}")
    if n == 1:
        return
    assert_near(dquery, right.query, 2e-5, "query")
    assert_near(dgain, right.gain, 2e-5, "gain")


@pytest.mark.parametrize(
    "n, s, tokens, d, dtype",
    [
        (1, 2, (5,), 16, F32),
        (3, 2, (2, 7), 100, BF16),
        (5, 3, (1,), 7, F16),
        (19, 2, (3,), 40, F32),
    ],
)
def test_reads_of_a_tuple(gpu, n, s, tokens, d, dtype):
    read_group(n, s, tokens, d, dtype)


def test_reads_of_a_bank(gpu):
    read_group(2, 2, (2, 3), 100, F32, bank=True)


# As in FLA's test_attnres, normal queries times 1 saturate the softmax. Its shapes are in the
# kernels' own tests.
@pytest.mark.parametrize(
    "n, b, t, d, scale, dtype", [(3, 1, 2, 1000, None, F16), (10, 2, 1, 100, 1, F32)]
)
def test_a_read_with_output_norm(gpu, n, b, t, d, scale, dtype):
    *values, last = [jnp.asarray(oracles.normal(i, b, t, d), dtype) for i in range(n)]
    query = jnp.asarray((scale or d**-0.5) * oracles.normal(50, d), F32)
    gain, norm_gain = jnp.asarray(1 + 0.3 * oracles.normal(51, 2, d), F32)
    dhidden = jnp.asarray(oracles.normal(52, b, t, d), dtype)

    @jax.jit
    def run(values, last, query, gain, norm_gain):
        def function(values, last, query, gain, norm_gain):
            return single_phase(
                values,
                last,
                None,
                query,
                gain,
                norm_gain_d=norm_gain,
                eps=EPS,
                implementation="triton_gpu",
            )[1]

        hidden, pullback = jax.vjp(function, tuple(values), last, query, gain, norm_gain)
        return hidden, pullback(dhidden)

    hidden, (dvalues, dlast, dquery, dgain, dnorm_gain) = run(values, last, query, gain, norm_gain)
    exact = oracles.float64(((*values, last), query, gain))
    read = oracles.read(*exact, EPS)
    norm_gain, dhidden = oracles.float64((norm_gain, dhidden))
    dread, right_norm_gain = oracles.rms_norm_gradients(read.output, norm_gain, EPS, dhidden)
    right = oracles.read_gradients(*exact, dread, eps=EPS)
    # What phase 1 hands on is rounded to half precision.
    tolerance = 2e-5 if dtype == F32 else 3 * float(jnp.finfo(dtype).eps)
    pairs = {
        "hidden": (hidden, oracles.rms_norm(read.output, norm_gain, EPS)),
        **{f"source {i}": pair for i, pair in enumerate(zip(dvalues, right.sources, strict=False))},
        "last": (dlast, right.sources[-1]),
        "query": (dquery, right.query),
        "gain": (dgain, right.gain),
        "norm gain": (dnorm_gain, right_norm_gain),
    }
    for name, (actual, expected) in pairs.items():
        assert oracles.relative_error(actual, expected) <= tolerance, name


@pytest.mark.parametrize("name", test_implementation.PROGRAMS)
def test_kernels_equal_xla(gpu, name):
    function, arguments = test_implementation.PROGRAMS[name]
    arguments = test_implementation.float32(arguments)
    actual, expected = (
        test_implementation.value_and_gradients(function, arguments, which)
        for which in ("triton_gpu", "xla")
    )
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert a.dtype == b.dtype
        assert oracles.relative_error(a, b) <= (1e-5 if path[0].idx == 0 else 2e-5), path


def test_weights_of_a_single_read_have_gradients(gpu):
    arguments, _ = test_single_phase.case(2)
    names = list(arguments)
    dweights = jnp.asarray(oracles.normal(30, 3, 2, test_single_phase.T), F32)

    def gradients(implementation):
        def weights(*given):
            return single_phase(
                **dict(zip(names, given, strict=True)),
                implementation=implementation,
                return_weights=True,
            )[2]

        @jax.jit
        def run(*given):
            results, pullback = jax.vjp(weights, *given)
            return results, pullback(dweights)

        return run(*arguments.values())

    for a, b in zip(*map(jax.tree.leaves, map(gradients, ("triton_gpu", "xla"))), strict=True):
        assert oracles.relative_error(a, b) <= 2e-5


def test_a_language_model_and_every_gradient(gpu):
    changes = {"num_layers": 2, "block_size": 3, "remat": "block"}
    inputs = None
    found = []
    for name in ("triton_gpu", "xla"):
        config = tiny(**changes, implementation=name)
        inputs = inputs or (reference.random_params(config, query_scale=2.0), tokens(), cotangent())
        found.append(logits_and_gradients.__wrapped__(config)(*inputs))
    (logits, gradients), (expected_logits, expected) = found
    assert oracles.relative_error(logits, expected_logits) <= 1e-5
    leaves = map(reference.leaves, (gradients, expected))
    for (name, got), (_, want) in zip(*leaves, strict=True):
        assert oracles.relative_error(got, want) <= 2e-5, name


# --- Transformations -----------------------------------------------------------------------------


def loss(values, query, gain, implementation="triton_gpu"):
    options = {"eps": EPS, "implementation": implementation}
    outputs, lse = inter_block(values, query, gain, **options)
    summed, hidden = merge(
        outputs[1], lse[1], values[0], outputs[0], query[1], gain[1], norm_gain_d=gain[0], **options
    )
    return jnp.sum(jnp.sin(hidden)) + jnp.sum(jnp.cos(summed))


def loss_inputs(*tokens, d=16):
    values = tuple(jnp.asarray(oracles.normal(i, *tokens, d), F32) for i in range(2))
    return values, *jnp.asarray(oracles.normal(9, 2, 2, d) / 2, F32)


def test_vmap_equals_xla(gpu):
    values, query, gain = loss_inputs(2, 3)

    def run(implementation):
        gradient = jax.grad(lambda *x: loss(*x, implementation), argnums=(0, 1, 2))
        return jax.jit(jax.vmap(gradient, in_axes=(0, None, None)))(values, query, gain)

    for a, b in zip(*map(jax.tree.leaves, (run("triton_gpu"), run("xla"))), strict=True):
        assert a.shape[0] == 2 and oracles.relative_error(a, b) <= 2e-5


def test_sharded_tokens_give_the_same(gpu):
    arguments = loss_inputs(2, 2)
    expected = jax.jit(jax.grad(lambda *x: loss(*x, "xla"), argnums=(0, 1, 2)))(*arguments)
    mesh = jax.make_mesh(
        (2, 2), ("data", "sequence"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    with jax.set_mesh(mesh):
        cut = NamedSharding(mesh, PartitionSpec("data", "sequence"))
        values = jax.device_put(arguments[0], cut)
        actual = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(values, *arguments[1:])
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert oracles.relative_error(a, b) <= 2e-5


def test_a_scan_over_reads_of_a_bank(gpu):
    (first, second), query, gain = loss_inputs(5)

    def run(implementation):
        def read(bank, vectors):
            output = depth_attention(bank, *vectors, eps=EPS, implementation=implementation)
            return bank.append(jnp.tanh(output) + second), None

        def total(first, query, gain):
            bank, _ = jax.lax.scan(jax.checkpoint(read), Bank.create(first, 3), (query, gain))
            return jnp.sum(jnp.sin(bank.values))

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(first, query, gain)

    for a, b in zip(*map(jax.tree.leaves, (run("triton_gpu"), run("xla"))), strict=True):
        assert oracles.relative_error(a, b) <= 2e-5


def test_forward_mode_is_refused(gpu):
    values, query, gain = loss_inputs(3)
    with pytest.raises(TypeError, match=r"forward-mode autodiff .* custom_vjp"):
        jax.jit(lambda query: jax.jvp(lambda q: loss(values, q, gain), (query,), (query,))).lower(
            query
        )


# --- The choice ----------------------------------------------------------------------------------


def test_none_takes_the_kernels_on_a_gpu(gpu):
    device = AbstractDevice("NVIDIA H100 80GB HBM3", 1, "gpu")
    mesh = AbstractMesh((1,), ("data",), abstract_device=device)
    row, vector = jax.ShapeDtypeStruct((3, 16), BF16), jax.ShapeDtypeStruct((16,), F32)

    def program(implementation):
        def read(row, vector):
            return depth_attention([row] * 3, vector, vector, implementation=implementation)

        with jax.sharding.use_abstract_mesh(mesh):
            return str(jax.make_jaxpr(read)(row, vector))

    assert "pure_callback" in program(None)
    assert "pure_callback" not in program("xla")


# --- What is refused -----------------------------------------------------------------------------


def read(d=16, dtype=F32, s=1, name="triton_gpu"):
    row = jax.ShapeDtypeStruct((3, d), dtype)
    vectors = jax.ShapeDtypeStruct((s, d), F32)
    return jax.eval_shape(
        lambda row, q, g: inter_block([row] * 3, q, g, implementation=name), row, vectors, vectors
    )


def test_more_reads_than_the_kernels_take_are_refused(gpu):
    read(s=24)
    with pytest.raises(ValueError, match=r"up to 24 reads at once, got 25; set reads_per_group"):
        read(s=25)


def test_other_dtypes_are_refused(gpu):
    with pytest.raises(ValueError, match=r"float32 arrays, and one is float8_e4m3fn; .*\"xla\""):
        read(dtype=jnp.float8_e4m3fn)


def test_rows_that_are_too_wide_are_refused(gpu):
    row, vector = jax.ShapeDtypeStruct((3, 2**20), F32), jax.ShapeDtypeStruct((2**20,), F32)
    lse = jax.ShapeDtypeStruct((3,), F32)
    with pytest.raises(ValueError, match=r"rows of 1048576 elements of float32 do not fit"):
        jax.eval_shape(
            lambda row, lse, v: merge(row, lse, row, row, v, v, implementation="triton_gpu"),
            row,
            lse,
            vector,
        )


def test_a_partial_sum_of_another_half_precision_is_refused(gpu):
    row, half = (jax.ShapeDtypeStruct((3, 16), dtype) for dtype in (BF16, F16))
    vector, lse = jax.ShapeDtypeStruct((16,), F32), jax.ShapeDtypeStruct((3,), F32)
    with pytest.raises(ValueError, match="partial sums have the dtype of the output, bfloat16"):
        jax.eval_shape(
            lambda row, half, lse, v: merge(row, lse, half, row, v, v, implementation="triton_gpu"),
            row,
            half,
            lse,
            vector,
        )


@pytest.mark.parametrize(
    "capability, message",
    [
        (75, "compute capability 8.0 or newer, and this one has 7.5"),
        (None, "not for an NVIDIA GPU"),
    ],
)
def test_other_devices_are_refused(monkeypatch, capability, message):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "jax_triton" or found(name)
    )
    monkeypatch.setattr(gpus, "compute_capability", lambda: capability)
    with pytest.raises(ValueError, match=message):
        read()


def test_a_missing_jax_triton_is_refused(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jax_triton" else found(name)
    )
    with pytest.raises(ValueError, match=r"jax-triton is not installed .*attnres-jax\[gpu\]"):
        read()
