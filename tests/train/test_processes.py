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

import pytest

from tests.train.test_mesh import assert_same_run, config_of, leave_one_device
from train.checkpoint import Checkpoints
from train.distributed import DistributedConfig
from train.loop import prepare, train
from train.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = pathlib.Path(__file__).parents[2]
# Two streams of text: with data over the processes, each reads one of them.
RUN = {"steps": 12, "evaluate_every": 12, "data__shards": 2}
CONFIG = """
import os, pathlib, signal, time
from attnres_jax.parallel import MeshConfig, PipelineConfig
from tests.train.test_mesh import config_of
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
"""


def launch(folder, name, number, mesh):
    """Starts both processes; the second gives itself a signal at step 5."""
    path = folder / f"{name}.py"
    path.write_text(
        CONFIG.format(folder=str(folder), name=name, run=RUN, mesh=mesh, number=number.name)
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "train", f"--config={path}"]
            + [f"--distributed.coordinator-address=127.0.0.1:{port}"]
            + ["--distributed.num-processes=2", f"--distributed.process-id={index}"],
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


def test_two_processes_train_what_one_does_save_and_go_on_in_one(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        leave_one_device(patch)
        single = config_of(tmp_path, "single", **RUN)
        assert train(prepare(single), "x") == 0
    expected = losses(single)

    # Stages on different processes; one dies, and then the other is killed.
    mesh = "mesh=MeshConfig(stage=2, data=2, tensor=2), pipeline=PipelineConfig(virtual_stages=2)"
    processes = launch(tmp_path, "killed", signal.SIGKILL, mesh)
    processes[1].wait(timeout=100)
    processes[0].kill()
    codes, outputs = finish(processes)
    assert codes == [-signal.SIGKILL] * 2, outputs
    assert "(stage=2, data=2, tensor=2, 2 processes)" in outputs[0]
    assert "step" not in outputs[1]

    # Replicas on different processes; the second is told that it will be preempted.
    mesh = "mesh=MeshConfig(data=4, tensor=2)"
    codes, outputs = finish(launch(tmp_path, "preempted", signal.SIGTERM, mesh))
    assert codes == [128 + signal.SIGTERM] * 2, outputs

    for name in ("killed", "preempted"):
        config = config_of(tmp_path, name, **RUN)
        saved = Checkpoints(config.workdir, read_only=True).steps()[0]
        before = losses(config)
        assert saved < 12 and max(before) < 12
        assert before == pytest.approx({step: expected[step] for step in before}, rel=1e-5)
        if name == "preempted":
            assert saved == max(before) > 5
        assert train(prepare(config), "x") == 0
        assert_same_run(single, config)


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
