import os
import signal
import subprocess
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train.tiny_run import tiny_config
from train.checkpoint import (
    CheckpointError,
    Checkpoints,
    MismatchError,
    check_same_run,
    describe,
)
from train.config import from_json, to_json
from train.step import TrainState

DESCRIPTION = {"settings": {"steps": 1}, "data": {}}


def make_state(value=1.5, step=16_777_217, size=4):
    params = {"reads": {"query": jnp.full((2, size), value)}}
    optimizer = optax.adam(0.1).init(params)
    # One more than float32 can count to.
    return TrainState(jnp.int32(step), params, optimizer, jnp.int32(3), jnp.int32(0))


def template(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def make_batches(position=0):
    batches = iter(grain.MapDataset.range(1000).to_iter_dataset())
    for _ in range(position):
        next(batches)
    return batches


def save(folder, *steps, keep=1):
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        state = make_state(value=float(step), step=step)
        checkpoints.save(step, state, make_batches(step), DESCRIPTION | {"data": {"at": step}})
    checkpoints.close()


def restored_step(folder):
    checkpoints = Checkpoints(folder)
    batches = make_batches()
    state = checkpoints.restore(template(make_state()), batches)
    checkpoints.close()
    # State and data always come from the same checkpoint.
    assert next(batches) == int(state.step) == int(state.params["reads"]["query"][0, 0])
    return int(state.step)


def test_restores_state_exactly_and_data_position(tmp_path):
    state, batches = make_state(), make_batches(7)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(20, state, batches, DESCRIPTION)
    for _ in range(3):  # What is drawn while saving belongs to later steps.
        next(batches)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path)
    batches = make_batches()
    restored = checkpoints.restore(template(state), batches)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert int(restored.step) == 16_777_217
    assert next(batches) == 7
    assert checkpoints.newest_description() == DESCRIPTION


def test_folder_without_checkpoints_restores_nothing(tmp_path):
    assert Checkpoints(tmp_path).restore(template(make_state()), make_batches()) is None
    reader = Checkpoints(tmp_path / "none", read_only=True)
    assert reader.newest_description() is None
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": jnp.float32(0)}, r"step: int32\[\] in checkpoint .*, float32\[\] now"),
        (
            {"params": {"reads": {"query": jnp.zeros((2, 4), jnp.bfloat16)}}},
            r"params\.reads\.query: float32\[2, 4\] in .*, bfloat16\[2, 4\] now",
        ),
        (
            {"params": {"reads": {"query": jnp.zeros((3, 4))}}},
            r"params\.reads\.query: float32\[2, 4\] in .*, float32\[3, 4\] now",
        ),
        ({"params": {}}, r"params\.reads\.query: float32\[2, 4\] in .*, absent now"),
    ],
)
def test_never_casts_or_reshapes(tmp_path, change, message):
    save(tmp_path, 10)
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(MismatchError, match=message):
        checkpoints.restore(template(make_state()._replace(**change)), None)
    checkpoints.close()
    assert restored_step(tmp_path) == 10


def test_keeps_the_newest(tmp_path):
    save(tmp_path, 10, 20, 30, keep=2)
    assert Checkpoints(tmp_path).steps() == [30, 20]


def truncate(step):
    for path in [*(step / "state" / "d").iterdir()]:
        os.truncate(path, path.stat().st_size // 2)


def remove_description(step):
    (step / "state" / "_METADATA").unlink()


def empty_batches(step):
    (step / "batches" / "metadata").write_text("")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", [truncate, remove_description, empty_batches])
def test_damaged_newest_is_passed_over_and_saved_again(tmp_path, caplog, damage):
    save(tmp_path, 10, 20, keep=2)
    damage(tmp_path / "checkpoints" / "20")
    assert restored_step(tmp_path) == 10
    assert "checkpoint 20" in caplog.text and "passed over" in caplog.text
    # Keeping one must count complete ones only, and the step is free again.
    save(tmp_path, 20, keep=1)
    assert restored_step(tmp_path) == 20
    assert Checkpoints(tmp_path).steps() == [20]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_readable_is_an_error_and_deletes_nothing(tmp_path):
    save(tmp_path, 10)
    remove_description(tmp_path / "checkpoints" / "10")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints \[10\]"):
        restored_step(tmp_path)
    assert (tmp_path / "checkpoints" / "10").is_dir()


CHILD = """
import os, resource, signal, sys
import numpy as np
from tests.train.test_checkpoint import DESCRIPTION, make_batches, make_state
from train.checkpoint import CheckpointError, Checkpoints
checkpoints = Checkpoints(sys.argv[1], 1)
if sys.argv[2] == "full":
    # A file that may not grow fails as a full disk does.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
state = make_state(value=20.0, step=20, size=4_000_000)
# Noise, so that compression does not make the file small.
noise = np.random.default_rng(0).normal(size=(2, 4_000_000)).astype(np.float32)
state = state._replace(params={"reads": {"query": noise}})
try:
    checkpoints.save(20, state, make_batches(20), DESCRIPTION)
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.close()
except CheckpointError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("what", ["kill", "full"])
def test_save_that_fails_leaves_the_one_before(tmp_path, what):
    save(tmp_path, 10)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), what], capture_output=True, text=True
    )
    if what == "kill":
        assert child.returncode == -signal.SIGKILL
        assert not (tmp_path / "checkpoints" / "20").exists()  # It was in the middle of saving.
    else:
        assert child.returncode == 1
        assert "could not be saved" in child.stderr
    assert restored_step(tmp_path) == 10
    save(tmp_path, 20)
    assert restored_step(tmp_path) == 20


def test_configuration_survives_json(tmp_path):
    config = tiny_config(tmp_path, optimizer__name="muon", data__text_field="body")
    assert from_json(to_json(config)) == config
    with pytest.raises(ValueError, match=r"not of this version.*colour"):
        from_json(to_json(config) | {"colour": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__block_size": 2}, r"model\.block_size: 1 there, 2 now"),
        ({"model__residual": "full"}, r"model\.residual: 'block' there, 'full' now"),
        ({"seed": 1, "optimizer__beta2": 0.9}, r"optimizer\.beta2: 0\.95 .*; seed: 0 there, 1 now"),
        ({"context": 8}, r"context: 16 there, 8 now"),
    ],
)
def test_other_run_is_refused_naming_the_settings(tmp_path, changes, message):
    saved = describe(tiny_config(tmp_path), {"train_documents": 3})
    now = describe(tiny_config(tmp_path, **changes), {"train_documents": 3})
    with pytest.raises(MismatchError, match=message):
        check_same_run(saved, now)


def test_other_text_is_refused(tmp_path):
    config = tiny_config(tmp_path)
    with pytest.raises(MismatchError, match="train_bytes: 3 there, 4 now"):
        check_same_run(describe(config, {"train_bytes": 3}), describe(config, {"train_bytes": 4}))


def test_run_may_be_prolonged_moved_and_watched_differently(tmp_path):
    saved = describe(tiny_config(tmp_path), {})
    changed = {"steps": 99, "log_every": 2, "keep_checkpoints": 9, "model__remat": "block"}
    check_same_run(saved, describe(tiny_config(tmp_path, workdir="elsewhere", **changed), {}))
