"""Every config file gives a run, and says in its docstring how to start it."""

import ast
import pathlib

import pytest

from train.cli import load_config

CONFIGS = sorted(
    path
    for path in (pathlib.Path(__file__).parent.parent / "configs").glob("*.py")
    if path.stem not in ("__init__", "dense_7b", "scaling")
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_gives_a_run_of_its_own(path):
    config = load_config(path)
    assert config.workdir == f"runs/{path.stem}"
    command = f"python -m train --config=configs/{path.name}"
    assert command in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")


@pytest.mark.parametrize(
    ("name", "layers", "width", "rate", "batch_size", "billion_tokens"),
    [
        ("194m", 12, 896, 2.99e-3, 192, 38.7),
        ("241m", 13, 960, 2.80e-3, 256, 45.4),
        ("296m", 14, 1024, 2.50e-3, 320, 62.1),
        ("436m", 16, 1168, 2.20e-3, 384, 87.9),
        ("528m", 17, 1264, 2.02e-3, 432, 119.0),
    ],
)
def test_scaling_runs_are_the_rows_of_the_table(
    name, layers, width, rate, batch_size, billion_tokens
):
    (path,) = [path for path in CONFIGS if path.stem == f"scaling_{name}"]
    config = load_config(path)
    assert (config.model.num_layers, config.model.width) == (layers, width)
    assert config.model.num_heads == layers
    assert config.optimizer.learning_rate == rate
    assert (config.batch_size, config.context) == (batch_size, 8192)
    tokens = config.steps * config.batch_size * config.context
    assert tokens == pytest.approx(billion_tokens * 1e9, rel=1e-3)
