import dataclasses
import json

import pytest

from tests.train.report.folders import other_data, write_run
from train.report.comparison import differences
from train.report.run import read_run, short_names


@pytest.fixture
def run(tmp_path):
    return read_run(write_run(tmp_path / "one"), "one")


def test_a_run_is_read(run):
    assert (run.step, run.tokens, run.parameters) == (20, 20 * 4 * 32, 1234)
    assert run.problems == {} and run.diagnostics.step == 20


def test_what_is_missing_is_named_and_the_rest_is_read(tmp_path):
    folder = write_run(tmp_path / "one", diagnostics=False)
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder, "one")
    assert run.diagnostics is None and run.metrics == [] and run.step == 0
    assert "--diagnostics.every" in run.problems["diagnostics"]
    assert "no line with a loss" in run.problems["metrics"]


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        read_run(tmp_path / "none", "none")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        read_run(tmp_path, "empty")
    (tmp_path / "config.json").write_text(json.dumps({"settings": {}, "data": {}}))
    with pytest.raises(ValueError, match=r"KeyError.*name the folder of a run"):
        read_run(tmp_path, "other")


def test_names_are_short_where_that_is_enough(tmp_path):
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    twice = [tmp_path / "x" / "a", tmp_path / "y" / "a"]
    assert short_names(twice) == [str(path) for path in twice]


def test_other_residuals_seeds_and_optimizers_may_be_compared(tmp_path, run):
    other = read_run(write_run(tmp_path / "two", residual="standard", seed=3), "two")
    assert differences([run, other]) == []


@pytest.mark.parametrize(
    "changes, fields",
    [
        ({"steps": 10}, ["tokens trained on"]),
        ({"data": other_data()}, ["data.source", "data.paths"]),
        ({"evaluation_tokens": 7}, ["evaluation_tokens"]),
    ],
)
def test_what_forbids_to_compare_is_named(tmp_path, run, changes, fields):
    other = read_run(write_run(tmp_path / "two", **changes), "two")
    found = differences([run, other])
    assert [one.field for one in found] == fields
    assert set(found[0].values) == {"one", "two"}


def test_another_context_is_named_even_if_the_tokens_agree(run):
    settings = run.settings | {"context": 16, "batch_size": 8}
    other = dataclasses.replace(run, name="two", settings=settings)
    assert [(one.field, one.values) for one in differences([run, other])] == [
        ("context", {"one": 32, "two": 16})
    ]


def test_other_text_is_named(run):
    other = dataclasses.replace(run, name="two", counts={"train_tokens": 999})
    assert [one.field for one in differences([run, other])] == ["train_tokens found"]
