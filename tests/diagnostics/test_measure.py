"""Every measured number against the float64 reference model, and where it may be computed."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from attnres_jax import Diagnostics, TransformerLM, diagnose
from attnres_jax.modules import Attention, FeedForward
from tests import oracles
from tests.diagnostics import programs
from tests.diagnostics.programs import MODELS, measure, padded, text
from tests.models import reference
from tests.models.programs import graphdef_of, tiny, with_zero_queries

pytestmark = pytest.mark.usefixtures("quick_compilation")

each_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
each_residual = pytest.mark.parametrize(
    "config",
    [dataclasses.replace(programs.FULL, num_layers=2), programs.GROUPED],
    ids=["full", "block"],
)


def attended(config, n_outputs):
    """Which outputs each source of a read sums."""
    if config.residual == "standard":
        return [list(range(n_outputs))]
    block_size = 1 if config.residual == "full" else config.block_size
    return oracles.attended_block(n_outputs, block_size)


def rms(x):
    return np.sqrt(np.square(x).mean(-1))


def padded_rows(rows):
    longest = max(map(len, rows))
    return np.array([[*row, *[np.nan] * (longest - len(row))] for row in rows])


def expected_arrays(config, params):
    """The definitions in `diagnose`, in float64."""
    weights = padded().astype(np.float64) / padded().sum(dtype=np.float64)
    points = reference.points(config, params, text(), weights)

    def mean(x):
        return (x * weights).sum((-2, -1))

    shares = [
        mean(oracles.dilution(points.outputs[: i + 1], attended(config, i + 1), alpha))
        for i, alpha in enumerate(points.depth_weights)
    ]
    arrays = {
        "sublayer_norm": np.array([mean(rms(output)) for output in points.outputs[1:]]),
        "read_norm": np.array([mean(rms(hidden)) for hidden in points.hidden]),
        "dilution": padded_rows(shares),
        "gradient_norm_sublayer": mean(rms(points.output_gradients)),
        "gradient_norm_read": mean(rms(points.read_gradients)),
        "logit_lens_loss": points.lens,
    }
    if config.residual == "standard":
        return arrays
    entropy = [
        mean(-(alpha * np.log(alpha)).sum(0)) / np.log(len(alpha)) if len(alpha) > 1 else 0.0
        for alpha in points.depth_weights
    ]
    sums = [sum(points.outputs[j] for j in js) for js in attended(config, len(points.outputs))]
    return arrays | {
        "depth_weights": padded_rows([mean(alpha) for alpha in points.depth_weights]),
        "entropy": np.array(entropy),
        "source_norm": padded_rows([mean(rms(sources)) for sources in points.sources]),
        "block_norm": np.array([mean(rms(total)) for total in sums[1:]]),
    }


def assert_arrays_equal(measured: Diagnostics, expected, rtol):
    assert measured.arrays.keys() == expected.keys()
    for name, array in expected.items():
        got = measured.arrays[name]
        assert got.dtype == np.float32 and got.shape == array.shape, name
        assert len(measured.axes(name)) == array.ndim
        largest = np.nanmax(np.abs(array))
        np.testing.assert_allclose(got, array, rtol=rtol, atol=rtol * largest, err_msg=name)


@each_model
def test_every_array_equals_the_float64_reference(config):
    params = reference.random_params(config, query_scale=2.0)
    measured = measure(config)(params, text(), padded())
    assert_arrays_equal(measured, expected_arrays(config, params), rtol=1e-5)


@each_model
def test_shares_and_weights_of_a_read_sum_to_one(config):
    params = reference.random_params(config, query_scale=2.0)
    measured = measure(config)(params, text(), padded())
    for name in {"dilution", "depth_weights"} & measured.arrays.keys():
        np.testing.assert_allclose(np.nansum(measured.arrays[name], 1), 1, rtol=2e-6)
    if config.residual == "full":  # There a share is a depth weight.
        weights = measured.arrays["depth_weights"]
        np.testing.assert_allclose(measured.arrays["dilution"], weights, rtol=5e-7)


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(programs.STANDARD_MODEL, remat="block"),
        dataclasses.replace(programs.GROUPED, remat="block"),
        dataclasses.replace(programs.SCANNED, remat="full"),
    ],
    ids=["standard, block", "block", "scanned, full"],
)
def test_rematerialised_models_measure_the_same(config):
    params = reference.random_params(config, query_scale=2.0)
    measured = measure(config)(params, text(), padded())
    assert_arrays_equal(measured, expected_arrays(config, params), rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [programs.STANDARD_MODEL, dataclasses.replace(programs.SCANNED, remat="full")],
    ids=["standard", "block"],
)
def test_sharded_over_eight_devices_the_numbers_are_the_same(config):
    params = reference.random_params(config, query_scale=2.0)
    alone = measure(config)(params, text(8), padded(8))
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        shared = measure(config)(
            jax.device_put(params, NamedSharding(mesh, PartitionSpec())),
            jax.device_put(text(8), by_row),
            jax.device_put(padded(8), by_row),
        )
    assert_arrays_equal(shared, alone.arrays, rtol=2e-6)


@each_residual
def test_exported_weights_times_sources_are_what_each_sublayer_received(config, monkeypatch):
    received = []
    for kind in (Attention, FeedForward):

        def recording(module, x, call=kind.__call__):
            output = call(module, x)
            received.append((np.asarray(x), np.asarray(output)))
            return output

        monkeypatch.setattr(kind, "__call__", recording)
    params = reference.random_params(config, query_scale=2.0)
    model = nnx.merge(graphdef_of(config), params)
    exported = diagnose(model, text(), gradients=False, lens=False, per_token=True)
    exported = Diagnostics.from_json(exported.to_json())
    assert exported.axes("depth_weights_per_token") == ("batch", "time", "read", "source")
    weights_btln = exported.arrays["depth_weights_per_token"]
    np.testing.assert_allclose(np.nansum(weights_btln, -1), 1, rtol=1e-6)

    # The sub-layers ran eagerly, one after the other, and reported what went in and what came out.
    outputs = [params["embedding_table"][text()[:, :-1]], *(output for _, output in received)]
    for i, (x, _) in enumerate(received):
        sources = [sum(outputs[j] for j in js) for js in attended(config, i + 1)]
        weights_nbt = np.moveaxis(weights_btln[:, :, i, : len(sources)], -1, 0)
        assert np.isnan(weights_btln[:, :, i, len(sources) :]).all()
        hidden = sum(w[..., None] * s for w, s in zip(weights_nbt, sources, strict=True))
        norm = params[("attention_norm", "feed_forward_norm")[i % 2]]["gain"][i // 2]
        eps = config.norm_eps / (len(sources) ** 2 if config.retrofit else 1)
        normed = oracles.rms_norm(oracles.float64(hidden), oracles.float64(norm), eps)
        assert oracles.relative_error(x, normed) <= 1e-5


@each_residual
def test_logits_log_sum_exp_and_gate_explain_the_weights(config):
    params = reference.random_params(config, query_scale=2.0)
    measured = measure(config, gradients=False, lens=False, per_token=True)(
        params, text(1), padded(1)
    )
    arrays = oracles.float64(list(measured.arrays.values()))
    arrays = dict(zip(measured.arrays, arrays, strict=True))
    weights, logits = arrays["depth_weights_per_token"], arrays["logits_per_token"]
    assert measured.axes("logits_per_token") == ("time", "read", "source")
    for i, read in enumerate(measured.reads):
        n = len(read.sources)
        exponentials = np.exp(logits[:, i, :n] - logits[:, i, :n].max(-1, keepdims=True))
        softmax = exponentials / exponentials.sum(-1, keepdims=True)
        np.testing.assert_allclose(weights[:, i, :n], softmax, atol=2e-6)
        has_partial_sum = read.sources[-1].startswith("partial sum")
        if read.kind == "final":
            assert np.isnan(arrays["lse_per_token"][:, i]).all()
        else:
            finished = logits[:, i, : n - has_partial_sum]
            lse = np.log(np.exp(finished).sum(-1))
            np.testing.assert_allclose(arrays["lse_per_token"][:, i], lse, atol=5e-6)
        gate = weights[:, i, n - 1] if has_partial_sum else np.nan
        np.testing.assert_allclose(arrays["gate_per_token"][:, i], gate + np.zeros(len(weights)))


def test_zero_queries_have_entropy_one_and_extreme_ones_zero():
    params = with_zero_queries(reference.random_params(programs.GROUPED))
    entropy = measure(programs.GROUPED)(params, text(), padded()).arrays["entropy"]
    np.testing.assert_allclose(entropy, [0, 1, 1, 1, 1, 1, 1], rtol=1e-6)
    params["reads"]["query"] = 1e4 * np.ones_like(params["reads"]["query"])
    measured = measure(programs.GROUPED)(params, text(), padded())
    np.testing.assert_allclose(measured.arrays["entropy"], [0, 0, 0, 0, 0, 0, 1], atol=1e-6)
    assert all(np.isfinite(measured.arrays[name]).all() for name in ("entropy", "read_norm"))


def test_a_sum_that_is_zero_is_shared_evenly():
    params = reference.random_params(programs.SHORT)
    for kind, name in (("attention", "output_kernel"), ("feed_forward", "down_kernel")):
        params[kind] |= {name: np.zeros_like(params[kind][name])}
    shares = measure(programs.SHORT)(params, text(), padded()).arrays["dilution"]
    assert np.isfinite(shares[-1]).all()
    np.testing.assert_allclose(shares[-1].sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(shares[-1, 1:5], shares[-1, 1], rtol=1e-6)


@pytest.mark.parametrize(
    "tokens, weights, message",
    [
        (text()[:, :1], None, r"tokens_bt: expected \[b, t \+ 1\].*got \[2, 1\]"),
        (text()[0], None, r"tokens_bt: .*got \[6\]"),
        (text(), padded()[:, 1:], r"weights_bt: expected \[2, 5\].*got \[2, 4\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tokens, weights, message):
    model = nnx.eval_shape(lambda: TransformerLM(tiny(), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        diagnose(model, tokens, weights_bt=weights)
