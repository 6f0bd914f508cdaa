import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from flax import nnx

from attnres_jax import ModelConfig, TransformerLM
from train.config import OptimizerConfig
from train.optimizer import make_optimizer, make_schedule, parameter_groups, parameter_table


@pytest.fixture(scope="module")
def params():
    """Random values in the shapes of a real model with an untied head."""
    config = ModelConfig(
        vocab_size=9,
        width=8,
        num_layers=3,
        num_heads=2,
        feed_forward_width=12,
        block_size=2,
        tie_embeddings=False,
    )
    model = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    shapes = nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)


def update(params, gradients, config, steps=100):
    optimizer, _ = make_optimizer(config, steps)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    return updates


def flat(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def test_every_leaf_of_the_model_is_in_the_right_group(params):
    groups = parameter_groups(params)
    assert set(jax.tree.leaves(groups["attention"])) == {"matrix"}
    assert set(jax.tree.leaves(groups["feed_forward"])) == {"matrix"}
    assert groups["embedding_table"] == "embedding"
    assert groups["head_kernel"] == "head"
    # Stacked over layers these look like matrices.
    assert params["reads"]["query"].ndim == params["attention_norm"]["gain"].ndim == 2
    for name in ("reads", "final_read", "final_norm", "attention_norm", "feed_forward_norm"):
        assert set(jax.tree.leaves(groups[name])) == {"vector"}


def test_unknown_leaf_is_refused_by_name():
    with pytest.raises(ValueError, match=r"router\.bias has no optimizer group"):
        parameter_groups({"router": {"bias": jnp.zeros(3)}})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_zero_gradient_decays_matrices_and_head_only(params, name):
    config = OptimizerConfig(name=name, learning_rate=0.5, warmup_steps=0, weight_decay=0.1)
    updates = update(params, jax.tree.map(jnp.zeros_like, params), config)
    groups, values = flat(parameter_groups(params)), flat(params)
    for path, change in flat(updates).items():
        if groups[path] in ("matrix", "head"):
            np.testing.assert_allclose(change, -0.5 * 0.1 * values[path], rtol=1e-6)
        else:
            assert np.all(np.asarray(change) == 0), path


def test_muon_orthogonalises_each_layer_and_nothing_else(params):
    config = OptimizerConfig(
        name="muon", learning_rate=1.0, warmup_steps=0, weight_decay=0.0, clip_norm=0.0
    )
    updates = update(params, params, config)
    alone = optax.contrib.muon(1.0, consistent_rms=0.2)
    expected = jax.jit(lambda matrix: alone.update(matrix, alone.init(matrix), matrix)[0])

    def as_matrix(name, kernel):
        return kernel.reshape(-1, 8) if name == "output_kernel" else kernel.reshape(len(kernel), -1)

    for owner in ("attention", "feed_forward"):
        for name, kernel in params[owner].items():
            for layer in range(3):
                matrix = as_matrix(name, kernel[layer])
                actual = as_matrix(name, updates[owner][name][layer])
                np.testing.assert_allclose(actual, expected(matrix), rtol=2e-4, atol=2e-5)
    # The first update of Adam is the sign of the gradient, of whatever shape.
    for name in ("reads", "final_read", "final_norm", "attention_norm", "head_kernel"):
        for change, gradient in zip(
            jax.tree.leaves(updates[name]), jax.tree.leaves(params[name]), strict=True
        ):
            np.testing.assert_allclose(change, -np.sign(gradient), rtol=1e-4)


def test_adamw_is_its_equations():
    config = OptimizerConfig(
        learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.2, clip_norm=1.0
    )
    optimizer, _ = make_optimizer(config, 10)
    w = {"up_kernel": jnp.array([[[1.0, -2.0]]])}
    state = optimizer.init(w)
    mean = square = 0.0
    expected = np.array([1.0, -2.0])
    for step, gradient in enumerate(([3.0, 4.0], [0.3, -0.4]), start=1):
        updates, state = optimizer.update({"up_kernel": jnp.array([[gradient]])}, state, w)
        w = optax.apply_updates(w, updates)
        gradient = np.array(gradient) / max(1.0, np.linalg.norm(gradient))
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        direction = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.95**step)) + 1e-8)
        expected = expected - 0.1 * (direction + 0.2 * expected)
        np.testing.assert_allclose(w["up_kernel"][0, 0], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {0: 0.2, 3: 0.8, 4: 1.0, 50: 1.0, 99: 1.0}),
        ("cosine", {0: 0.2, 4: 1.0, 99: 0.1, 120: 0.1}),
        ("wsd", {0: 0.2, 4: 1.0, 79: 1.0, 89: 0.55, 99: 0.1, 120: 0.1}),
    ],
)
def test_schedules_warm_up_peak_and_end(schedule, expected):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=4)
    rate = make_schedule(config, 100)
    for step, value in expected.items():
        np.testing.assert_allclose(rate(step), value, rtol=1e-5, err_msg=str(step))


def test_cosine_is_half_way_in_the_middle():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, final_fraction=0.0)
    np.testing.assert_allclose(make_schedule(config, 101)(50), 0.5, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (4, 5), (8, 10)])
def test_shortest_runs_have_a_positive_finite_rate(schedule, warmup, steps):
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup)
    rates = [float(make_schedule(config, steps)(step)) for step in range(steps + 1)]
    assert all(0 < rate <= 1e-3 * (1 + 1e-6) for rate in rates)


def test_table_shows_every_leaf(params):
    console = rich.console.Console(width=100)
    with console.capture() as captured:
        console.print(parameter_table(params, OptimizerConfig(name="muon")))
    rows = {line.split("│")[1].strip(): line for line in captured.get().splitlines() if "│" in line}
    assert len(rows) == len(jax.tree.leaves(params))
    assert all(word in rows["attention.query_kernel"] for word in ("(3, 8, 2, 4)", "muon", "0.1"))
    assert all(word in rows["reads.query"] for word in ("(6, 8)", "vector", "adamw", " 0 "))
