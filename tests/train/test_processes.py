"""Runs of two processes on this machine, with four devices each: gloo takes the place of a network.

Both are compared with the same run of one process on one device, by what they recorded and by where
they end once they are resumed in one process.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.train.test_mesh import assert_same_run, config_of, leave_one_device
from tests.train.tiny_run import StandIn
from train.checkpoint import Checkpoints
from train.distributed import DistributedConfig
from train.loop import prepare, train
from train.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = pathlib.Path(__file__).parents[2]
# Two streams of text: with data over the processes, each reads one of them.
RUN = {
    "steps": 12,
    "evaluate_every": 12,
    "data__shards": 2,
    "optimizer__name": "adamw",
    "model__num_layers": 2,
}
CONFIG = """
import os, pathlib, signal, time
from attnres_jax.parallel import MeshConfig, PipelineConfig
from tests.train.test_mesh import config_of
from tests.train.tiny_run import StandIn
from train import setup
from train.metrics import MetricsWriter
import jax

def get_config():
    return config_of(pathlib.Path({folder!r}), {name!r}, **{run!r}, {mesh})

write = MetricsWriter.write

def write_and_signal(self, step, values):
    write(self, step, values)
    if step == 5 and jax.process_index() == 1:
        os.kill(os.getpid(), signal.{number})
    if step > 5:
        time.sleep(0.3)  # JAX looks for a notice once a second.

MetricsWriter.write = write_and_signal
if {stand_in}:
    setup.TransformerLM = lambda config, rngs: StandIn(vocab_size=config.vocab_size)
"""


def launch(folder, name, number, mesh, stand_in=False):
    """Starts both processes; the second gives itself a signal at step 5."""
    path = folder / f"{name}.py"
    values = {"folder": str(folder), "name": name, "run": RUN, "stand_in": stand_in}
    path.write_text(CONFIG.format(**values, mesh=mesh, number=number.name))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "train", f"--config={path}"),
                f"--distributed.coordinator-address=127.0.0.1:{port}",
                *("--distributed.num-processes=2", f"--distributed.process-id={index}"),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]


def finish(processes, timeout=100):
    """Exit codes and outputs."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def losses(config):
    return {line["step"]: line["loss"] for line in read_metrics(config.workdir) if "loss" in line}


@pytest.fixture
def compiled_once(tmp_path):
    """Runs of this process on one device find the programs of those before."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def check_resumed(config, single):
    """What was recorded before the end and after going on here is that of the run on one device."""
    before, expected = losses(config), losses(single)
    assert max(before) < 12
    assert before == pytest.approx({step: expected[step] for step in before}, rel=1e-5)
    assert train(prepare(config), "x") == 0
    assert_same_run(single, config)


def test_a_pipeline_over_two_processes_is_killed_and_goes_on_in_one(
    tmp_path, monkeypatch, compiled_once
):
    processes = launch(
        tmp_path,
        "killed",
        signal.SIGKILL,
        "mesh=MeshConfig(stage=2, data=4), pipeline=PipelineConfig(virtual_stages=2)",
    )
    leave_one_device(monkeypatch)
    single = config_of(tmp_path, "single", **RUN)
    assert train(prepare(single), "x") == 0
    processes[1].wait(timeout=200)
    processes[0].kill()
    codes, outputs = finish(processes)
    assert codes == [-signal.SIGKILL] * 2, outputs
    assert "(stage=2, data=4, 2 processes)" in outputs[0]
    assert "step" not in outputs[1]
    check_resumed(config_of(tmp_path, "killed", **RUN), single)


def test_a_preemption_notice_for_one_process_saves_and_ends_both(tmp_path, monkeypatch):
    """Replicas on both processes, around a model that compiles at once."""
    processes = launch(tmp_path, "preempted", signal.SIGTERM, "mesh=MeshConfig(data=8)", True)
    leave_one_device(monkeypatch)
    monkeypatch.setattr(
        "train.setup.TransformerLM", lambda config, rngs: StandIn(vocab_size=config.vocab_size)
    )
    single = config_of(tmp_path, "single", **RUN)
    assert train(prepare(single), "x") == 0
    codes, outputs = finish(processes)
    assert codes == [128 + signal.SIGTERM] * 2, outputs
    config = config_of(tmp_path, "preempted", **RUN)
    (saved, *_) = Checkpoints(config.workdir, read_only=True).steps()
    assert saved == max(losses(config)) > 5
    check_resumed(config, single)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_processes": 2}, "go together, got None, 2, None"),
        (
            {"coordinator_address": "here", "num_processes": 2, "process_id": 0},
            "expected host:port, such as",
        ),
        (
            {"coordinator_address": "here:1", "num_processes": 2, "process_id": 2},
            "process_id: expected 0 to 1",
        ),
    ],
)
def test_processes_that_cannot_join_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DistributedConfig(**settings)
