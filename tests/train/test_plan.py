"""The plan of a step: names of topologies, counts, bounds; and, marked aot, the real compiler."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from attnres_jax.parallel import Collective, MeshConfig, collectives_of_hlo, make_mesh
from tests.train.tiny_run import tiny_config
from train import plan as plan_lib
from train.cost import (
    bounds,
    count_by_kind,
    memory_of,
    model_flops,
    products,
    refused_memory,
)
from train.placement import batch_sharding
from train.plan_report import print_report
from train.setup import abstract_setup
from train.topology import CHIPS, GPUS_IN_A_NODE, parse_topology

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("quick_compilation")

# --------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "chips", "is_tpu"),
    [
        ("v5p:4x4x8", 128, True),
        ("V5E:16x16", 256, True),
        ("tpu7x:2x2x1", 4, True),
        ("h200:64", 64, False),
        ("h100:4", 4, False),
    ],
)
def test_names_of_topologies(name, chips, is_tpu):
    topology = parse_topology(name)
    assert (topology.chips, topology.is_tpu) == (chips, is_tpu)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5q:4x4x4", ("no chip 'v5q'", "v5p:4x4x4", "v5e:4x4", "NAME:AxBxC")),
        ("h20:8", ("no chip 'h20'", "h200:8", "NAME:COUNT")),
        ("v5p-128", ("no shape after a colon", "v5p:4x4x4")),
        ("v5p", ("no shape after a colon", "v5p:2x2x1")),
        ("v5p:4x4", ("v5p takes 3 sides", "v5p:4x4x8")),
        ("v5e:2x2x2", ("v5e takes 2 sides", "v5e:2x2")),
        ("v5p:4x0x4", ("v5p takes 3 sides",)),
        ("h200:8x8", ("h200 takes one number", "h200:64")),
        ("h200:60", ("do not fill nodes of 8", "h200:64")),
        ("", ("no chip ''", "known: v4")),
    ],
)
def test_a_topology_that_does_not_exist_is_refused_with_near_ones(name, words):
    with pytest.raises(ValueError) as refusal:
        parse_topology(name)
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert "NAME:AxB for v5e and v6e" in message


def test_every_example_is_a_topology():
    for chip in CHIPS.values():
        for example in chip.examples:
            assert parse_topology(example).chip is chip


# --------------------------------------------------------------------------- counts


def test_products_count_loops_recomputation_and_devices():
    mesh = make_mesh(MeshConfig(data=8))

    def step(x_bd, w_de):
        def body(carry, w):
            return jax.checkpoint(lambda c: c @ w)(carry), None

        def local(x_bd):
            return jax.lax.scan(body, x_bd, jnp.stack([w_de] * 5))[0]

        spec = jax.sharding.PartitionSpec("data")
        return jnp.sum(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(x_bd))

    x, w = jnp.ones((16, 4)), jnp.ones((4, 4))
    once = 2 * 16 * 4 * 4
    assert products(jax.make_jaxpr(step)(x, w)) == 5 * once
    # Backward: two products for each, and each recomputed first or not needed again.
    backward = products(jax.make_jaxpr(jax.grad(step, (0, 1)))(x, w))
    assert backward in (15 * once, 20 * once)

    def branches(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w)

    assert products(jax.make_jaxpr(branches)(x, w)) == 2 * once


def test_products_of_a_model_are_those_of_the_formula(tmp_path):
    """Without recomputation the program multiplies what the model needs, and all of attention."""
    config = tiny_config(tmp_path, model__num_layers=2, model__residual="standard")
    setup = abstract_setup(config, jax.devices()[:1])
    shape = config.batch_size, config.context + 1
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(setup.mesh))
    traced = setup.make_train_step(1).trace(setup.template, {"tokens": tokens})
    sequences, context, width, layers = config.batch_size, config.context, 16, 2
    needed = model_flops(setup.stored.params, sequences * context, layers, width, context)
    masked = 6.0 * layers * width * context**2 * sequences
    assert products(traced.jaxpr) == needed + masked


def test_model_flops_are_six_for_each_weight_and_token():
    params = {
        "embedding_table": jnp.zeros((100, 8)),
        "attention": {"query_kernel": jnp.zeros((3, 8, 2, 4))},
        "reads": {"query": jnp.zeros((6, 8))},
    }
    weights = 100 * 8 + 3 * 8 * 8
    attention = 3 * 3 * 2 * 8 * 16  # Forward and twice backward; scores and sums; half of 16.
    assert model_flops(params, 10, 3, 8, 16) == 10 * (6 * weights + attention)
    untied = params | {"head_kernel": jnp.zeros((8, 100))}
    assert model_flops(untied, 10, 3, 8, 16) == model_flops(params, 10, 3, 8, 16)


def test_collectives_and_bounds():
    ones = [
        Collective("all-gather", (4, 8), "bf16", 3, False, ""),
        Collective("collective-permute", (2, 8), "f32", 5, True, ""),
        Collective("all-gather", (8,), "f32", 1, False, ""),
    ]
    rows = count_by_kind(ones)
    assert rows == [
        {"kind": "all-gather", "count": 4, "in_loops": 0, "bytes": 3 * 64 + 32},
        {"kind": "collective-permute", "count": 5, "in_loops": 5, "bytes": 5 * 64},
    ]
    chip = CHIPS["v5p"]
    limits = bounds(chip, flops=459e12, memory_bytes=2765e9 / 2, collectives=rows)
    assert limits["compute"] == 1.0 and limits["memory"] == 0.5
    assert limits["exchange"] == pytest.approx((224 / 2 + 320) / 600e9)
    halves = bounds(chip, flops=1.0, memory_bytes=1.0, collectives=[], chips_in_a_device=0.5)
    assert halves["compute"] == 2 / 459e12


def test_attributes_of_several_lines_end_no_computation():
    """As kernels of JAX's own have them in programs for TPUs."""
    text = """
%body (p: f32[8]) -> f32[8] {
  %kernel = f32[8] custom-call(%p), frontend_attributes={metadata={
"xprof_metadata":"{}"
}}
  ROOT %permute = f32[8]{0} collective-permute(%kernel), source_target_pairs={{0,1},{1,0}}
}

%condition (p: f32[8]) -> pred[] {
  %turns = s32[]{:T(128)} constant(7)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  ROOT %loop = f32[8] while(%p), condition=%condition, body=%body
}
"""
    (one,) = collectives_of_hlo(text)
    assert (one.kind, one.count, one.bytes) == ("collective-permute", 7, 7 * 32)


def test_memory_of_a_donated_state_counts_it_once():
    def step(state, x):
        return state + jnp.sum(x), jnp.sum(state)

    compiled = jax.jit(step, donate_argnums=0).lower(jnp.zeros(1000), jnp.zeros(10)).compile()
    memory = memory_of(compiled, capacity=4050)
    assert 4040 <= memory.state <= 4300
    assert memory.total == memory.state + memory.temporary + memory.program
    assert memory.excess == memory.total - 4050


def test_what_a_compiler_says_of_too_little_memory_is_read():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory"
        " required for HLO temporaries (102.62G) exceeds available HBM (15.75G). HLO module: jit_f."
    )
    assert refused_memory(message) == (102.62 * 2**30, 15.75 * 2**30)
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
        " hbm. Used 23.45G of 15.75G hbm. Exceeded hbm capacity by 7.70G."
    )
    used, capacity = refused_memory(message)
    assert (used, capacity) == (23.45 * 2**30, 15.75 * 2**30)
    assert refused_memory("INTERNAL: something else") is None


# --------------------------------------------------------------------------- the command line

CONFIG = """
import pathlib
from tests.train.tiny_run import tiny_config

def get_config():
    return tiny_config(pathlib.Path({folder!r}), **{changes!r})
"""


def write_config(folder, **changes):
    path = folder / "config.py"
    path.write_text(CONFIG.format(folder=str(folder), changes=changes))
    return f"--config={path}"


@pytest.fixture
def described(monkeypatch):
    """Emulated devices in place of described ones."""
    monkeypatch.setattr(
        plan_lib, "described_devices", lambda topology: jax.devices()[: topology.chips]
    )


def run(capsys, *arguments):
    code = plan_lib.main(arguments)
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology=v5p:4x4"], "v5p takes 3 sides"),
        ([], "--topology"),
        (["--topology=h100:8", "--mesh.stag=2"], "--mesh.stage"),
        (["--topology=h100:8", "--mesh.stage=3"], "8 devices"),
        (["--topology=h100:8", "--mesh.stage=8"], "2 sub-layers"),
    ],
)
def test_refused_in_one_line(tmp_path, capsys, described, arguments, words):
    code, out, err = run(capsys, write_config(tmp_path), *arguments)
    assert code == 2 and out == ""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and words in lines[0]


def test_a_missing_compiler_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for topology in ("v5p:2x2x1", "h200:8"):
        code, _, err = run(capsys, write_config(tmp_path), f"--topology={topology}")
        assert code == 2 and "uv run --group aot" in err


def test_plans_a_pipeline_and_counts_what_it_exchanges(tmp_path, capsys, described):
    assert GPUS_IN_A_NODE == 8
    changes = {"model__num_layers": 2, "model__vocab_size": 258}
    arguments = ["--topology=h200:8", "--mesh.stage=2", "--mesh.fsdp=2", "--mesh.data=2"]
    arguments += ["--pipeline.microbatches=2", "--json"]
    code, out, _ = run(capsys, write_config(tmp_path, **changes), *arguments)
    report = json.loads(out)
    assert code == 0 and report["devices"] == 8
    assert report["mesh"]["stage"] == 2 and report["tokens"] == 8 * 16
    pipeline = report["pipeline"]
    # Two chunks of two blocks: K = 3, three ticks each way, [1, 16, 16] float32 a block.
    assert pipeline["exchanged_bytes_formula"] == 2 * 3 * 3 * 16 * 16 * 4
    assert pipeline["exchanged_bytes_program"] == pipeline["exchanged_bytes_formula"]
    assert pipeline["bubble"] == pytest.approx(1 / 3)
    permutes = [row for row in report["collectives"] if row["kind"] == "collective-permute"]
    assert permutes[0]["bytes"] >= pipeline["exchanged_bytes_formula"]
    assert report["bound"]["seconds"] == max(
        report["bound"][name] for name in ("compute", "memory", "exchange")
    )
    assert 0 < report["flops"]["model"] < report["flops"]["program"]
    assert report["memory"]["excess"] == 0
    print_report(report)
    shown = capsys.readouterr().out
    assert "a step takes at least" in shown and "not timed" in shown


def test_a_state_that_does_not_fit_is_refused_before_compiling(tmp_path, capsys, described):
    arguments = ["--topology=h200:8", "--model.width=65536", "--model.feed-forward-width=262144"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_lib, "memory_of", None)  # Nothing gets that far.
        code, out, err = run(capsys, write_config(tmp_path), *arguments)
    assert code == 1 and out == ""
    for words in ("parameters and moments alone", "131.32 GiB", "too much", "mesh.fsdp", "remat"):
        assert words in err, err


@pytest.mark.aot
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu: uv run --group aot pytest -m aot",
)
def test_the_real_compiler_plans_a_pipeline_and_refuses_what_does_not_fit(tmp_path):
    """In a process of its own: libtpu reads its settings when it is loaded."""
    model = {
        "vocab_size": 512,
        "width": 256,
        "num_layers": 4,
        "num_heads": 2,
        "feed_forward_width": 512,
        "block_size": 2,
        "compute_dtype": "bfloat16",
    }
    changes = {f"model__{name}": value for name, value in model.items()}
    config = write_config(tmp_path, context=256, **changes)
    mesh = ["--mesh.stage=2", "--mesh.fsdp=2", "--pipeline.virtual-stages=2"]

    def plan(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "train.plan", config, *arguments],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )

    done = plan("--topology=v5e:2x2", *mesh, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    pipeline = report["pipeline"]
    assert report["memory"]["capacity"] == 16 * 2**30 and report["memory"]["excess"] == 0
    # Four chunks of one block of a layer: K = 2, five ticks, [2, 256, 256] bfloat16 a block.
    assert pipeline["exchanged_bytes_formula"] == 2 * 5 * 2 * 2 * 256 * 256 * 2
    assert pipeline["exchanged_bytes_program"] == pipeline["exchanged_bytes_formula"]
    (permute,) = [row for row in report["collectives"] if row["kind"] == "collective-permute"]
    assert permute["bytes"] == pipeline["exchanged_bytes_formula"]
    # Nothing else is exchanged while the pipeline runs.
    in_loops = {row["kind"]: row["in_loops"] for row in report["collectives"] if row["in_loops"]}
    assert in_loops == {"collective-permute": permute["count"]}

    many = plan("--topology=v5e:2x2", *mesh, "--batch-size=4096", "--context=4096")
    assert many.returncode == 1
    assert "too much; what helps: more mesh.fsdp" in many.stderr, many.stderr[-2000:]
