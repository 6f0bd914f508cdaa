import base64
import dataclasses
import json
import re

import numpy as np
import pytest

from tests.train.report.folders import invented, invented_text, write_run
from train.report import cli
from train.report.page import FOLDER, modules, render
from train.report.payload import payload
from train.report.pictures import draw
from train.report.run import read_run
from train.report.text import pack_rows, pack_values


def made_of(page):
    """The data that a page holds."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert text is not None
    return json.loads(text[1])


@pytest.fixture
def run(tmp_path):
    run = read_run(write_run(tmp_path / "one"), "one")
    return dataclasses.replace(run, text=invented_text(invented("block", 4, 6, time=5)))


def test_the_page_needs_nothing_beside_it(run):
    page = render(payload([run]))
    assert not re.findall(r'<(?:link|script|img)[^>]+(?:src|href)="(?!data:)', page)
    assert not re.findall(r"@import|url\((?!data:)", page)
    links = set(re.findall(r'href="(http[^"]+)"', page))
    assert links == {"https://arxiv.org/abs/2603.15031"}
    assert "<math" in page and "{{" not in page
    assert len(page.encode()) < 1_000_000


def test_text_cannot_end_the_script_that_holds_it(run):
    tokens = ["</script><script>alert(1)</script>", "<!--", "\u2028", *"ab"]
    run = dataclasses.replace(run, text=dataclasses.replace(run.text, tokens=tokens))
    page = render(payload([run]))
    assert "alert(1)</script>" not in page
    assert made_of(page)["runs"][0]["text"]["tokens"] == tokens


def test_the_page_holds_what_was_measured(run):
    data = made_of(render(payload([run])))["runs"][0]
    for name, array in run.diagnostics.arrays.items():
        shown = np.array(data["diagnostics"]["arrays"][name], np.float64)
        np.testing.assert_array_equal(shown, array)
    assert data["curves"]["loss"]["value"] == [
        line["loss"] for line in run.metrics if "loss" in line
    ]


def test_the_page_says_which_commit_trained_a_run(run):
    assert "<code>0123456789ab</code>" in render(payload([run]))
    unknown = render(payload([dataclasses.replace(run, commit="")]))
    assert "not recorded" in unknown and "0123456789ab" not in unknown


def test_tokens_are_packed_without_the_cells_that_do_not_exist():
    array_tln = np.arange(2 * 3 * 3, dtype=np.float64).reshape(2, 3, 3)
    packed = pack_rows(array_tln, [1, 2, 3])
    assert [list(np.frombuffer(_decode(text), "<f4")) for text in packed] == [
        [0, 3, 4, 6, 7, 8],
        [9, 12, 13, 15, 16, 17],
    ]
    values = np.frombuffer(_decode(pack_values(np.array([[1.5, np.nan]]))[0]), "<f4")
    assert values[0] == 1.5 and np.isnan(values[1])


def _decode(text):
    return base64.b64decode(text)


def test_every_module_that_is_imported_exists():
    names = set(modules())
    for path in (FOLDER / "js").glob("*.js"):
        source = path.read_text(encoding="utf-8")
        assert set(re.findall(r'from "(report/[\w.]+)"', source)) <= names
        assert len(source.splitlines()) <= 300


def test_the_command_builds_the_rest_of_a_run_without_diagnostics(tmp_path, capsys):
    good = write_run(tmp_path / "good", residual="standard")
    bad = write_run(tmp_path / "bad", diagnostics=False)
    output = tmp_path / "out" / "report.html"
    arguments = [str(good), str(bad), "-o", str(output), "--png", str(tmp_path / "png")]
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    assert f"wrote {output}" in said.out
    assert "bad: " in said.err and "does not exist; train with" in said.err
    data = made_of(output.read_text(encoding="utf-8"))
    assert data["runs"][0]["diagnostics"] is not None
    assert data["runs"][1]["diagnostics"] is None and data["runs"][1]["curves"]["loss"]["step"]
    assert "holds no checkpoint" in data["runs"][1]["problems"]["text"]
    for name in ("depth_by_run.png", "training_by_depth.png"):
        assert (tmp_path / "png" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name the folder of at least one run, or add --demo"),
        (["nowhere"], "there is no folder nowhere"),
        (["nowhere", "--outpt=a"], "did you mean --output?"),
    ],
)
def test_what_cannot_be_reported_is_refused(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_demo_trains_the_pair_and_opens_the_page(tmp_path, monkeypatch, capsys):
    trained, opened = [], []
    monkeypatch.chdir(tmp_path)

    def train(arguments):
        name = re.search(r"configs/(\w+)\.py", arguments[0])[1]
        residual = "standard" if name.endswith("standard") else "block"
        trained.append((name, [a for a in arguments if a.startswith("--diagnostics")]))
        write_run(tmp_path / "runs" / name, residual=residual)
        return 0

    monkeypatch.setattr("train.report.demo.cli.main", train)
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert cli.main(["--demo"]) == 0
    assert [name for name, _ in trained] == ["quickstart_standard", "quickstart"]
    assert all(options == ["--diagnostics.every=50"] for _, options in trained)
    assert opened == [(tmp_path / "report.html").as_uri()]


def test_a_demo_that_is_stopped_returns_the_code_of_training(monkeypatch):
    monkeypatch.setattr("train.report.demo.cli.main", lambda arguments: 130)
    assert cli.main(["--demo"]) == 130


def test_pictures_say_why_losses_are_not_compared(run, tmp_path):
    other = dataclasses.replace(run, name="two", settings=run.settings | {"context": 16})
    assert len(draw([run, other], tmp_path / "png")) == 2
