"""Runs what the README shows."""

import pathlib
import re
import runpy
import shlex

import jax
import pytest
from flax import nnx

from train.cli import parse

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BUILD = (ROOT / "BUILD.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What each python block defines, in order."""
    folder = tmp_path_factory.mktemp("readme")
    results = []
    for number, block in enumerate(BLOCKS):
        path = folder / f"block_{number}.py"
        path.write_text(block, encoding="utf-8")
        results.append(runpy.run_path(str(path)))
    return results


def test_there_are_three_ways_in_and_diagnostics_of_at_most_15_lines_each():
    assert len(BLOCKS) == 4
    assert all(len(block.splitlines()) <= 15 for block in BLOCKS)


def test_stack_and_functions_return_what_the_head_reads(shown):
    assert shown[0]["hidden"].shape == (2, 16, 64)
    embedding, block, hidden = (shown[2][name] for name in ("embedding", "block", "hidden"))
    # Zero queries: the last read is the mean of the two sources.
    assert jax.numpy.allclose(hidden, (embedding + block) / 2, atol=1e-6)


def test_diagnostics_are_of_every_read_and_output(shown):
    measured = shown[3]["measured"]
    assert measured.axes("dilution") == ("read", "output")
    assert measured.arrays["dilution"].shape == (5, 5)


def test_custom_forward_equals_the_stack(shown):
    stack = shown[0]["stack"]
    model = shown[1]["MyModel"](stack.sublayers, 64)
    embedding = jax.random.normal(jax.random.key(1), (2, 16, 64))
    keys = iter(jax.random.split(jax.random.key(2), 13))
    for i, read in enumerate(model.reads):
        query = jax.random.normal(next(keys), (64,))
        read.query[...] = query
        if i < 12:
            stack.reads.query[...] = stack.reads.query[...].at[i].set(query)
        else:
            stack.final_read.query[...] = query
    run = jax.jit(lambda module, x: module(x))
    assert jax.numpy.allclose(run(model, embedding), run(stack, embedding), atol=1e-5)
    assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) > 13


COMMANDS = re.findall(r"python -m (train(?:\.\w+)?|benchmarks\.\w+) ?([^\n`#]*)", README + BUILD)


@pytest.mark.parametrize("module", sorted({module for module, _ in COMMANDS}))
def test_modules_that_are_named_exist(module):
    path = ROOT / module.replace(".", "/")
    assert (path / "__main__.py").exists() or path.with_suffix(".py").exists()


TRAINING = sorted({a.strip() for m, a in COMMANDS if m == "train"} - {"--help", "…"})


@pytest.mark.parametrize("arguments", TRAINING)
def test_training_commands_are_accepted(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert parse(shlex.split(arguments)).run.steps > 0
