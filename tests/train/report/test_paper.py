"""The quoted numbers against each other."""

import numpy as np
import pytest

from train.report.paper import load_paper

PAPER = load_paper()
TABLES = [name for name in PAPER if name != "paper"]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_says_where_it_is_from(name):
    assert PAPER[name]["source"].startswith(f"arXiv:{PAPER['paper']['arxiv']}v1, section ")
    assert PAPER[name]["caption"] and PAPER[name]["rows"]


def test_the_link_leads_to_the_paper():
    assert PAPER["paper"]["url"] == f"https://arxiv.org/abs/{PAPER['paper']['arxiv']}"


def test_differences_of_benchmarks_are_those_of_their_scores():
    rows = PAPER["benchmarks"]["rows"]
    assert len({row["name"] for row in rows}) == 15
    for row in rows:
        assert row["difference"] == pytest.approx(row["attnres"] - row["baseline"], abs=1e-9)
    # The paper's text: nowhere worse, and GPQA-Diamond gains most.
    assert min(row["difference"] for row in rows) == 0
    assert max(rows, key=lambda row: row["difference"])["name"] == "GPQA-Diamond"


def test_differences_of_ablations_are_those_of_their_losses():
    ablations = PAPER["ablations"]
    for row in ablations["rows"]:
        assert row["difference"] == pytest.approx(row["loss"] - ablations["baseline"], abs=1e-9)
    assert ablations["rows"][0]["loss"] == ablations["baseline"]


def loss_of(name):
    return next(row["loss"] for row in PAPER["ablations"]["rows"] if row["name"].startswith(name))


def test_tables_that_hold_the_same_experiment_agree():
    model_436m = next(row for row in PAPER["scaling"]["rows"] if row["parameters_million"] == 436)
    by_size = {row["block_size"]: row["loss"] for row in PAPER["block_size"]["rows"]}
    assert model_436m["baseline"] == PAPER["ablations"]["baseline"]
    assert model_436m["full"] == loss_of("Full AttnRes") == by_size[1]
    assert model_436m["block"] == loss_of("Block, S = 4") == by_size[4]
    assert model_436m["mhc"] == loss_of("mHC")


def test_block_sizes_divide_the_32_sublayers():
    for row in PAPER["block_size"]["rows"]:
        assert row["block_size"] * row["blocks"] == 32


@pytest.mark.parametrize("kind", ["baseline", "block", "full"])
def test_fits_are_those_of_the_losses_in_the_table(kind):
    scaling = PAPER["scaling"]
    fit = scaling["fits"][kind]
    assert fit["A"] == pytest.approx(fit["A_figure"], abs=6e-4)
    assert fit["a"] == pytest.approx(fit["a_figure"], abs=6e-4)
    compute, loss = np.array([(row["compute"], row[kind]) for row in scaling["rows"]]).T
    slope, intercept = np.polyfit(np.log(compute), np.log(loss), 1)
    # The table has its losses to 5e-4 and its compute from another column of the paper.
    assert fit["A_figure"] == pytest.approx(np.exp(intercept), abs=2e-3)
    assert fit["a_figure"] == pytest.approx(-slope, abs=5e-4)


def test_the_advantage_is_that_of_the_fits():
    advantage, fits = PAPER["scaling"]["advantage"], PAPER["scaling"]["fits"]
    for kind in ("baseline", "block"):
        predicted = fits[kind]["A_figure"] * advantage["compute"] ** -fits[kind]["a_figure"]
        assert predicted == pytest.approx(advantage[kind], abs=2e-3)
    # How much more compute the baseline needs for Block's loss.
    needed = (fits["baseline"]["A_figure"] / advantage["block"]) ** (
        1 / fits["baseline"]["a_figure"]
    )
    assert needed / advantage["compute"] == pytest.approx(advantage["times"], abs=0.05)


def test_memory_access_follows_its_formulas():
    settings = PAPER["memory_access"]["settings"]
    L, N, S, m = (settings[name] for name in ("L", "N", "S", "m"))
    assert N * S == L
    assert [row["widths"] for row in PAPER["memory_access"]["rows"]] == [
        3,
        8 * m + 2,
        S + N,
        N / S + 5,
    ]
