"""The page as a reader meets it: opened from a file, by mouse and by keyboard."""

import dataclasses
import re

import numpy as np
import pytest

from tests.train.report.chromium import launched, opened
from tests.train.report.folders import invented, invented_text, other_data, write_run
from train.report.page import render
from train.report.payload import payload
from train.report.run import read_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


def with_text(folder, residual, block_size, num_sublayers, time):
    run = read_run(folder, folder.name)
    measured = invented(residual, block_size, num_sublayers, time=time)
    return dataclasses.replace(run, text=invented_text(measured))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Standard, Block (S = 4, a short last block) and Full, of 6 sub-layers."""
    folder = tmp_path_factory.mktemp("runs")
    standard = write_run(folder / "standard", residual="standard")
    return [
        read_run(standard, "standard"),
        with_text(write_run(folder / "block"), "block", 4, 6, 40),
        with_text(write_run(folder / "full", residual="full"), "full", None, 6, 40),
    ]


def written(runs, path):
    path.write_text(render(payload(runs)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    return written(runs, tmp_path_factory.mktemp("report") / "report.html")


def digits(text):
    """The number that a line begins with after its first word."""
    found = re.match(r"\w+ (-?[\d.e-]+):", text)
    assert found is not None, text
    return float(found[1])


# ------------------------------------------------------------------ opening


def test_a_deep_model_opens_within_two_seconds(browser, tmp_path):
    """129 reads of 129 sources, and 512 tokens to choose from."""
    folder = write_run(tmp_path / "deep", residual="full", num_layers=64)
    path = written([with_text(folder, "full", None, 128, 512)], tmp_path / "deep.html")
    seconds = []
    for _ in range(3):  # The machine may be busy with something else.
        with opened(browser, path) as page:
            seconds.append(page.evaluate("performance.now()") / 1000)
            if min(seconds) < 2:
                break
    assert min(seconds) < 2


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(browser, report, width, scheme):
    with opened(browser, report, width=width, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = np.mean([int(part) for part in re.findall(r"\d+", paper)])
        assert (brightness > 200) == (scheme == "light")
        # Every picture is there, and has something on it.
        assert page.locator(".notice").count() == 0
        assert page.locator("canvas").count() >= 10
        for figure in page.locator(".figure").all():
            assert figure.bounding_box()["height"] > 100
            assert figure.locator(".badge").count() >= 1


# ------------------------------------------------------------------ values


def test_values_on_hover_on_focus_and_in_tables_are_those_of_the_diagnostics(browser, runs, report):
    block = runs[1]
    with opened(browser, report) as page:
        section = page.locator("#weights")
        section.get_by_role("tab", name="block", exact=True).click()
        area, readout = section.locator(".heatmap-area"), section.locator(".readout")
        expected = block.diagnostics.arrays["depth_weights"]
        area.focus()
        # Down every column, and by hand into each row: blank cells are never stopped at.
        for read in range(7):
            area.press("Home")
            for source in range(len(block.diagnostics.reads[read].sources)):
                assert digits(readout.inner_text()) == pytest.approx(
                    expected[read, source], rel=1e-4, abs=1e-7
                )
                assert block.diagnostics.reads[read].sources[source] in readout.inner_text()
                area.press("ArrowRight")
            area.press("ArrowDown")

        # Cells are 30 pixels high; the names above them and on the left take the rest.
        box = section.locator("canvas").first.bounding_box()
        bottom = box["y"] + box["height"]
        page.mouse.move(box["x"] + 110, bottom - 15)
        assert digits(readout.inner_text()) == pytest.approx(expected[6, 0], rel=1e-4)
        page.mouse.move(box["x"] + 110, bottom - 45)
        assert digits(readout.inner_text()) == pytest.approx(expected[5, 0], rel=1e-4)

        section.locator("summary").first.click()
        section.locator(".values table").wait_for()
        cells = section.locator(".values tbody tr").all()
        shown = [[cell.inner_text() for cell in row.locator("td").all()] for row in cells]
        for row, values in zip(shown, expected, strict=True):
            for text, value in zip(row, values, strict=True):
                assert (
                    text == "" if np.isnan(value) else float(text) == pytest.approx(value, rel=1e-5)
                )


def test_one_token_is_that_of_the_capture_and_kinds_filter_the_rows(browser, runs, report):
    measured = runs[2].text.diagnostics.arrays["depth_weights_per_token"]
    with opened(browser, report) as page:
        section = page.locator("#weights")
        area, readout = section.locator(".heatmap-area"), section.locator(".readout")
        section.get_by_role("tab", name="one token").click()
        tokens = section.get_by_role("listbox")
        tokens.locator(".token").nth(7).click()
        area.focus()
        for _ in range(6):
            area.press("ArrowDown")
        area.press("End")
        assert digits(readout.inner_text()) == pytest.approx(measured[7, 6, 6], rel=1e-4)
        tokens.focus()
        tokens.press("ArrowRight")
        assert digits(readout.inner_text()) == pytest.approx(measured[8, 6, 6], rel=1e-4)
        assert "token 9" in section.locator(".provenance").first.inner_text()

        kinds = section.get_by_role("tablist", name="Which reads")
        kinds.get_by_role("tab", name="all reads").focus()
        for name, read in (("pre-attention", 0), ("pre-MLP", 1), ("final", 6)):
            page.keyboard.press("ArrowRight")
            assert kinds.get_by_role("tab", selected=True).inner_text() == name
            area.press("ArrowUp")
            area.press("Home")
            for _ in range(6):
                area.press("ArrowUp")
            assert digits(readout.inner_text()) == pytest.approx(measured[8, read, 0], rel=1e-4)
            kinds.get_by_role("tab", selected=True).focus()


def test_two_phases_end_with_the_weights_of_the_model(browser, runs, report):
    measured = runs[1].text.diagnostics.arrays
    with opened(browser, report) as page:
        figure = page.locator("#phases-figure")
        figure.get_by_label("Block", exact=True).select_option("0")
        figure.locator(".token").nth(5).click()
        slider = figure.get_by_role("slider")
        slider.press("End")
        assert "agree with those of the model" in figure.locator(".readout").inner_text()
        rows = figure.locator("table").first.locator("tbody tr")
        assert rows.count() == 4
        for read, row in enumerate(rows.all()):
            cells = [cell.inner_text() for cell in row.locator("td").all()]
            assert float(cells[0]) == pytest.approx(
                measured["logits_per_token"][5, read, 0], rel=1e-3
            )
            assert float(cells[1]) == pytest.approx(
                measured["lse_per_token"][5, read], rel=1e-3, abs=1e-6
            )
            if read:
                assert float(cells[4]) == pytest.approx(
                    measured["gate_per_token"][5, read], rel=1e-3
                )
            label = row.locator(".mix").last.get_attribute("aria-label")
            weights = [float(part.split()[-1]) for part in label.split(", ")]
            wanted = measured["depth_weights_per_token"][5, read]
            np.testing.assert_allclose(weights, wanted[np.isfinite(wanted)], rtol=1e-3)


# ------------------------------------------------------------------ controls


def test_players_obey_the_mouse(browser, report):
    with opened(browser, report) as page:
        for name in ("#block-figure", "#phases-figure", "#pipeline-figure"):
            figure = page.locator(name)
            position = figure.locator(".player-position")
            total = position.inner_text().split(" / ")[1]
            button = figure.get_by_role("button")
            button.filter(has_text="Step").click()
            button.filter(has_text="Step").click()
            assert position.inner_text() == f"3 / {total}"
            figure.get_by_label("Speed").select_option("4")
            button.filter(has_text="Play").click()
            page.wait_for_function(
                "([place, end]) => document.querySelector(place).textContent === end",
                arg=[f"{name} .player-position", f"{total} / {total}"],
            )
            assert button.filter(has_text="Pause").count() == 0  # It stops by itself at the end.
            figure.get_by_label("Speed").select_option("0.5")  # Slow enough to be met by a click.
            button.filter(has_text="Play").click()
            button.filter(has_text="Pause").click()
            assert "playing" not in figure.get_attribute("class")
            assert position.inner_text() == f"1 / {total}"
            button.filter(has_text="Step").click()
            button.filter(has_text="Reset").click()
            assert position.inner_text() == f"1 / {total}"


def test_players_obey_the_keys_wherever_the_focus_is(browser, report):
    with opened(browser, report, reduced_motion="reduce") as page:
        figure = page.locator("#pipeline-figure")
        position = figure.locator(".player-position")
        figure.scroll_into_view_if_needed()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert position.inner_text() == "3 / 8"
        page.keyboard.press("r")
        assert position.inner_text() == "1 / 8"
        page.evaluate("document.activeElement.blur()")
        before = page.evaluate("scrollY")
        page.keyboard.press(" ")
        page.wait_for_function(
            "document.querySelector('#pipeline-figure .player-position').textContent[0] > 1"
        )
        assert "playing" in figure.get_attribute("class")
        page.keyboard.press(" ")
        assert "playing" not in figure.get_attribute("class")
        stopped = position.inner_text()
        assert page.evaluate("scrollY") == before
        # A field keeps its own keys.
        field = figure.get_by_label("Tokens T")
        field.press("ArrowRight")
        field.press("r")
        assert position.inner_text() == stopped
        # Nothing moves by itself where motion is unwelcome.
        assert page.evaluate(
            "getComputedStyle(document.querySelector('.meter-now')).transitionDuration"
        ) in ("0s", "")


def test_every_control_can_be_reached_and_named(browser, report):
    with opened(browser, report) as page:
        page.keyboard.press("Tab")
        reached = set()
        for _ in range(150):
            name = page.evaluate(
                "() => { const e = document.activeElement; if (e === document.body) return null;"
                "e.dataset.reached = 1; return e.tagName; }"
            )
            if name is None:
                break
            reached.add(name)
            page.keyboard.press("Tab")
        missed = page.evaluate(
            "() => [...document.querySelectorAll('button, select, input, a[href], summary,"
            "[role=application], [role=listbox]')].filter(e => !e.dataset.reached"
            " && e.checkVisibility() && e.tabIndex >= 0).map(e => e.outerHTML.slice(0, 120))"
        )
        assert missed == []
        assert {"BUTTON", "SELECT", "INPUT", "A", "SUMMARY", "DIV"} <= reached


def test_fields_change_what_is_drawn(browser, report):
    with opened(browser, report) as page:
        figure = page.locator("#block-figure")
        said, counters = figure.locator(".readout"), figure.locator(".counters")
        assert "N = 2 blocks, the last of 2" in figure.inner_text()
        figure.get_by_label("Sub-layers L").fill("128")
        figure.get_by_label("Sub-layers L").press("Enter")
        figure.get_by_label("Block size S").fill("12")
        figure.get_by_label("Block size S").press("Enter")
        assert "N = 11 blocks, the last of 8" in figure.inner_text()
        assert "12 sources" in counters.inner_text() and "129 sources" in counters.inner_text()
        assert "computed" in figure.locator(".badge").inner_text()
        figure.get_by_role("slider").press("End")
        assert "Final read" in said.inner_text() and "12 sources" in said.inner_text()
        figure.get_by_role("tab", name="Full").click()
        assert "129 sources" in said.inner_text()
        figure.get_by_label("Block size S").fill("999")
        figure.get_by_label("Block size S").press("Enter")
        assert figure.get_by_label("Block size S").input_value() == "128"

        pipeline = page.locator("#pipeline-figure")
        assert "28 blocks" in pipeline.inner_text() and "22 blocks" in pipeline.inner_text()
        pipeline.get_by_label("Stages P").fill("1")
        pipeline.get_by_label("Stages P").press("Enter")
        pipeline.get_by_label("Virtual stages V").fill("1")
        pipeline.get_by_label("Virtual stages V").press("Enter")
        assert "0 blocks" in pipeline.inner_text()


def test_charts_read_out_their_values_by_key_and_by_hover(browser, runs, report):
    with opened(browser, report) as page:
        chart = page.locator("#hidden-norms .chart")
        area, values = chart.locator(".chart-area"), chart.locator(".chart-values")
        area.press("ArrowRight")
        area.press("ArrowRight")
        for run in runs:
            norm = run.diagnostics.arrays["read_norm"][1]
            assert f"{norm:.3f}"[:5] in values.inner_text()
        box = area.bounding_box()
        area.scroll_into_view_if_needed()
        area.hover(position={"x": box["width"] - 40, "y": 100})
        page.wait_for_function(
            "document.querySelector('#hidden-norms .chart-values').textContent"
            ".startsWith('7: final read')",
            timeout=3000,
        )


def test_the_theme_can_be_chosen(browser, report):
    with opened(browser, report, color_scheme="light") as page:
        paper = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(paper)
        page.get_by_role("button", name="Theme").click()
        assert page.evaluate(paper) == light
        page.get_by_role("button", name="Theme").click()
        assert page.evaluate(paper) != light


# ------------------------------------------------------------------ access, and what is missing


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (360, "dark")])
def test_axe_finds_no_serious_fault(browser, report, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with opened(browser, report, width=width, color_scheme=scheme) as page:
        for tab in page.get_by_role("tab", name="one token").all():
            tab.click()
        for summary in page.locator("summary").all()[:3]:
            summary.click()
        found = axe.Axe().run(page).response["violations"]
    faults = [
        f"{one['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
    assert faults == []


def test_what_is_missing_is_said_and_the_rest_is_drawn(browser, tmp_path):
    diverged = write_run(tmp_path / "diverged")
    text = (diverged / "diagnostics.jsonl").read_text()
    (diverged / "diagnostics.jsonl").write_text(
        text.replace(
            '"read_norm": {"axes": ["read"], "values": [',
            '"read_norm": {"axes": ["read"], "values": [null, ',
            1,
        )
    )
    bare = write_run(tmp_path / "bare", residual="standard", diagnostics=False)
    runs = [read_run(diverged, "diverged"), read_run(bare, "bare")]
    with opened(browser, written(runs, tmp_path / "report.html")) as page:
        norms = page.locator("#hidden-norms").inner_text()
        assert "Magnitude of the hidden state of diverged is missing." in norms
        assert "read_norm" in norms and "length 8, not 7" in norms
        assert "of bare is missing." in norms and "--diagnostics.every" in norms
        assert page.locator("#dilution canvas").count() == 1
        assert "Single tokens are missing." in page.locator("#weights").inner_text()
        assert "Logits of diverged are missing." in page.locator("#phases").inner_text()
        assert page.locator("#losses canvas").count() == 1
        assert "could not be drawn" not in page.locator("main").inner_text()


def test_a_lone_standard_run_has_no_reads_to_show(browser, tmp_path):
    run = read_run(write_run(tmp_path / "run", residual="standard"), "run")
    with opened(browser, written([run], tmp_path / "report.html")) as page:
        assert "a standard residual has no reads" in page.locator("#weights").inner_text()
        assert "No block to show." in page.locator("#phases").inner_text()
        assert page.locator("#block-figure svg .tile").count() == 6


def test_runs_on_other_data_are_not_shown_side_by_side(browser, runs, tmp_path):
    other = write_run(tmp_path / "other", data=other_data())
    both = [runs[1], read_run(other, "other")]
    with opened(browser, written(both, tmp_path / "report.html")) as page:
        for place in ("#hidden-norms", "#dilution", "#losses", "#comparison"):
            said = page.locator(place).inner_text()
            assert "data.source is stdlib in block, text in other" in said
        legend = page.locator("#losses .chart-values")
        assert "block, training" in legend.inner_text()
        assert "other, training" not in legend.inner_text()
        page.locator("#losses").get_by_role("tab", name="other").click()
        assert "other, training" in page.locator("#losses .chart-values").inner_text()
