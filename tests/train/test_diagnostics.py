"""diagnostics.jsonl of a run, what it costs, and `python -m train.diagnose`."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from attnres_jax import Diagnostics, diagnose, read_diagnostics
from configs import quickstart
from tests.train.tiny_run import StandIn, one_device, tiny_config
from train import diagnose as command
from train import setup
from train.checkpoint import Checkpoints
from train.config import DiagnosticsConfig
from train.data import load_documents, validation_batches
from train.diagnostics import DiagnosticsWriter, first_sequences
from train.loop import prepare, train
from train.step import make_train_step
from train.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 8 steps, stopped after 4 and continued; its config, and the steps on disk then."""
    folder = tmp_path_factory.mktemp("diagnosed")
    config = tiny_config(
        folder, steps=8, evaluate_every=8, diagnostics=DiagnosticsConfig(every=3, sequences=2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.placement.make_mesh", lambda config, devices: one_device())
        first = dataclasses.replace(config, steps=4, optimizer=config.optimizer)
        assert train(prepare(first), "") == 0
        path = pathlib.Path(config.workdir) / "diagnostics.jsonl"
        before = [record.step for record in read_diagnostics(path)]
        # As if the first process had gone on without a checkpoint, and been killed while writing.
        line = path.read_text(encoding="utf-8").splitlines()[-1]
        with path.open("a", encoding="utf-8") as file:
            file.write(line.replace('"step": 4', '"step": 6') + "\n" + line[:30])
        assert train(prepare(config), "") == 0
    return config, before


def test_first_last_and_every_third_step_are_measured_once(run):
    config, before = run
    assert before == [0, 3, 4]
    assert [record.step for record in read_diagnostics(config.workdir)] == [0, 3, 4, 6, 8]


def test_measured_is_the_state_after_the_step_on_held_out_text(run):
    config, _ = run
    _, graphdef, params = setup.load_run(config.workdir)
    assert Checkpoints(config.workdir, read_only=True).steps()[0] == 8
    tokenizer = ByteTokenizer()
    batch = validation_batches(
        load_documents(config.data, tokenizer), tokenizer, batch_size=8, context=16, max_tokens=500
    ).batches[0]
    expected = jax.jit(lambda params, tokens: diagnose(nnx.merge(graphdef, params), tokens))(
        jax.device_get(params), batch["tokens"][:2]
    )
    measured = read_diagnostics(config.workdir)[-1]
    assert measured.residual == "block" and measured.num_sublayers == 2
    assert measured.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_allclose(measured.arrays[name], array, rtol=1e-4, err_msg=name)


def test_without_the_setting_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("train.placement.make_mesh", lambda config, devices: one_device())
    monkeypatch.setattr(setup, "TransformerLM", lambda config, rngs: StandIn(vocab_size=257))
    config = tiny_config(tmp_path, steps=2)
    assert train(prepare(config), "") == 0
    assert not (tmp_path / "run" / "diagnostics.jsonl").exists()


def test_lines_after_the_step_are_dropped_also_where_nothing_is_measured_any_more(tmp_path):
    record = Diagnostics({"entropy": np.zeros(3, np.float32)}, "block", 2, 2)
    writer = DiagnosticsWriter(tmp_path, 0)
    for step in (0, 4, 8):
        writer.write(step, record)
        with (tmp_path / "diagnostics.jsonl").open("a") as file:
            file.write('[]\n{"broken\n')
    DiagnosticsWriter(tmp_path, 4)
    assert [record.step for record in read_diagnostics(tmp_path)] == [0, 4]


@pytest.mark.parametrize("least, multiple, rows", [(4, 1, 4), (3, 8, 8), (9, 4, 12), (99, 8, 16)])
def test_sequences_are_rounded_up_to_the_devices_and_at_most_a_batch(least, multiple, rows):
    batch = {"tokens": np.zeros((16, 5)), "weights": np.zeros((16, 4))}
    assert [len(x) for x in first_sequences(batch, least, multiple).values()] == [rows, rows]


def matrix_flops(jaxpr) -> int:
    """Of all matrix products, counting a loop's body as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            inner = np.prod([left[axis] for axis in contracted], dtype=int)
            total += 2 * inner * equation.outvars[0].aval.size
        for inner in jaxprs_in_params(equation.params):
            total += equation.params.get("length", 1) * matrix_flops(inner)
    return int(total)


@pytest.mark.parametrize("residual", ["block", "full"])
def test_every_50_steps_they_add_less_than_five_percent_of_the_arithmetic(residual):
    config = quickstart.get_config()
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, residual=residual, block_size=4)
    )
    made = setup.abstract_setup(config)
    params, b, t = made.template.params, config.batch_size, config.context
    step = make_train_step(made.graphdef, made.optimizer, made.schedule, one_device())
    batch = {"tokens": jax.ShapeDtypeStruct((b, t + 1), np.int32)}
    sequences = jax.ShapeDtypeStruct((config.diagnostics.sequences, t + 1), np.int32)
    of_step = matrix_flops(jax.make_jaxpr(step)(made.template, batch).jaxpr)
    of_diagnostics = matrix_flops(
        jax.make_jaxpr(lambda p, tokens: diagnose(nnx.merge(made.graphdef, p), tokens))(
            params, sequences
        ).jaxpr
    )
    layers = 2 * config.model.num_layers * b * t * config.model.width
    assert of_step > 3 * layers * (4 * config.model.width + 3 * config.model.feed_forward_width)
    assert 0 < of_diagnostics / 50 < 0.05 * of_step


@pytest.mark.parametrize("name", ["x.json", "x.csv"])
def test_the_command_measures_a_text_token_by_token(run, tmp_path, name, capsys):
    config, _ = run
    path = tmp_path / name
    arguments = [f"--workdir={config.workdir}", f"--output={path}", "--text=block depth"]
    assert command.main(arguments) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    content = path.read_text(encoding="utf-8")
    reader = Diagnostics.from_json if name == "x.json" else Diagnostics.from_csv
    measured = reader(content)
    assert measured.step == 8
    assert measured.arrays["depth_weights_per_token"].shape == (11, 3, 3)
    if name == "x.json":
        assert measured.tokens == ("⏹", *"block dept")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"--text": "x" * 17}, "17 tokens are more than the run's context of 16"),
        ({"--output": "x.txt"}, "must end in .json or .csv"),
        ({"--workdir": "nowhere"}, "nowhere holds no checkpoint"),
    ],
)
def test_the_command_refuses_in_one_line(run, tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.chdir(tmp_path)
    options = {"--workdir": run[0].workdir, "--output": "x.json"} | change
    assert command.main([f"{name}={value}" for name, value in options.items()]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
