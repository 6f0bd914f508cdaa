"""From a run that was really trained to the numbers on its page."""

import base64

import jax
import numpy as np
import pytest
from flax import nnx

from tests.train.report.test_page import made_of
from tests.train.tiny_run import one_device, tiny_config
from train.config import DiagnosticsConfig
from train.loop import prepare, train
from train.report import cli
from train.setup import load_run

TEXT = "depth of\nblock"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, quick_compilation):
    patch = pytest.MonkeyPatch()
    patch.setattr("train.placement.make_mesh", lambda config, devices: one_device())
    config = tiny_config(
        tmp_path_factory.mktemp("trained"),
        model__residual="block",
        model__block_size=2,
        steps=3,
        optimizer__learning_rate=0.3,
        diagnostics=DiagnosticsConfig(every=3),
    )
    assert train(prepare(config), "x") == 0
    yield config.workdir
    patch.undo()


def test_the_page_shows_what_the_newest_checkpoint_reads(workdir, tmp_path, capsys):
    output = tmp_path / "report.html"
    assert cli.main([workdir, f"--text={TEXT}", "-o", str(output)]) == 0
    assert "not in the report" not in capsys.readouterr().err
    (run,) = made_of(output.read_text(encoding="utf-8"))["runs"]
    assert run["problems"] == {} and run["step"] == 3

    text = run["text"]
    assert text["tokens"] == ["⏹", *TEXT[:-1]]  # The last is only predicted.
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    _, graphdef, params = load_run(workdir)
    tokens = np.concatenate([[256], ids])[: len(text["tokens"])]
    _, captured = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens, capture=True))(
        params, tokens[None]
    )
    # The queries moved, so that weights are not all alike.
    assert np.std(captured["depth_weights"][1]) > 1e-3
    for token in range(len(tokens)):
        expected = np.concatenate([alpha[:, 0, token] for alpha in captured["depth_weights"]])
        np.testing.assert_allclose(unpacked(text["weights"][token]), expected, atol=1e-6)


def unpacked(text):
    return np.frombuffer(base64.b64decode(text), "<f4")
