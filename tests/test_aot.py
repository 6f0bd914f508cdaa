"""Kernels and training steps through the real TPU compiler, for chips that are not there.

Needs the dependency group `aot`. Proves that programs compile and what they contain; nothing is run
or timed.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: uv run --group aot pytest -m aot",
    ),
]

ROOT = pathlib.Path(__file__).parents[1]
# Steps of four layers, so eight sub-layers, in two blocks of four. Phase 1 runs once a block, and
# once more for the final read; phase 2 before every sub-layer but the first of each block.
FORWARD = {"attnres_inter_block_forward": 3, "attnres_merge_forward": 6}
BACKWARD = {"attnres_inter_block_backward": 3, "attnres_merge_backward": 6}
# Recomputed in the backward pass: all of a block, and nothing of the final read.
FORWARD_TWICE = {"attnres_inter_block_forward": 5, "attnres_merge_forward": 12}
# Attention over time: forward, and backward to queries and to keys and values, in four layers.
SPLASH = {"splash_mha_fwd": 4, "splash_mha_dkv": 4, "splash_mha_dq": 4}


def rows_of(module, argument):
    """What a module of `tests.aot` prints: a process of its own, as libtpu reads its settings when
    it is loaded."""
    settings = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", f"tests.aot.{module}", argument],
        env=os.environ | settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def step(**settings):
    (row,) = rows_of("compile_step", json.dumps(settings))
    return row


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_every_kernel_compiles(topology):
    rows = rows_of("compile_kernels", topology)
    assert len(rows) == 40
    for row in rows:
        assert "error" not in row, row
        name = row["program"].split()[0].rstrip(",")
        launches = 2 if "n=50" in row["program"] and name == "inter_block" else 1
        expected = {f"attnres_{name}_{way}": launches for way in ("forward", "backward")}
        assert row["kernels"] == expected, row


def test_a_training_step_runs_the_named_kernels():
    row = step(mesh={"data": 1}, implementation="mosaic_tpu")
    assert row["kernels"] == FORWARD | BACKWARD | SPLASH
    assert row["stacks"] == [] and row["copies"] == []


def test_a_step_sharded_over_the_batch_finds_the_kernels_by_itself_and_gathers_nothing():
    row = step(mesh={"data": 8}, implementation=None, remat="block")
    assert row["kernels"] == FORWARD_TWICE | BACKWARD | SPLASH | {"splash_mha_fwd": 8}
    assert row["stacks"] == [] and row["copies"] == [] and row["gathered"] == []


def test_a_step_sharded_over_time_gathers_keys_and_values_only():
    row = step(mesh={"data": 4, "sequence": 2}, implementation=None, attention="xla")
    assert row["kernels"] == FORWARD | BACKWARD
    assert row["stacks"] == [] and row["gathered"] == []


def test_through_xla_no_kernel_is_found():
    row = step(mesh={"data": 1}, implementation="xla")
    assert row["kernels"] == SPLASH
    assert row["stacks"] == [] and row["copies"]  # so that the check is seen to find some


def test_recomputed_blocks_do_not_wait_for_gradients_of_parameters():
    few, many = (
        step(
            mesh={"data": 1},
            implementation="mosaic_tpu",
            remat="block",
            batch_size=16,
            num_layers=num_layers,
        )
        for num_layers in (4, 8)
    )
    # Waiting, the backward pass keeps what feed-forwards recompute: two factors of 640 columns in
    # four layers, bfloat16, of 16 sequences of 384 tokens, and more.
    kept = 4 * 2 * (16 * 384 * 640) * 2
    assert many["temporary_mib"] - few["temporary_mib"] < kept / 2**20


def test_the_check_finds_a_stack_of_sources():
    assert step(stacking_read=True)["stacks"]
