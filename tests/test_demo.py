"""The demo: what it prints is what it computed, and its page shows the same."""

import base64
import html
import io
import json
import re
import shlex
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from psidiff import load
from psidiff.cli import demo
from psidiff.cli.demo import sudoku
from psidiff.cli.demo.page import _sentence, curve
from psidiff.cli.demo.puzzles import Puzzles, Runs, Solver, side_by_side, verdict
from psidiff.cli.demo.sudoku import Boards
from psidiff.cli.main import app
from psidiff.data.sudoku import valid
from psidiff.evaluation.metric_result import wilson
from psidiff.sampling import Step, Trace

PSI = "constant:0@.05-.6"
TINY = demo.Sizes(puzzles=3, shown=1, longer=1, passage=3, fills=2, rows=2, drawing=3)


def run_tiny(folder, *arguments):
    """The command with little of everything: what it said, and its page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "Sizes", lambda: TINY)
        command = ["demo", "--steps", "8", "--out", str(folder), *arguments]
        done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output, folder / "index.html"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("demo"), "--seed", "3")


def data_of(page):
    source = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', source, re.DOTALL)[1])


def unpacked(text, shape, dtype="u1"):
    changes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)
    return np.bitwise_xor.accumulate(changes, axis=0)


def test_the_counts_that_are_printed_are_those_of_the_boards_on_the_page(made):
    said, page = made
    held = data_of(page)["sudoku"]
    counts = re.findall(r"(\d+) steps? +(\S+) +[█·]+ +(\d+) of 3 ", said)
    grid = [(n, name) for n in "1248" for name in ("ancestral", "Ψ")]
    assert [(n, name) for n, name, _ in counts] == grid
    clues = unpacked(held["clues"], (1, 3, 81))[0]
    solutions = unpacked(held["solutions"], (1, 3, 81))[0]
    assert valid(torch.from_numpy(solutions).long()).all()
    assert ((clues == solutions) | (clues == 255)).all()
    for run, (_, _, hits) in zip(held["runs"], counts[-2:], strict=True):
        frames = unpacked(run["tokens"], (9, 3, 81))
        assert ((frames == clues) | (clues == 255)).all(), "clues stay"
        assert run["solved"] == (frames[-1] == solutions).all(1).tolist()
        assert sum(run["solved"]) == int(hits)
        assert (frames[0] != frames[-1]).any()


def test_the_puzzles_have_one_solution_and_the_last_two_boards_are_printed(made):
    said, _ = made
    assert "step 5 of 8" in said and "the end" in said
    live = Puzzles.held_out(4, 3)[3:]
    assert said.count("┌───────┬───────┬───────┐") == 4
    ended = said[said.index("the end") :].splitlines()
    rows = [re.sub("[^1-9×]", "", line) for line in ended if line.startswith("│")][:9]
    right = "".join(str(i + 1) for i in live.solutions[0].tolist())
    for side in (0, 9):
        shown = "".join(row[side : side + 9] for row in rows)
        wrong = shown.count("×")
        assert all(c in ("×", r) for c, r in zip(shown, right, strict=True))
        assert f"{('ancestral', 'Ψ')[side > 0]}: {wrong or 'solved'}" in said


def test_the_prose_that_is_printed_is_that_of_the_page(made):
    said, page = made
    held = data_of(page)["passage"]
    tokens = unpacked(held["tokens"], (4, 256), "<u2")
    text = "".join(held["pieces"][i] for i in tokens[-1])
    assert text.startswith("The door opened, and")
    joined = re.sub(r"[\s│]+", "", said)
    assert re.sub(r"\s+", "", text.split("\n")[0]) in joined
    filled = re.findall(r"<p>(The old captain.*?)</p>", page.read_text(encoding="utf-8"))
    assert len(filled) == TINY.fills
    for each in filled:
        assert each.count("<mark>") == 2 and each.endswith(" before the storm.")


def test_equal_seeds_leave_equal_pages_and_others_other_ones(tmp_path):
    sizes, pages = demo.Sizes(1, shown=0, passage=1, fills=1, rows=1, drawing=1), []
    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        console = Console(file=io.StringIO())
        demo.run(console, tmp_path / name, 1, PSI, seed, sizes)
        pages.append(tmp_path / name / "index.html")
    one, again, other = pages
    assert one.read_bytes() == again.read_bytes()
    ours, theirs = data_of(one), data_of(other)
    for part, name in (
        ("sudoku", "clues"),
        ("sudoku", "runs"),
        ("passage", "tokens"),
        ("digits", "tokens"),
    ):
        assert ours[part][name] != theirs[part][name]


def test_the_page_is_one_file_that_asks_for_nothing(made):
    _, page = made
    source = page.read_text(encoding="utf-8")
    assert [path.name for path in page.parent.iterdir()] == ["index.html"]
    assert set(re.findall(r'(?:src|href)="([^"]*)"', source)) == {"data:,"}
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp|import\(", source)
    assert "default-src 'none'" in source and len(source) < 1_000_000
    assert not re.search(r"\{\{(?!8\}\})", source), "every blank of the template is filled"


def test_the_commands_of_the_page_are_commands(made):
    _, page = made
    source = page.read_text(encoding="utf-8")
    lines = [
        html.unescape(re.sub("<.*?>", "", line))
        for line in re.findall(r"<dt><code>(.*?)</code>", source)
    ]
    verbs = get_command(app)
    assert len(lines) >= 6
    for line in lines:
        program, verb, *arguments = shlex.split(line)
        command = verbs.commands[verb]
        assert program == "psidiff" and command.make_context(verb, arguments)
    clues = re.search(r"--given (\S+)", lines[0])[1]
    first = load("sudoku").codec.encode(clues)
    assert (first == Puzzles.held_out(1, 3).clues[0]).all()


def test_text_of_a_model_is_no_markup():
    assert _sentence([("<b>", True), ("&", False)]) == "&lt;b&gt;<mark>&amp;</mark>"


def runs_of(sampler, steps, hits, total=10):
    return Runs(sampler, steps, torch.arange(total) < hits, Trace())


def test_the_curve_has_a_point_for_each_share_and_its_interval():
    cells = [runs_of("ancestral", 8, 3), runs_of(PSI, 8, 3), runs_of("ancestral", 64, 2)]
    cells.append(runs_of(PSI, 64, 10))
    drawn = curve(cells)
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    bottom, top = 226, 16
    shares = [(bottom - y) / (bottom - top) for y in heights]
    assert shares == pytest.approx([0.3, 0.2, 0.3, 1.0], abs=1e-3)
    bars = re.findall(r'class="interval" d="M[\d.]+ ([\d.]+)V([\d.]+)"', drawn)
    for (low, high), hits in zip(bars, (3, 2, 3, 10), strict=True):
        ends = [(bottom - float(y)) / (bottom - top) for y in (low, high)]
        assert ends == pytest.approx(wilson(hits, 10), abs=1e-3)
    places = re.findall(r'class="name" x="[\d.]+" y="([\d.]+)"', curve(cells[:2]))
    assert abs(float(places[0]) - float(places[1])) >= 15.9, "names do not hide one another"


def test_the_verdict_counts_the_puzzles_that_only_one_solves():
    ancestral = Runs("ancestral", 64, torch.tensor([1, 1, 0, 0]).bool(), Trace())
    psi = Runs(PSI, 64, torch.tensor([1, 0, 1, 1]).bool(), Trace())
    words = verdict(ancestral, psi)
    assert "solves 2 of the 4 puzzles and Ψ solves 3" in words
    assert "Ψ alone solves 2 of them, ancestral sampling alone 1." in words


def test_puzzles_shared_out_over_cores_are_solved_as_on_one():
    model, puzzles, seen = load("sudoku", "cpu", torch.float64), Puzzles.held_out(5, 0), []

    def on_step(i, step, z, route):
        seen.append(len(z))

    one, three = (Solver(model, 0, n).solve_many(puzzles, 4, PSI, on_step) for n in (1, 3))
    assert sorted(seen) == [1] * 5 + [2] * 10 + [5] * 5
    assert (one.solved == three.solved).all()
    for ours, theirs in zip(one.trace.tokens, three.trace.tokens, strict=True):
        assert (ours == theirs).all()


def test_what_stops_one_part_stops_the_others():
    parts, step = [torch.zeros(1), torch.ones(1)], Step(1.0, 0.0, 1.0)
    steps = []

    def work(part, on_step):
        for i in range(1000):
            on_step(i, step, part, part)
            time.sleep(0.001)

    def on_step(i, step, z, route):
        steps.append(z.item())
        if z == 0 and i == 3:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        side_by_side(work, parts, on_step)
    assert 0 < steps.count(1) < 500


# --- two boards in the terminal ---


def two_boards(monkeypatch, **options):
    """A run of three frames beside itself: a cell that is wrong turns right in the last."""
    monkeypatch.setattr(sudoku, "_SECONDS", 0.0)
    puzzle = Puzzles.held_out(1, 0)
    solution, free = puzzle.solutions[0], int((puzzle.clues[0] < 0).nonzero()[0])
    wrong = solution.clone()
    wrong[free] = (wrong[free] + 1) % 9
    done, frames = Trace(), (wrong, wrong, solution)
    for i, frame in enumerate(frames):
        done(i, Step(1 - i / 3, i / 3, (i + 1) / 3), frame[None], torch.zeros(1, 81))
    console = Console(file=io.StringIO(), width=80, **options)
    with Boards(console, puzzle.clues[0], solution, done) as view:
        for i, frame in enumerate(frames):
            view(i, done.steps[i], frame[None], torch.zeros(1, 81))
    return console.file.getvalue(), str(int(wrong[free]) + 1), str(int(solution[free]) + 1)


def test_in_a_file_wrong_cells_are_crosses(monkeypatch):
    shown, _, _ = two_boards(monkeypatch)
    assert shown.count("×") == 2 + 2, "one on each board halfway, one in each legend"
    assert "step 2 of 2" in shown and shown.count("Ψ: solved") == 1 and "\x1b" not in shown


def test_in_a_terminal_a_wrong_cell_is_red_and_one_that_turned_right_is_green(monkeypatch):
    colours = {"force_terminal": True, "color_system": "standard"}
    shown, wrong, right = two_boards(monkeypatch, **colours)
    assert f"\x1b[31m{wrong}\x1b[0m" in shown
    last = shown[shown.rindex("the end") :]
    assert f"\x1b[7;32m{right}\x1b[0m" in last and last.count("\x1b[31m") == 1, "the legend"


# --- what a user can get wrong ---


def test_a_folder_that_cannot_be_written_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="cannot be written into"):
        demo.run(Console(), tmp_path, 8, PSI, 0)


# --- the page in a browser ---


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    pytest.importorskip("fcntl", reason="the browser is driven over pipes, as Unix has them")
    from browser import Browser

    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def visit(browser, page, width=1280, scheme="light", motion="reduce"):
    browser.failures.clear()
    browser.size(width, 900)
    features = {"prefers-reduced-motion": motion, "prefers-color-scheme": scheme}
    told = [{"name": name, "value": value} for name, value in features.items()]
    browser.send("Emulation.setEmulatedMedia", features=told)
    browser.open(page.as_uri())
    browser.until("document.body.dataset.ready === '1'")
    browser.do("globalThis.texts = q => all(q).map(e => e.textContent)")


def seen_boards(browser):
    return [*map("".join, zip(*[iter(browser.do("texts('.board span')"))] * 81, strict=True))]


def test_in_a_browser_boards_follow_slider_keys_and_the_chosen_puzzle(made, browser):
    _, page = made
    held = data_of(page)["sudoku"]
    clues, right = (unpacked(held[k], (1, 3, 81))[0] for k in ("clues", "solutions"))
    runs = [unpacked(run["tokens"], (9, 3, 81)) for run in held["runs"]]
    visit(browser, page)

    def expect(frame, puzzle):
        boards = ["".join(str(i + 1) for i in run[frame, puzzle]) for run in runs]
        assert seen_boards(browser) == boards
        wrong = [int((run[frame, puzzle] != right[puzzle]).sum()) for run in runs]
        assert browser.do("all('.board .wrong').length") == sum(wrong)
        before = max(frame - 1, 0)
        fresh = sum(int((run[frame, puzzle] != run[before, puzzle]).sum()) for run in runs)
        assert browser.do("all('.board .fresh').length") == fresh

    alone = [b and not a for a, b in zip(*(run["solved"] for run in held["runs"]), strict=True)]
    first = alone.index(True) if any(alone) else 0
    expect(8, first)
    assert browser.do("all('.board .clue').length") == 2 * sum(clues[first] < 9)
    browser.key("ArrowLeft", 37)
    browser.key("ArrowLeft", 37)
    expect(6, first)
    browser.do("const s = players[0].slider; s.value = 2; s.dispatchEvent(new Event('input'))")
    expect(2, first)
    assert browser.do("texts('#solving output')") == ["step 3 of 8"]
    browser.key("ArrowRight", 39)
    expect(3, first)
    browser.do("find('next').click()")
    expect(8, (first + 1) % 3)
    browser.do("all('.tiles i')[2].click()")
    expect(8, 2)
    assert browser.do("find('puzzle').value") == "2" and browser.failures == []


def test_in_a_browser_prose_and_digits_are_those_of_the_data(made, browser):
    _, page = made
    held = data_of(page)
    visit(browser, page)
    tokens = unpacked(held["passage"]["tokens"], (4, 256), "<u2")
    for frame in (3, 0):
        browser.do(f"players[1].go({frame})")
        text = "".join(held["passage"]["pieces"][i] for i in tokens[frame])
        assert browser.do("find('passage').textContent") == text
    pixels = unpacked(held["digits"]["tokens"], (4, 20, 64))[-1].astype(int)
    alpha = browser.do(
        "return [...Array(20 * 64).keys()].map(i => { const d = Math.floor(i / 64);"
        " const x = (d % 10) * 72 + 8 * (i % 8) + 8, y = Math.floor(d / 10) * 72"
        " + 8 * Math.floor(i % 64 / 8) + 8;"
        " return find('digits').getContext('2d').getImageData(x, y, 1, 1).data[3]; })"
    )
    assert np.abs(np.array(alpha).reshape(20, 64) - pixels * 255 / 16).max() < 2
    assert browser.failures == []


def test_in_a_browser_the_puzzle_plays_by_itself_unless_motion_is_unwanted(made, browser):
    _, page = made
    visit(browser, page)
    assert browser.do("texts('.play')") == ["Play"] * 3
    visit(browser, page, motion="no-preference")
    assert browser.do("texts('.play')[0]") == "Pause"
    browser.do("players[0].stop(); players[0].seconds = .2; players[0].play()")
    browser.until("players[0].timer === null && players[0].at === players[0].last")
    browser.key(" ", 32, text=" ")
    assert browser.do("texts('.play')")[0] == "Pause"
    browser.key(" ", 32, text=" ")
    assert browser.do("texts('.play')")[0] == "Play" and browser.failures == []


@pytest.mark.parametrize("width, scheme", [(390, "light"), (390, "dark"), (1280, "dark")])
def test_in_a_browser_nothing_is_wider_than_the_window(made, browser, width, scheme):
    _, page = made
    visit(browser, page, width, scheme)
    assert browser.do("document.documentElement.scrollWidth") <= width
    paper = browser.do("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 300) == (scheme == "dark")
    assert browser.failures == []


@pytest.mark.slow
def test_the_whole_demo_solves_more_by_psi_and_tells_it(tmp_path):
    command = [sys.executable, "-m", "psidiff", "demo", "--out", str(tmp_path / "d")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = re.findall(r"64 steps +(\S+) +[█·]+ +(\d+) of 50 ", done.stdout)
    (_, ancestral), (_, psi) = counts
    assert int(psi) > int(ancestral), done.stdout
    assert "Ψ: solved" in done.stdout
    page = (tmp_path / "d" / "index.html").read_text(encoding="utf-8")
    assert f"<b>{ancestral}</b> of 50 solved" in page and f"<b>{psi}</b> of 50 solved" in page
