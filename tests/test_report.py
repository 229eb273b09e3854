"""What is drawn from the records of a comparison: advice, table, figures and page."""

import base64
import json
import math
import re
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes
from test_replay import data_of, in_browser

from psidiff.data.images import write_png
from psidiff.evaluation.metric_result import UNKNOWN, MetricResult
from psidiff.experiment.report import page as page_module
from psidiff.experiment.report.conclusions import matches, recommend
from psidiff.experiment.report.figures import draw, draw_together
from psidiff.experiment.report.formatting import protocol, short
from psidiff.experiment.report.labels import reach, spread
from psidiff.experiment.report.page import markdown, table, write_report
from psidiff.experiment.report.plot_style import LIGHT
from psidiff.experiment.report.results import read
from psidiff.experiment.report.rows import choose


def figures(records, folder):
    """The files of the figures that a report has."""
    pictures = draw(read(records), LIGHT)
    write_report(records, folder)
    for picture in pictures:
        assert (folder / picture.name).read_bytes() == picture.png
    return [folder / picture.name for picture in pictures]


EVIL = "</script><b>pwned</b>\n& <!-- 'tis"


def record(kappa, steps, value, entropy=2.9, error=0.02, top_p=0.9, **more):
    measures = [
        {
            "name": "judge NLL",
            "value": value,
            "error": error,
            "unit": "nats a token",
            "protocol": {"judge": "gpt2-large", "max_length": 1024, "tokens": 900 + steps},
        },
        {"name": "distinct-2", "value": 0.25, "error": 0.01, "unit": "", "protocol": {"n": 2}},
    ]
    if entropy is not None:
        measures.append({"name": "entropy-1", "value": entropy, "error": 0.01, "unit": "nats"})
    return {
        "format_version": 1,
        "cell": {
            "model": more.pop("model", "shakespeare"),
            "steps": steps,
            "kappa": kappa,
            "top_p": top_p,
            "temperature": more.pop("temperature", None),
        },
        "kind": "text",
        "samples": 8,
        "length": 128,
        "seed": 0,
        "sampler": f"{kappa}, {steps} steps, top-p {top_p}",
        "nfe": steps + 1.0,
        "head_rows_per_token": 10.2,
        "seconds": 1.23,
        "tokens_per_pass": 128 / (steps + 1),
        "peak_memory_mib": None,
        "quality": "judge NLL",
        "better": "low",
        "entropy": None if entropy is None else "entropy-1",
        "measures": measures,
        "shown": [f"{kappa} of {steps}", EVIL],
        "psidiff": "0.1.0",
        "torch": "2.13.0",
        "device": "cpu",
        "machine": "2 x86_64 cores",
        "time": "2026-11-16T04:00:00+00:00",
        **more,
    }


def grid():
    """Three rules at three numbers of steps."""
    return [
        record(kappa, steps, 4 - gain - steps / 100, 2.9 - loss)
        for kappa, gain, loss in (
            ("ancestral", 0, 0),
            ("cap:0.02", 0.3, 0.02),
            ("fb", 0.5, 0.2),
        )
        for steps in (64, 16, 32)
    ]


def png(path):
    write_png(np.arange(64, dtype=np.uint8).reshape(8, 8), path)
    return base64.b64encode(path.read_bytes()).decode()


# --- numbers and table ---


def test_a_number_has_as_many_digits_as_its_error_allows():
    assert short(0.4893, 0.0213) == "0.49 ± 0.02"
    assert short(0.4893, 0.0121) == "0.489 ± 0.012"
    assert short(1234.5, 31.0) == "1,234 ± 31"
    assert [short(v) for v in (2.0, 2.864, 65, 0.0, None, float("nan"))] == (
        ["2.00", "2.86", "65", "0", "–", "–"]
    )


def test_an_error_that_nobody_knows_is_a_question_mark_and_an_exact_value_has_none():
    one = record("fb", 16, 3.0, error=None, samples=1)
    assert table([one])[1][3] == "3.00"
    one["measures"][0]["exact"] = False
    assert table([one])[1][3] == "3.00 ± ?"
    ancestral = record("ancestral", 16, 3.5, error=None)
    ancestral["measures"][0]["exact"] = False
    (said,) = recommend([ancestral, record("cap:0.02", 16, 3.2)])
    assert "no rule beats ancestral by more than the errors" in said
    assert reach(MetricResult("NLL", 3.0, UNKNOWN)) == (0.0, 0.0)


def test_models_and_rules_are_shown_in_the_order_in_which_records_name_them(tmp_path):
    rules = ("fb", "ancestral", "cap:0.02")
    records = [
        record(kappa, steps, 3.0, model=model)
        for model in ("shakespeare", "books")
        for steps in (64, 16)
        for kappa in rules
    ]
    rows = table(records)[1:]
    assert [row[0] for row in rows] == ["shakespeare"] * 6 + ["books"] * 6
    assert [row[1] for row in rows[:6]] == ["16"] * 3 + ["64"] * 3
    assert [row[2].split(",")[0] for row in rows] == [*rules] * 4
    parts = data_of(write_report(records, tmp_path).read_text(encoding="utf-8"))["parts"]
    assert [part["model"] for part in parts] == ["shakespeare", "books"]
    for part in parts:
        assert [row["words"][1].split(",")[0] for row in part["rows"]] == [*rules] * 2


def test_the_table_has_a_row_a_cell_sorted_by_steps_then_rule():
    head, *rows = table(grid())
    assert head[:5] == ["model", "steps", "sampler", "judge NLL (low is better)", "entropy-1"]
    assert [(row[1], row[2].split(",")[0]) for row in rows[:4]] == (
        [("16", "ancestral"), ("16", "cap:0.02"), ("16", "fb"), ("32", "ancestral")]
    )
    assert rows[-1] == [
        *("shakespeare", "64", "fb, top-p 0.9", "2.86 ± 0.02", "2.700 ± 0.010"),
        *("distinct-2 0.250 ± 0.010", "65", "1.97", "1.23", "–"),
    ]
    brief = table(grid(), brief=True)
    assert brief == [row[:5] + row[6:] for row in (head, *rows)]


@pytest.mark.parametrize("better, kappa", [("low", "fb"), ("high", "ancestral")])
def test_markdown_has_the_best_of_each_number_of_steps_in_bold(better, kappa):
    lines = markdown([{**each, "better": better} for each in grid()]).splitlines()
    bold = [line for line in lines if "**" in line]
    assert len(bold) == 3 and all(f"| {kappa}, top-p 0.9 | **" in line for line in bold)
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 2 + 9
    assert "**" not in markdown([record("fb", 16, 3.0)]), "one cell is not the best of any"
    other = record("fb", 16, 0.3, None, model="digits", quality="distinct-2")
    assert "| distinct-2 0.250 ± 0.010 |" in markdown([*grid(), other])
    assert "a\\|b" in markdown([record("fb", 16, 3.0, model="a|b")])


def test_a_protocol_in_words_leaves_out_what_is_empty_and_has_three_digits():
    made = [{"source": "", "n": 1, "interval": [0.3006418, 0.9544127], "windows": True}]
    assert protocol(made) == "n 1, interval 0.301 to 0.954, windows yes"
    assert protocol([{"rows": [12, 297]}]) == "rows 12 and 297"
    more = [*made, {"source": "", "n": 2, "interval": [0.5101, 1.0], "error": "none"}]
    assert protocol(more) == (
        "n 1 to 2, interval each within 0.301 to 1.00, windows yes, error none"
    )


def test_one_is_singular(tmp_path):
    one = record("ancestral", 1, 3.5, samples=1, length=1)
    page = write_report([one], tmp_path).read_text(encoding="utf-8")
    (part,) = data_of(page)["parts"]
    assert "1 sample of 1 token," in part["summary"] and "at 1 step." in part["summary"]
    assert part["advice"][0].startswith("shakespeare, 1 step: ")


# --- recommendations ---


def test_the_best_rule_is_one_that_keeps_the_entropy():
    first, *rest = recommend(grid())
    assert len(rest) == 2
    assert first == (
        "shakespeare, 16 steps: cap:0.02 (judge NLL 3.54 ± 0.02 against 3.84 ± 0.02 by "
        "ancestral; entropy 2.88 against 2.90; fb has 3.34 ± 0.02, but not this entropy)"
    )
    assert "steps: fb (" in recommend(grid(), tolerance=0.1)[0]
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        recommend(grid(), tolerance=-1.0)


def test_more_is_better_where_a_record_says_so():
    pair = [record("ancestral", 16, 0.35), record("cap:0.02", 16, 0.49, 2.88)]
    assert recommend([{**each, "better": "high"} for each in pair])[0] == (
        "shakespeare, 16 steps: cap:0.02 (judge NLL 0.49 ± 0.02 against 0.35 ± 0.02 by "
        "ancestral; entropy 2.88 against 2.90)"
    )
    assert "ancestral (judge NLL 0.35 ± 0.02; no rule does better)" in recommend(pair)[0]


@pytest.mark.parametrize("more", [{"error": 0.2}, {"samples": 1, "error": None}])
def test_a_difference_within_the_errors_is_called_none(more):
    ancestral = record("ancestral", 16, 3.5, **more)
    (said,) = recommend([ancestral, record("cap:0.02", 16, 3.2, **more)])
    assert "no rule beats ancestral by more than the errors; first is cap:0.02" in said
    (said,) = recommend([ancestral])
    assert "no other rule was run" in said


def test_without_ancestral_sampling_the_entropy_is_held_to_that_of_real_data():
    rules = [record("cap:0.02", 16, 3.5, 2.9), record("fb", 16, 3.0, 2.5)]
    (said,) = recommend(rules)
    assert said.startswith("shakespeare, 16 steps: no rule can be named, without ancestral")
    real = [{**each, "reference": {"entropy-1": 2.93, "judge NLL": 2.3}} for each in rules]
    assert recommend(real)[0].endswith(
        "cap:0.02 (judge NLL 3.50 ± 0.02; entropy 2.90 against 2.93 of real data; "
        "fb has 3.00 ± 0.02, but not this entropy)"
    )
    assert "no rule has an entropy within 3% of real data's 2.93" in recommend(real[1:])[0]


def test_where_no_entropy_was_measured_the_advice_says_so():
    pair = [record("ancestral", 16, 9.0, None), record("fb", 16, 5.0, None)]
    assert recommend(pair)[0].endswith("by ancestral; no entropy was measured)")


def test_each_top_p_is_compared_with_its_own_ancestral_sampling():
    records = [
        record(kappa, 16, value - 0.5 * (p is not None), 2.9 - 0.3 * (p is not None), top_p=p)
        for kappa, value in (("ancestral", 4.0), ("cap:0.02", 3.5))
        for p in (None, 0.9)
    ]
    cut, full, _ = recommend(records)
    assert "16 steps, top-p 0.9: cap:0.02 (judge NLL 3.00 ± 0.02 against 3.50" in cut
    assert "16 steps, no top-p: cap:0.02 (judge NLL 3.50 ± 0.02 against 4.00" in full


def line(*more):
    """Ancestral sampling by three top-p: its NLL falls by 2 for each nat of entropy."""
    ancestral = [
        record("ancestral", 16, 3 + 2 * h, h, top_p=p)
        for h, p in ((1.0, 0.8), (1.5, 0.9), (2.0, None))
    ]
    return [*ancestral, *more]


def test_at_equal_entropy_a_rule_meets_the_line_of_ancestral_sampling():
    *_, said = recommend(line(record("cap:0.02", 16, 6.0, 1.8), record("fb", 16, 5.3, 1.25)))
    assert said == (
        "shakespeare, 16 steps, at equal entropy: cap:0.02, top-p 0.9 (judge NLL 6.00 ± 0.02 "
        "against 6.60 ± 0.03 by ancestral between top-p 0.9 and no top-p; entropy 1.80; better "
        "by 0.60 ± 0.03; 2 of 2 settings ahead)"
    )
    # 3 + 2 H at H = 1.8; .4^2 + .6^2 of .02 each, and 2 * .01 of the three entropies
    square = 0.52 * 0.02**2 + 4 * 0.52 * 0.01**2 + 4 * 0.01**2
    cells = read(line(record("cap:0.02", 16, 6.0, 1.8)))
    (match,) = matches(cells)
    assert match.quality == pytest.approx(6.6) and match.gain == pytest.approx(0.6)
    assert match.error == pytest.approx(square**0.5)
    assert match.doubt == pytest.approx((square + 0.02**2) ** 0.5)
    near = matches(read(line(record("cap:0.02", 16, 6.6 - 2.5 * match.doubt, 1.8))))[0]
    assert near.settled(among=1) and not near.settled(among=10)  # 1.96 and 2.81 errors


def test_at_equal_entropy_a_tie_and_an_entropy_out_of_reach_are_said():
    *_, tie = recommend(line(record("fb", 16, 5.98, 1.5)))
    assert "no rule beats ancestral by more than the errors; first is fb, top-p 0.9" in tie
    *_, far = recommend(line(record("fb", 16, 2.0, 0.9)))
    assert far.endswith("no rule has one that ancestral sampling reaches (1.00 to 2.00)")
    assert not any("equal" in said for said in recommend(line()) + recommend(grid()))


def test_at_equal_entropy_a_gain_within_its_errors_does_not_hide_one_beyond_them():
    vague = record("fb", 16, 5.5, 1.5)
    vague["measures"] = [{**each, "error": 1.0} for each in vague["measures"]]
    *_, said = recommend(line(vague, record("cap:0.02", 16, 6.3, 1.8)))
    assert "at equal entropy: cap:0.02, top-p 0.9 (judge NLL 6.30" in said
    assert "better by 0.30 ± 0.03; 1 of 2 settings ahead" in said


def test_at_equal_entropy_more_is_better_where_a_record_says_so():
    records = line(record("fb", 16, 6.5, 1.5), record("dfm", 16, 5.0, 1.5))
    *_, said = recommend([{**each, "better": "high"} for each in records])
    assert "fb, top-p 0.9" in said and "better by 0.50 ± 0.04; 1 of 2 settings ahead" in said


# --- what cannot be reported on ---


def test_records_that_do_not_compare_are_refused_in_words(tmp_path):
    for report in (table, markdown, recommend):
        with pytest.raises(ValueError, match="there are no records to report on"):
            report([])
    for write in (figures, write_report):
        with pytest.raises(ValueError, match="there are no records to report on"):
            write([], tmp_path)
    one = record("fb", 16, 3.0)
    with pytest.raises(
        ValueError, match="judged by distinct-2 and judge NLL: report them apart"
    ):
        table([one, {**one, "quality": "distinct-2"}])
    with pytest.raises(ValueError, match="has no measure 'FID'"):
        table([{**one, "quality": "FID"}])
    with pytest.raises(ValueError, match="a record has format_version 3; this psidiff reads"):
        table([{**one, "format_version": 3}])


def test_figures_without_matplotlib_name_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'psidiff\[compare\]'"):
        figures(grid(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- figures ---


def test_the_error_bar_of_a_share_stays_between_0_and_1(tmp_path):
    all_right = MetricResult("solved", 1.0, 0.12, "", {"interval": [0.51, 1.0]})
    none_right = MetricResult("solved", 0.0, 0.12, "", {"interval": [0.0, 0.49]})
    assert reach(all_right) == (0.12, 0.0) and reach(none_right) == (0.0, 0.12)
    assert reach(MetricResult("FID", 0.1, 0.3)) == (0.3, 0.3) and reach(None) == (0.0, 0.0)
    shares = [record(kappa, 16, 1.0, error=0.12) for kappa in ("ancestral", "fb")]
    for share in shares:
        share["measures"][0]["protocol"]["interval"] = [0.51, 1.0]
    drawn = []

    def noted(self, x, y, yerr=None, xerr=None, **look):
        drawn.append(y + yerr[1])
        return whole(self, x, y, yerr=yerr, xerr=xerr, **look)

    whole = Axes.errorbar
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Axes, "errorbar", noted)
        draw(read(shares), LIGHT)
    assert len(drawn) == 4 and all(highest.tolist() == [1.0] for highest in drawn)


@pytest.mark.parametrize("wanted", [[0.0, 9.0, 20.0], [0.0] * 3, [0.0, 1.0, 8.0, 8.5, 30.0]])
def test_labels_are_spread_no_further_than_they_must(wanted):
    found = np.array(spread(wanted, 3.0))
    assert (np.diff(found) > 3 - 1e-9).all()
    assert found.mean() == pytest.approx(np.mean(wanted))
    if (np.diff(wanted) >= 3).all():
        assert found.tolist() == wanted


def test_each_model_has_a_quality_figure_and_with_an_entropy_a_frontier(tmp_path):
    plain = record("fb", 16, 9.0, None, model="org/digits $1$")
    broken = record("fb", 32, float("nan"))
    paths = figures([plain, *grid(), broken], tmp_path)
    names = ["quality-org-digits-1-.png", "quality-shakespeare.png", "frontier-shakespeare.png"]
    assert [path.name for path in paths] == names
    for path in paths:
        data = path.read_bytes()
        width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
        assert data.startswith(b"\x89PNG") and 10_000 < len(data) < 400_000
        assert 1000 < width < 1400 and 700 < height < 1400


def test_with_one_number_of_steps_a_frontier_joins_the_settings_of_a_rule(
    tmp_path, monkeypatch
):
    def drawn(records):
        """The x of each line's points, and all that is written at them."""
        lines, words = [], []

        def errorbar(self, x, y, **more):
            lines.append(list(x))
            return plain_bar(self, x, y, **more)

        def annotate(self, text, *args, **more):
            words.append(text)
            return plain_note(self, text, *args, **more)

        plain_bar, plain_note = Axes.errorbar, Axes.annotate
        with monkeypatch.context() as patched:
            patched.setattr(Axes, "errorbar", errorbar)
            patched.setattr(Axes, "annotate", annotate)
            draw(read(records), LIGHT)
        return lines, words

    records = line(*(record("fb", 16, 4 + h, h, top_p=p) for h, p in ((1.2, 0.8), (1.8, None))))
    lines, words = drawn(records)
    assert lines[-2:] == [[1.0, 1.5, 2.0], [1.2, 1.8]]
    assert {"ancestral", "fb", "0.8", "0.9", "none"} <= set(words)
    lines, words = drawn([*records, record("fb", 32, 4.0, 1.5)])
    assert [1.0] in lines and "fb, top-p 0.8" in words and "32" in words


# --- the report ---


def test_a_report_is_one_page_that_asks_nothing_of_the_network(tmp_path):
    path = write_report(
        [{**each, "reference": {"judge NLL": 2.3}} for each in grid()], tmp_path
    )
    page = path.read_text(encoding="utf-8")
    assert "http" not in page.replace("http-equiv", "") and " src=" not in page
    assert "Content-Security-Policy" in page and "aria-sort" in page
    assert "pwned</b>" not in page, "the text of samples is data, never markup"
    data = data_of(page)
    assert [cell["shown"][0] for cell in data["cells"][:3]] == (
        ["ancestral of 16", "cap:0.02 of 16", "fb of 16"]
    )
    assert all(cell["shown"][1] == EVIL for cell in data["cells"])
    (part,) = data["parts"]
    head = ["steps", "sampler", "judge NLL (low is better)", "entropy-1"]
    assert part["head"] == [*head, "NFE", "tokens a pass", "seconds", "MiB"]
    assert all(len(row["words"]) == len(row["keys"]) == 8 for row in part["rows"])
    assert all(cell["measures"][1]["name"] == "distinct-2" for cell in data["cells"])
    assert [len(figure["points"]) for figure in part["figures"]] == [9, 9]
    for figure in part["figures"]:
        files = [tmp_path / f"{kind}-shakespeare.png" for kind in ("quality", "frontier")]
        light, dark = map(base64.b64decode, figure["png"])
        assert light in [file.read_bytes() for file in files] and light != dark
        assert all(0 < x < 1 and 0 < y < 1 for _, x, y in figure["points"])
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for file in re.findall(r"\]\((.*?)\)", text):
        assert (tmp_path / file).exists()
    assert part["summary"] in text and part["advice"][0] in text


def test_the_summary_says_who_is_best_what_the_entropy_did_and_how_it_was_judged(tmp_path):
    def summary(records):
        page = write_report(records, tmp_path).read_text(encoding="utf-8")
        return data_of(page)["parts"][0]["summary"]

    found = summary(grid())
    assert found.startswith(
        "By judge NLL (low is better) the best sampler is fb at 16 steps (3.34 ± 0.02, "
        "ancestral 3.84 ± 0.02), 32 steps ("
    )
    assert "fb at 16 steps is the furthest, 6.9% below ancestral sampling's." in found
    assert found.endswith("128 tokens, top-p 0.9, seed 0, judge gpt2-large.")
    pair = [record("ancestral", 16, 3.5), record("fb", 16, 3.49, 2.91, seed=7)]
    found = summary(pair)
    assert "3.49 ± 0.02, ancestral 3.50 ± 0.02: within the errors" in found
    assert "entropy-1 stays within 0.3% of ancestral sampling's." in found
    assert found.endswith("not measured alike; they differ in seed.")


def test_a_page_says_how_each_number_was_measured(tmp_path):
    page = write_report(grid(), tmp_path).read_text(encoding="utf-8")
    measured = dict(data_of(page)["measured"])
    assert measured["judge NLL"] == (
        "in nats a token; judge gpt2-large, max length 1024, tokens 916 to 964"
    )
    assert measured["versions"] == "psidiff 0.1.0, torch 2.13.0"
    assert measured["machine"] == "cpu, 2 x86_64 cores" and "seed 0" in measured["a cell"]


def test_in_a_browser_rows_and_points_show_samples_and_heads_sort(tmp_path):
    sheet = png(tmp_path / "sheet.png")
    image = record("fb", 16, 9.0, None, model="digits", kind="image", shown=[{"png": sheet}])
    seen = in_browser(
        write_report([image, *grid()], tmp_path),
        """
        const rows = () => [...document.querySelectorAll("section:nth-child(2) tbody tr")];
        const sheet = document.getElementById("sheet");
        const head = name => [...document.querySelectorAll("section:nth-child(2) th button")]
          .find(e => e.textContent.startsWith(name));
        const column = i => rows().map(row => row.children[i].textContent);
        seen.hidden = sheet.hidden;
        rows()[1].click();
        seen.row = [text("#sheet h2"), ...texts("#sheet pre")];
        seen.measures = texts("#sheet dt");
        seen.marked = document.querySelectorAll("ellipse[aria-current]").length;
        const points = document.querySelectorAll("section:nth-child(2) ellipse");
        seen.points = points.length;
        const named = e => e.getAttribute("aria-label");
        const last = [...points].find(e => named(e).startsWith("64 steps, fb"));
        last.dispatchEvent(new MouseEvent("click", { bubbles: true }));
        seen.point = texts("#sheet pre")[0];
        seen.chosen = rows().findIndex(row => row.getAttribute("aria-current"));
        key("Escape");
        seen.closed = sheet.hidden;
        rows()[3].focus();
        key("Enter", document.activeElement);
        seen.entered = texts("#sheet pre")[0];
        head("judge NLL").click();
        seen.up = column(2);
        head("judge NLL").click();
        seen.down = column(2);
        seen.bold = texts(".best").length;
        document.querySelector("tbody tr").click();
        seen.image = document.querySelector("#sheet img").src;
        seen.wide = document.documentElement.scrollWidth <= innerWidth;
        """,
    )
    assert seen["hidden"] and seen["closed"] and seen["wide"]
    assert seen["row"] == (
        ["shakespeare: cap:0.02, 16 steps, top-p 0.9", "cap:0.02 of 16", EVIL]
    )
    assert seen["measures"][0] == "judge NLL3.54\u00a0±\u00a00.02 nats a token"
    assert seen["marked"] == 2 and seen["points"] == 18
    assert seen["point"] == "fb of 64" and seen["chosen"] == 8
    assert seen["entered"] == "ancestral of 32"
    values = [float(words.split()[0]) for words in seen["up"]]
    assert values == sorted(values) and seen["down"] == seen["up"][::-1] and seen["bold"] == 3
    assert seen["image"] == f"data:image/png;base64,{sheet}"


def test_in_a_browser_a_report_of_one_cell_opens_with_its_samples(tmp_path):
    one = json.loads(json.dumps(record("ancestral", 16, 3.5)))
    seen = in_browser(write_report([one], tmp_path), """seen.shown = texts("#sheet pre");""")
    assert seen["shown"] == ["ancestral of 16", EVIL]


# --- rows, as in the paper's tables ---


def judged(model, kappa, steps, perplexity, entropy, top_p=0.9, error=0.5):
    """A cell as the released protocol judges it."""
    made = record(kappa, steps, perplexity, entropy, error, top_p, model=model)
    value, *rest = made["measures"]
    value |= {"name": "generative perplexity", "unit": ""}
    nll = {**value, "name": "generative NLL", "value": math.log(perplexity)}
    nll |= {"unit": "nats a token", "error": error / perplexity}
    return {**made, "quality": value["name"], "measures": [value, nll, *rest]}


STEPS = (32, 64, 1024)
# Of the paper's table (Duo, p = .9): perplexity and entropy at these steps.
PUBLISHED = {
    "ancestral": ((44.24, 5.40), (40.08, 5.40), (34.79, 5.35)),
    "cap:.005": ((44.06, 5.41), (38.38, 5.39), (22.78, 5.24)),
    "rescale-released:.01": ((45.03, 5.41), (40.02, 5.40), (34.35, 5.34)),
    "rescale-released:.05": ((44.52, 5.41), (39.49, 5.40), (26.94, 5.28)),
    "loop:.01": ((52.12, 5.40), (40.27, 5.39), (20.32, 5.23)),
}


def published(model="duo", top_p=0.9, rows=PUBLISHED):
    return [
        judged(model, kappa, steps, *at, top_p)
        for kappa, row in rows.items()
        for steps, at in zip(STEPS, row, strict=True)
    ]


def chosen_rules(records):
    return [[row.first.kappa for row in each.rows] for each in choose(read(records))]


def test_the_chosen_row_is_the_nearest_in_entropy_and_among_equals_the_least_perplexed():
    (choice,) = choose(read(published()))
    assert [row.first.kappa for row in choice.rows] == ["ancestral", "rescale-released:.01"]
    assert choice.told == (
        "duo, top-p 0.9: rescale-released:.01 "
        "(its entropy is 0.01 from ancestral sampling's on average)"
    ), "though the paper highlights .05, which its own words do not give"
    equal = {
        "ancestral": ((40.0, 5.4), (30.0, 5.3), (20.0, 5.2)),
        "fb": ((35.0, 5.39), (29.0, 5.3), (19.0, 5.21)),
        "dfm": ((36.0, 5.41), (25.0, 5.3), (18.0, 5.19)),
        "cap:.02": ((9.0, 5.2), (9.0, 5.0), (9.0, 5.0)),
    }
    (choice,) = choose(read(published(rows=equal)))
    assert choice.rows[1].first.kappa == "dfm"
    assert choice.told.endswith("like that of 1 more, and it is the best of these)")


@pytest.mark.parametrize("seed", range(6))
def test_what_is_chosen_is_what_a_direct_computation_picks(seed):
    draw = np.random.default_rng(seed)
    rules = ("ancestral", "fb", "dfm", "cap:.02", "loop:.01", "cap:.1")
    shape = (2, 2, len(rules), len(STEPS))
    perplexities, entropies = draw.uniform(10, 60, shape), draw.normal(5.3, 0.02, shape)
    records = [
        judged(model, rule, steps, perplexities[i, j, r, s], entropies[i, j, r, s], top_p)
        for i, model in enumerate(("mdlm", "duo"))
        for r, rule in enumerate(rules)
        for s, steps in enumerate(STEPS)
        for j, top_p in enumerate((0.9, None))
    ]
    found = {
        (first.model, first.about["cell"]["top_p"]): each.rows[1].first.kappa
        for each in choose(read(records))
        for first in [each.rows[0].first]
    }
    assert len(found) == 4
    for i, model in enumerate(("mdlm", "duo")):
        for j, top_p in enumerate((0.9, None)):
            apart = np.abs(entropies[i, j, 1:] - entropies[i, j, :1]).mean(-1).round(2)
            logs = np.log(perplexities[i, j, 1:]).mean(-1)
            best = min(range(len(rules) - 1), key=lambda r: (apart[r], logs[r]))
            assert found[model, top_p] == rules[1 + best]
    for each in records:  # those of earlier runs are no candidates
        each["asked"] = each["cell"]["kappa"] in ("ancestral", "fb")
    assert chosen_rules(records) == [["ancestral", "fb"]] * 4


def test_rows_that_cannot_be_chosen_are_said():
    short_row = [judged("duo", "fb", 32, 20.0, 5.4)]
    (choice,) = choose(read(published() + short_row))
    assert "fb left out, with fewer steps" in choice.told
    assert chosen_rules(published("ar", rows={"left-to-right": PUBLISHED["ancestral"]})) == (
        [["left-to-right"]]
    )
    alone = {k: v for k, v in PUBLISHED.items() if k == "ancestral"}
    (choice,) = choose(read(published(rows=alone)))
    assert len(choice.rows) == 1 and "no other rule has its steps" in choice.told
    without = {k: v for k, v in PUBLISHED.items() if k != "ancestral"}
    (choice,) = choose(read(published(rows=without)))
    assert choice.rows == () and "without ancestral sampling" in choice.told
    assert choose(read([record("fb", 16, 9.0, None, kind="image")])) == []


@pytest.fixture
def only_together(monkeypatch):
    """No figures of single models, which take long."""
    monkeypatch.setattr(page_module, "draw", lambda *_: [])


@pytest.mark.usefixtures("only_together")
def test_the_table_of_rows_is_laid_out_as_the_paper_s(tmp_path):
    records = published() + published("runs/mdlm")
    records = [each for each in records if each["cell"]["kappa"] != "loop:.01"]
    page = write_report(records, tmp_path, chosen=True)
    data = data_of(page.read_text(encoding="utf-8"))
    paper = data["paper"]
    assert paper["head"] == ["model", "sampler", "32", "64", "1024"]
    assert paper["title"].endswith("generative perplexity (entropy-1) by steps, top-p 0.9")
    rows = {tuple(each["words"][:2]): each for each in paper["lines"]}
    assert list(rows)[:2] == [("duo", "ancestral"), ("duo", "cap:.005")]
    chosen = rows["duo", "rescale-released:.01"]
    assert chosen["words"][2:] == [
        "45.0 ± 0.5 (5.41)",
        "40.0 ± 0.5 (5.40)",
        "34.4 ± 0.5 (5.34)",
    ]
    assert [data["cells"][i]["brief"][:9] for i in chosen["cells"]] == (
        ["32 steps,", "64 steps,", "1024 step"]
    )
    assert [name for name, each in rows.items() if each["chosen"]] == (
        [(model, "rescale-released:.01") for model in ("duo", "mdlm")]
    )
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| **duo** | **rescale-released:.01** | **45.0" in text
    assert "![generative perplexity of duo and runs/mdlm against NFE" in text
    head = ["steps", "sampler", "generative perplexity (low is better)", "generative NLL"]
    assert data["parts"][0]["head"][:4] == head
    assert data["parts"][0]["rows"][0]["words"][3] == "3.790 ± 0.011"


def test_all_models_are_on_one_pair_of_axes_a_line_each_model_and_rule(tmp_path, monkeypatch):
    lines, words = [], []
    plain_bar, plain_note = Axes.errorbar, Axes.annotate

    def errorbar(self, x, y, **more):
        lines.append((list(x), list(y), more["color"], more["ls"]))
        return plain_bar(self, x, y, **more)

    def annotate(self, text, *args, **more):
        words.append(text)
        return plain_note(self, text, *args, **more)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    monkeypatch.setattr(Axes, "annotate", annotate)
    two = {k: PUBLISHED[k] for k in ("ancestral", "cap:.005")}
    cells = read(published("runs/duo", rows=two) + published("runs/mdlm", rows=two))
    (picture,) = draw_together(cells, LIGHT)
    assert picture.name == "quality-all.png" and picture.png.startswith(b"\x89PNG")
    names = [f"{model} {rule}" for model in ("duo", "mdlm") for rule in two]
    assert [word for word in words if word in names] == names
    assert lines[1][:2] == ([33, 65, 1025], [44.06, 38.38, 22.78])
    colours, dashes = [line[2] for line in lines], [line[3] for line in lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert dashes[0] == dashes[2] != dashes[1] == "-"
    assert len(picture.points) == 12 and {"5.40", "5.24"} <= set(words)
    assert draw_together(cells[:6], LIGHT) == []
    assert len(draw_together(cells[:6], LIGHT, chosen=True)) == 1
    other = record("fb", 16, 9.0, 2.0, model="digits", kind="image")
    assert len(draw_together(read([*published("duo"), other]), LIGHT)) == 0


@pytest.mark.usefixtures("only_together")
def test_in_a_browser_the_rows_of_the_paper_open_their_cells(tmp_path):
    records = published() + published("mdlm")
    seen = in_browser(
        write_report(records, tmp_path, chosen=True),
        """
        const cells = document.querySelectorAll("#paper tbody td[data-cell]");
        seen.cells = cells.length;
        cells[1].click();
        seen.opened = text("#sheet h2");
        seen.chosen = texts("#paper .chosen td:first-child");
        seen.points = document.querySelectorAll("#together ellipse").length;
        seen.wide = document.documentElement.scrollWidth <= innerWidth;
        """,
    )
    assert seen["cells"] == 30 and seen["chosen"] == ["duo", "mdlm"] and seen["wide"]
    assert seen["opened"] == "duo: ancestral, 64 steps, top-p 0.9"
    assert seen["points"] == 12


def test_presets_are_shown_as_what_they_are():
    """What all samplers share is left out, top-p stands where the grid has it."""
    levels = "schedule=loglinear:.01"
    said = [
        ("preset=paper-text-ancestral", f"ancestral steps=8 {levels}"),
        ("preset=paper-text-cap cap:.01 top_p=.9", f"cap:.01 steps=8 {levels} top_p=.9"),
    ]
    records = [
        record(words, 8, 3.0 - i, top_p=None, sampler=sampler)
        for i, (words, sampler) in enumerate(said)
    ]
    plain, cap = read(records)
    assert plain.ancestral and plain.name == "ancestral, no top-p"
    assert cap.name == "cap:.01, top-p 0.9" and not cap.ancestral
    cosine = record("x", 8, 1.0, top_p=None)
    cosine["cell"]["kappa"] = "preset=paper-text-ancestral schedule=cosine"
    cosine["sampler"] = "ancestral steps=8 schedule=cosine"
    first, _, last = read([*records, cosine])
    assert first.kappa == f"ancestral {levels}" and first.ancestral and last.ancestral
