import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests.train.tiny_run import MODEL, tiny_config
from train import cli
from train.loop import prepare, train
from train.setup import abstract_setup, first_state, load_run


@pytest.fixture(scope="module")
def standard_run(tmp_path_factory):
    """A trained model with standard residuals and an eps that matters."""
    folder = tmp_path_factory.mktemp("standard")
    config = tiny_config(
        folder, model__residual="standard", model__num_layers=2, model__norm_eps=1e-3, steps=4
    )
    assert train(prepare(config), "x") == 0
    return config


def retrofitted(standard_run, **changes):
    model = dataclasses.replace(standard_run.model, residual="block", retrofit=True, block_size=3)
    workdir = standard_run.workdir + "_retrofitted"
    return dataclasses.replace(
        standard_run,
        model=dataclasses.replace(model, **changes),
        retrofit_from=standard_run.workdir,
        workdir=workdir,
    )


def test_retrofit_starts_with_the_logits_of_the_old_run_and_lists_what_is_new(standard_run):
    config = retrofitted(standard_run)
    setup = abstract_setup(config)
    state, added = first_state(config, setup)
    tokens_bt = np.random.default_rng(0).integers(0, 257, (2, 16), dtype=np.int32)
    _, old_graphdef, old_params = load_run(standard_run.workdir)
    run = jax.jit(lambda graphdef, params: nnx.merge(graphdef, params)(tokens_bt), static_argnums=0)
    old = run(old_graphdef, old_params)
    np.testing.assert_allclose(run(setup.graphdef, state.params), old, rtol=1e-5, atol=1e-5)
    assert set(added) == {"reads.query", "reads.gain", "final_read.query", "final_read.gain"}
    # The state is what a checkpoint of this run is restored into.
    assert jax.tree.structure(state) == jax.tree.structure(setup.stored)


def test_retrofitted_run_trains_resumes_and_says_what_is_new(standard_run, capsys, monkeypatch):
    config = retrofitted(standard_run, residual="full")
    assert train(prepare(config), "x") == 0
    assert "new: final_read.gain" in capsys.readouterr().out
    # What is trained already needs the old run no more.
    monkeypatch.setattr("train.loop.check_retrofit", None)
    monkeypatch.setattr("train.loop.first_state", None)
    assert train(prepare(dataclasses.replace(config, steps=6)), "x") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retrofit": False}, "--model.retrofit"),
        ({"width": 32}, "model.width is 16 there and 32 here"),
        ({"norm_eps": 1e-6}, r"model.norm_eps is 0.001 there"),
    ],
)
def test_retrofit_that_does_not_fit_is_refused(standard_run, tmp_path, changes, message):
    config = dataclasses.replace(retrofitted(standard_run, **changes), workdir=str(tmp_path / "x"))
    with pytest.raises(ValueError, match=message):
        prepare(config)


def test_retrofit_of_a_folder_without_a_run_is_refused(standard_run, tmp_path):
    config = dataclasses.replace(
        retrofitted(standard_run), retrofit_from=str(tmp_path), workdir=str(tmp_path / "x")
    )
    with pytest.raises(ValueError, match="holds no checkpoint"):
        prepare(config)


def test_settings_that_tyro_refuses_are_one_line_with_the_nearest_name(tmp_path, capsys):
    path = tmp_path / "config.py"
    path.write_text(
        "from tests.train.tiny_run import tiny_config\n"
        "import pathlib\n"
        f"def get_config():\n    return tiny_config(pathlib.Path({str(tmp_path)!r}))\n"
    )
    assert MODEL.block_size == 1
    assert cli.main([f"--config={path}", "--model.blok-size=4"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ") and "--model.block-size" in lines[0]
    assert cli.main([f"--config={path}", "--steps=many"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--steps" in line and "many" in line
