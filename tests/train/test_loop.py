import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from tests.train.tiny_run import StandIn, one_device, tiny_config
from train import loop, setup
from train.checkpoint import Checkpoints, MismatchError
from train.loop import NonFiniteError, prepare, train
from train.metrics import MetricsWriter, read_metrics
from train.revision import checkout
from train.signals import StopSignals

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def stand_in(monkeypatch):
    """The loop on one device around a model that compiles at once."""
    monkeypatch.setattr(setup, "TransformerLM", lambda config, rngs: StandIn(vocab_size=257))
    monkeypatch.setattr("train.placement.make_mesh", lambda config, devices: one_device())


def files(folder):
    return {path: path.stat().st_mtime_ns for path in pathlib.Path(folder).rglob("*")}


def saved_steps(config):
    return Checkpoints(config.workdir, read_only=True).steps()


class Poisoned:
    """Batches of which some have a target outside the vocabulary, whose loss is NaN."""

    def __init__(self, batches, bad):
        self._batches, self._bad, self._number = batches, bad, 0

    def __next__(self):
        batch = next(self._batches)
        self._number += 1
        if self._number in self._bad:
            batch["tokens"][0, -1] = 257
        return batch

    def __getattr__(self, name):
        return getattr(self._batches, name)


@pytest.fixture
def poisoned(monkeypatch, stand_in):
    def poison(*steps):
        original = loop.train_batches
        monkeypatch.setattr(
            loop, "train_batches", lambda *a, **k: Poisoned(original(*a, **k), steps)
        )

    return poison


def test_trains_evaluates_and_saves(tmp_path, capsys, stand_in):
    config = tiny_config(tmp_path, optimizer__learning_rate=0.03)
    assert train(prepare(config), "python -m train --config=x.py") == 0
    lines = read_metrics(config.workdir)
    steps = {line["step"]: line for line in lines if "loss" in line}
    assert list(steps) == list(range(1, 13))
    assert steps[12]["loss"] < steps[1]["loss"]
    assert steps[12]["tokens"] == 12 * 8 * 16
    assert steps[1]["tokens_per_second"] is None and steps[12]["tokens_per_second"] > 0
    evaluations = [line for line in lines if "validation/loss" in line]
    assert [line["step"] for line in evaluations] == [6, 12]
    assert evaluations[1]["validation/bits_per_byte"] < evaluations[0]["validation/bits_per_byte"]
    assert {"depth/entropy/read_01", "depth/query_norm/read_01", "depth/hidden_norm/01"} <= set(
        evaluations[1]
    )
    assert lines[0]["data/train_documents"] > 0
    assert saved_steps(config) == [12, 8]
    stored = json.loads(pathlib.Path(config.workdir, "config.json").read_text())
    assert stored["settings"]["context"] == 16
    assert stored["commit"] == checkout()
    closing = capsys.readouterr().out
    assert "python -m train.sample --workdir=" in closing
    assert "python -m train --config=x.py --steps=MORE" in closing


def test_resume_at_the_last_step_does_nothing(tmp_path, capsys, stand_in):
    config = tiny_config(tmp_path)
    train(prepare(config), "x")
    before = files(config.workdir)
    assert train(prepare(config), "x") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert files(config.workdir) == before


def test_halts_naming_the_step_and_saves_nothing_of_it(tmp_path, poisoned):
    poisoned(8)
    config = tiny_config(tmp_path)
    with pytest.raises(NonFiniteError, match="step 8: loss nan"):
        train(prepare(config), "x")
    assert saved_steps(config) == [4]


def test_skips_counts_and_goes_on(tmp_path, poisoned):
    poisoned(5, 6, 9)
    config = tiny_config(tmp_path, non_finite="skip")
    assert train(prepare(config), "x") == 0
    lines = {line["step"]: line for line in read_metrics(config.workdir) if "loss" in line}
    assert lines[6]["loss"] is None
    assert [lines[step]["skipped_steps"] for step in (4, 5, 6, 9, 12)] == [0, 1, 2, 3, 3]
    assert np.isfinite(lines[12]["loss"])


def test_stops_after_too_many_skipped_in_a_row(tmp_path, poisoned):
    poisoned(3, 5, 6, 7, 8)
    config = tiny_config(tmp_path, non_finite="skip", max_skipped_steps=3)
    with pytest.raises(NonFiniteError, match=r"step 7: .*max_skipped_steps=3"):
        train(prepare(config), "x")


def test_another_model_is_refused_and_nothing_is_touched(tmp_path, stand_in):
    train(prepare(tiny_config(tmp_path)), "x")
    before = files(tmp_path / "run")
    with pytest.raises(MismatchError, match=r"model\.block_size: 1 there, 2 now"):
        prepare(tiny_config(tmp_path, model__block_size=2))
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 4},
            r"4 sequences cannot be shared evenly by mesh\.data=8; .*that can: 8",
        ),
        ({"context": 100_000}, "context=100000 is longer than the data"),
        ({"model__vocab_size": 200}, "vocab_size=200 is smaller than the tokenizer's 257"),
        ({"data__paths": ("nowhere/*.txt",)}, "nowhere"),
    ],
)
def test_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(tiny_config(tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_signals_become_a_flag_and_a_second_interrupt_is_deadly():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        assert stop.number is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_the_running_step_and_resuming_loses_nothing(
    tmp_path, monkeypatch, stand_in, number, code
):
    config = tiny_config(tmp_path)
    write = MetricsWriter.write

    def signalling(self, step, values):
        write(self, step, values)
        if step == 7:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(MetricsWriter, "write", signalling)
    assert train(prepare(config), "x") == code
    # Step 8 was dispatched when the record of step 7 was written.
    assert saved_steps(config)[0] == 8
    assert max(line["step"] for line in read_metrics(config.workdir)) == 8
    monkeypatch.setattr(MetricsWriter, "write", write)
    assert train(prepare(config), "x") == 0
    steps = [line["step"] for line in read_metrics(config.workdir) if "loss" in line]
    assert steps == list(range(1, 13))


def test_signal_between_two_steps_is_not_lost(tmp_path, monkeypatch, stand_in):
    config = tiny_config(tmp_path)
    stopping, calls = loop.stopping_everywhere, iter(range(100))

    def late(stop, step):
        answer = stopping(stop, step)
        if next(calls) == 4:  # Just after the loop has looked.
            stop.number = signal.SIGTERM
        return answer

    monkeypatch.setattr(loop, "stopping_everywhere", late)
    assert train(prepare(config), "x") == 143
    assert saved_steps(config)[0] == max(line["step"] for line in read_metrics(config.workdir))


def test_evaluation_that_was_cut_short_is_made_on_resuming(tmp_path, monkeypatch, stand_in):
    config = tiny_config(tmp_path)
    evaluate = loop._evaluate

    def interrupted(run, params, stop):
        stop.number = signal.SIGTERM
        return evaluate(run, params, stop)

    monkeypatch.setattr(loop, "_evaluate", interrupted)
    assert train(prepare(config), "x") == 143
    assert saved_steps(config)[0] == 6
    monkeypatch.setattr(loop, "_evaluate", evaluate)
    assert train(prepare(config), "x") == 0
    evaluated = [line["step"] for line in read_metrics(config.workdir) if "validation/loss" in line]
    assert evaluated == [6, 12]


# --------------------------------------------------------------------------- whole processes

CONFIG = """
import os, pathlib, signal
from tests.train.tiny_run import tiny_config
from train.metrics import MetricsWriter

def get_config():
    return tiny_config(
        pathlib.Path({folder!r}),
        workdir={workdir!r},
        steps=60,
        evaluate_every=20,
        checkpoint_every=15,
    )

write = MetricsWriter.write

def write_and_die(self, step, values):
    write(self, step, values)
    if step == {kill_at}:
        os.kill(os.getpid(), signal.SIGKILL)

MetricsWriter.write = write_and_die
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Compiles fast, and once for all processes."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }


def launch(folder, workdir, environment, kill_at=None):
    config = folder / "config.py"
    config.write_text(
        CONFIG.format(folder=str(folder), workdir=str(folder / workdir), kill_at=kill_at)
    )
    return subprocess.run(
        [sys.executable, "-m", "train", f"--config={config}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path, environment):
    straight = launch(tmp_path, "straight", environment)
    assert straight.returncode == 0, straight.stderr

    killed = launch(tmp_path, "broken", environment, kill_at=37)
    assert killed.returncode == -signal.SIGKILL
    resumed = launch(tmp_path, "broken", environment)
    assert resumed.returncode == 0, resumed.stderr
    assert "after step 30" in resumed.stdout or "after step 15" in resumed.stdout

    template = setup.abstract_setup(tiny_config(tmp_path)).stored
    states, positions, records = [], [], []
    for workdir in (tmp_path / "straight", tmp_path / "broken"):
        states.append(Checkpoints(workdir, read_only=True).restore(template, None))
        position = workdir / "checkpoints" / "60" / "batches" / "metadata"
        positions.append(json.loads(position.read_text()))
        records.append(
            [
                {name: value for name, value in line.items() if name != "tokens_per_second"}
                for line in read_metrics(workdir)
            ]
        )
    assert int(states[0].step) == 60
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert positions[0] == positions[1]
    # Equal losses at every step are equal batches, and no step is there twice.
    trained = [[line for line in record if "loss" in line] for record in records]
    assert [line["step"] for line in trained[1]] == list(range(1, 61))
    assert trained[0] == trained[1]
