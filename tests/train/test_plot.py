import json

import numpy as np
import pytest

from train.plot import main, newest_depth_weights


@pytest.fixture
def workdir(tmp_path):
    lines = [
        {"step": 1, "depth/weight/read_00/source_00": 0.5},
        {
            "step": 2,
            "depth/weight/read_00/source_00": 1.0,
            "depth/weight/read_01/source_00": 0.25,
            "depth/weight/read_01/source_01": 0.75,
        },
        {"step": 3, "loss": 1.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


def test_weights_are_the_newest_and_missing_sources_are_not_zero(workdir):
    step, weights_ln = newest_depth_weights(str(workdir))
    assert step == 2
    np.testing.assert_array_equal(weights_ln, [[1.0, np.nan], [0.25, 0.75]])


def test_picture_is_written(workdir, tmp_path):
    output = tmp_path / "weights.png"
    assert main([f"--workdir={workdir}", f"--output={output}"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_run_without_depth_weights_is_refused(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n', encoding="utf-8")
    assert main([f"--workdir={tmp_path}", f"--output={tmp_path / 'x.png'}"]) == 2
    assert "no evaluation with depth weights" in capsys.readouterr().err
