import json

import numpy as np
import pytest

from tests.train.report.folders import invented, write_run
from train.report.diagnostics import DiagnosticsError, parse, read_newest


def line_of(residual="block", **changes):
    return json.loads(invented(residual, 4, 6).to_json()) | changes


def test_what_the_library_writes_is_read_back(tmp_path):
    run = write_run(tmp_path / "run")
    measured, expected = read_newest(run), invented("block", 4, 6, seed=len("block"))
    assert measured.unusable == {} and measured.remark == ""
    assert measured.num_sublayers == 6 and measured.residual == "block"
    assert [read.sources for read in measured.reads] == [read.sources for read in expected.reads]
    assert set(measured.arrays) == set(expected.arrays)
    for name, array in measured.arrays.items():
        np.testing.assert_array_equal(array.astype(np.float32), expected.arrays[name])


def test_the_newest_line_counts_and_one_that_is_cut_off_does_not(tmp_path):
    run = write_run(tmp_path / "run")
    whole = json.dumps(line_of(step=7))
    (run / "diagnostics.jsonl").write_text(f"{json.dumps(line_of(step=3))}\n{whole}\n{whole[:99]}")
    measured = read_newest(run)
    assert measured.step == 7
    assert "1 newer line" in measured.remark


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "does not exist; train with --diagnostics.every"),
        ("", "has no complete line"),
        ('{"version": 1, "step"', "has no complete line"),
        ('{"version": 2}', "is of version 2 and this report reads version 1"),
        ("[1]", "is of version None"),
        ('{"version": 1}', "lacks a field of version 1: KeyError"),
        (json.dumps(line_of(num_sublayers=9)), "has 7 reads for 9 sub-layers"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path, content, message):
    if content is not None:
        (tmp_path / "diagnostics.jsonl").write_text(content)
    with pytest.raises(DiagnosticsError, match=message):
        read_newest(tmp_path)


def test_an_array_with_a_nan_is_left_out_and_the_others_are_kept():
    line = line_of()
    line["arrays"]["depth_weights"]["values"][3][1] = None
    line["arrays"]["read_norm"]["values"][2] = float("nan")
    measured = parse(line, "here")
    assert (
        "1 value(s) are not finite, the first at read 3, source 1"
        in (measured.unusable["depth_weights"])
    )
    assert "read 2" in measured.unusable["read_norm"]
    assert not {"depth_weights", "read_norm"} & set(measured.arrays)
    assert "dilution" in measured.arrays


def test_a_source_that_a_read_does_not_have_may_be_null():
    measured = parse(line_of(), "here")
    assert np.isnan(measured.arrays["depth_weights"][0, 1])
    assert np.isfinite(measured.arrays["depth_weights"][0, 0])


@pytest.mark.parametrize(
    "array, message",
    [
        ({"axes": ["read"], "values": [1.0] * 7}, "the axes are"),
        ({"axes": ["read", "source"], "values": [[1.0]] * 7}, "axis 'source' has length 1, not 3"),
        ({"values": []}, "axes"),
        ({"axes": ["read", "source"], "values": [[1.0], [1.0, 2.0]]}, "inhomogeneous"),
    ],
)
def test_an_array_of_another_form_is_left_out(array, message):
    line = line_of()
    line["arrays"]["depth_weights"] = array
    assert message in parse(line, "here").unusable["depth_weights"]
