"""docs/results.md is what the measured lines say, and a line can be measured again."""

import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture
def experiments(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import generality
    import results

    yield generality, results
    for name in ("cells", "generality", "known_truth", "known_truth_page", "results"):
        sys.modules.pop(name, None)


def test_the_page_is_drawn_from_the_lines(experiments):
    _, results = experiments
    assert results.PAGE.read_text(encoding="utf-8") == results.page()


@pytest.mark.parametrize("rule", ["cap:.05", "loop:.02", "dfm"])
def test_psi_is_remdm_where_sigma_is_at_most_one_minus_alpha_s(experiments, rule):
    generality, results = experiments
    again = generality.against_remdm(rule, 16)
    (stored,) = (
        line
        for line in results.lines("generality_remdm")
        if (line["rule"], line["steps"]) == (rule, 16)
    )
    assert again["largest_difference"] < 1e-14
    assert again["steps_beyond"] == stored["steps_beyond"]
    assert again["tv_remdm_to_data"] == pytest.approx(stored["tv_remdm_to_data"], abs=1e-12)


def test_a_cell_is_measured_once(experiments, tmp_path, monkeypatch):
    import cells

    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    ran = []
    for _ in range(2):
        cells.measure("squares", [{"x": 2}, {"x": 3}], lambda c: ran.append(c) or {"y": c["x"]})
    assert ran == [{"x": 2}, {"x": 3}]
    assert cells.lines("squares") == [{"x": 2, "y": 2}, {"x": 3, "y": 3}]


def test_at_the_entropy_of_a_cell_stands_the_cell(experiments):
    import known_truth_page

    found = known_truth_page.Found()
    where = ("duo++", "loop:.02", 256)
    for top_p in (0.9, 1):
        entropy = found.cells[*where, top_p]["sample_entropy"]
        between = found.at_entropy(*where, entropy)
        assert between.value == pytest.approx(found.excess(*where, top_p).value)
    assert found.at_entropy(*where, entropy + 1) is None
