"""Diagnostics as JSON and CSV, and back."""

import json

import numpy as np
import pytest

from attnres_jax import Diagnostics, read_diagnostics
from attnres_jax.diagnostics import AXES
from attnres_jax.diagnostics.record import describe_reads

NAN = np.nan


def record(step=None):
    """Of a model of two layers in blocks of three sub-layers."""
    weights = [
        [1, NAN, NAN],
        [0.25, 0.75, NAN],
        [1 / 3, 2 / 3, NAN],
        [0.5, 0.5, NAN],
        [0, 1, 1e-30],
    ]
    per_token = np.random.default_rng(0).standard_normal((3, 5, 3))
    per_token[:, 0, 1:] = NAN
    arrays = {
        "depth_weights": weights,
        "entropy": [0, 0.8, NAN, np.inf, 1],
        "block_norm": [0.1, 1e10],
        "logits_per_token": per_token,
        "lse_per_token": np.random.default_rng(1).standard_normal((2, 3, 5)),
    }
    arrays = {name: np.array(array, np.float32) for name, array in arrays.items()}
    return Diagnostics(arrays, "block", 3, 4, step)


def assert_same(actual, expected):
    assert actual.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        array = np.where(np.isfinite(array), array, NAN)
        assert actual.arrays[name].dtype == np.float32
        np.testing.assert_array_equal(actual.arrays[name], array, err_msg=name)
        assert actual.axes(name) == expected.axes(name)
    names = ("residual", "block_size", "num_sublayers", "step")
    assert [getattr(actual, n) for n in names] == [getattr(expected, n) for n in names]
    assert actual.reads == expected.reads


@pytest.mark.parametrize("step", [None, 12])
def test_json_and_csv_are_read_back_as_they_were(step):
    assert_same(Diagnostics.from_json(record(step).to_json()), record(step))
    assert_same(Diagnostics.from_csv(record(step).to_csv()), record(step))


def test_json_is_of_version_1_and_has_null_for_what_is_not_there():
    text = record(7).to_json()
    assert "\n" not in text and "NaN" not in text and "Infinity" not in text
    values = json.loads(text)
    assert list(values) == [
        *("version", "step", "residual", "block_size", "num_sublayers", "reads", "arrays")
    ]
    assert (values["version"], values["step"], values["block_size"]) == (1, 7, 3)
    assert values["reads"][2] == {
        "index": 2,
        "kind": "pre-attention",
        "sources": ["embedding", "partial sum of block 1"],
    }
    assert values["arrays"]["depth_weights"]["axes"] == ["read", "source"]
    assert values["arrays"]["depth_weights"]["values"][1] == [0.25, 0.75, None]
    assert values["arrays"]["entropy"]["values"][3] is None
    assert values["arrays"]["lse_per_token"]["axes"] == ["batch", "time", "read"]


def test_digits_round_significantly():
    values = json.loads(record().to_json(digits=3))["arrays"]
    assert values["depth_weights"]["values"][2][:2] == [0.333, 0.667]
    assert values["block_norm"]["values"] == [0.1, 1e10]


def test_csv_names_each_axis_in_a_column():
    comment, header, *rows = record().to_csv().splitlines()
    assert json.loads(comment.removeprefix("# "))["residual"] == "block"
    assert header == "array,batch,time,read,source,block,value"
    assert rows[:4] == [
        *("depth_weights,,,0,0,,1.0", "depth_weights,,,0,1,,", "depth_weights,,,0,2,,"),
        "depth_weights,,,1,0,,0.25",
    ]
    assert len(rows) == sum(array.size for array in record().arrays.values())


def test_every_read_names_its_sources():
    block = describe_reads("block", 3, 7)
    assert [len(read.sources) for read in block] == [1, 2, 2, 2, 3, 3, 3, 4]
    assert block[4].sources == ("embedding", "block 1", "partial sum of block 2")
    assert block[7] == (7, "final", ("embedding", "block 1", "block 2", "block 3"))
    full = describe_reads("full", None, 4)
    assert full[3] == (3, "pre-MLP", ("embedding", "attention 1", "MLP 1", "attention 2"))
    assert [len(read.sources) for read in full] == [1, 2, 3, 4, 5]
    assert {read.sources for read in describe_reads("standard", None, 4)} == {("residual stream",)}
    assert [read.kind for read in describe_reads("standard", None, 2)] == [
        *("pre-attention", "pre-MLP", "final")
    ]
    assert len(describe_reads("block", 9, 4)[-1].sources) == 2


def test_axes_cover_the_documented_arrays():
    assert set(record().arrays) <= set(AXES)


def test_last_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "diagnostics.jsonl"
    lines = [record(step).to_json() + "\n" for step in (0, 50)]
    path.write_text("".join(lines) + lines[1][:40], encoding="utf-8")
    assert [r.step for r in read_diagnostics(tmp_path)] == [0, 50]
    assert_same(read_diagnostics(path)[1], record(50))
    path.write_text(lines[0] + lines[1][:40] + "\n" + lines[1], encoding="utf-8")
    with pytest.raises(ValueError, match=r"diagnostics\.jsonl, line 2: "):
        read_diagnostics(path)
    with pytest.raises(FileNotFoundError):
        read_diagnostics(tmp_path / "no_run")


@pytest.mark.parametrize(
    "text, message",
    [
        (record().to_json().replace('"version": 1', '"version": 2'), "version 2 cannot be read"),
        ("[]", "version None cannot be read"),
        ('{"version": 1, "arrays": {}}', "lack or garble a part: KeyError"),
        ("{", "Expecting"),
    ],
)
def test_other_versions_and_broken_json_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Diagnostics.from_json(text)


@pytest.mark.parametrize(
    "text, message",
    [
        (record().to_csv().replace('"version": 1', '"version": 0'), "not version 1"),
        (record().to_csv().partition("\n")[2], "first line of the CSV must be its comment"),
    ],
)
def test_other_versions_and_tables_without_comment_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Diagnostics.from_csv(text)
