import json
import math

import numpy as np
import pytest

from train.metrics import (
    Clock,
    Display,
    MetricsWriter,
    depth_table,
    evaluation_metrics,
    read_metrics,
)


def write(folder, start, *steps, **values):
    writer = MetricsWriter(folder, start)
    for step in steps:
        writer.write(step, {"loss": float(step)} | values)
    writer.close()


def test_every_line_is_json_and_what_is_not_finite_is_null(tmp_path):
    values = {"a": math.nan, "b": np.float32(math.inf), "c": np.float32(0.5), "d": np.int32(7)}
    write(tmp_path, 0, 1, **values)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "loss": 1, "a": None, "b": None, "c": 0.5, "d": 7}


def test_resuming_drops_later_lines_and_a_cut_one(tmp_path):
    write(tmp_path, 0, 1, 2, 3, 4)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    write(tmp_path, 2, 3, 4)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    write(tmp_path, 0, 1)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_lines_are_there_before_the_writer_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, {"loss": 2.0})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2}]
    writer.close()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


@pytest.fixture
def sums():
    return {
        "nats": np.float64(60 * math.log(2)),
        "tokens": np.float64(20),
        "weight/00": np.array([20.0]),
        "entropy/00": np.float64(0),
        "weight/01": np.array([15.0, 5.0]),
        "entropy/01": np.float64(20 * math.log(2)),
        "positions": np.float64(25),
        "hidden_square": np.array([25.0, 225.0]),
    }


def test_evaluation_means(sums):
    params = {"reads": {"query": np.array([[3.0, 4.0]])}, "final_read": {"query": np.zeros(2)}}
    metrics = evaluation_metrics(sums, 30, params)
    expected = {
        "validation/loss": 3 * math.log(2),
        "validation/bits_per_byte": 2.0,
        "validation/tokens": 20,
        "depth/weight/read_00/source_00": 1,
        "depth/weight/read_01/source_00": 0.75,
        "depth/weight/read_01/source_01": 0.25,
        "depth/entropy/read_00": 0,
        "depth/entropy/read_01": 1,
        "depth/hidden_norm/00": 1,
        "depth/hidden_norm/01": 3,
        "depth/query_norm/read_00": 5,
        "depth/query_norm/read_01": 0,
    }
    assert metrics == pytest.approx(expected)


def test_standard_residual_has_no_reads(sums):
    plain = {name: sums[name] for name in ("nats", "tokens", "positions", "hidden_square")}
    metrics = evaluation_metrics(plain, 30, {"embedding_table": np.ones((3, 2))})
    assert not any(name.startswith(("depth/weight", "depth/query")) for name in metrics)


def test_clock_leaves_pauses_and_compilation_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("train.metrics.time.perf_counter", lambda: now[0])
    clock = Clock()
    now[0] = 100.0
    clock.tick()
    assert math.isnan(clock.steps_per_second())
    clock.restart()
    now[0] += 2.0
    with clock.paused():
        now[0] += 50.0
    clock.tick()
    now[0] += 2.0
    clock.tick()
    assert clock.steps_per_second() == 0.5


def test_plain_lines_where_there_is_no_terminal(capsys):
    display = Display(100, 0)
    display.report(10, 2.5, 12345.6, 90.2)
    display.report(11, 2.5, math.nan, math.nan)
    display.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 10/100  loss 2.5000  12,346 tokens/s  ETA 1:30",
        "step 11/100  loss 2.5000  - tokens/s  ETA -",
    ]


def test_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    display = Display(100, 0)
    display.report(10, 2.5, 12345.6, 90.2)
    display.print("above")
    display.close()
    shown = capsys.readouterr().out
    assert "loss 2.5000  12,346 tokens/s" in shown and "above" in shown


def test_depth_table_shows_the_newest_evaluation_read_by_read():
    old = {"step": 1, "depth/weight/read_00/source_00": 0.5}
    new = {
        "step": 2,
        "depth/weight/read_00/source_00": 1.0,
        "depth/weight/read_01/source_00": 0.25,
        "depth/weight/read_01/source_01": 0.75,
    }
    table = depth_table([old, new, {"step": 3, "loss": 1.0}])
    columns = [[column.header, *column.cells] for column in table.columns]
    assert columns == [
        ["reader", "1 attention", "2 head"],
        ["embedding", "1.00", "0.25"],
        ["block 1", "", "0.75"],
    ]
    assert depth_table([{"step": 1, "loss": 1.0}]) is None
