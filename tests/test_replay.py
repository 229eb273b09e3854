"""Recorded runs as a page, and runs watched in the terminal."""

import base64
import html
import io
import json
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest
import torch
from rich.console import Console

from psidiff.cli import live_view
from psidiff.cli.live_view import LiveView
from psidiff.cli.main import replay
from psidiff.data.characters import Bytes, Characters
from psidiff.data.images import Pixels
from psidiff.data.sudoku import Sudoku, SudokuGrids
from psidiff.data.tokenizers import Subwords
from psidiff.html.replay import MOST, pieces, write_page
from psidiff.sampling import Step, Trace

LETTERS = Characters("abc \n<")
EVIL = "</script><b>"


def walk(tokens, routes, about):
    """A trace of these frames (N, B, L)."""
    trace, n = Trace(about), len(tokens)
    for i in range(n):
        trace(i, Step(1 - i / n, i / n, (i + 1) / n, 0.5), tokens[i], routes[i])
    return trace


def random_run(codec, num_steps=7, count=2, length=20, mask=False, **about):
    generator = torch.Generator().manual_seed(0)
    shape, size = (num_steps, count, length), codec.vocab_size + mask
    tokens = torch.randint(0, size, shape, generator=generator)
    routes = torch.randint(0, 3, shape, generator=generator)
    words = {"model": "toy", "sampler": "cap:0.005", "seed": 3, "codec": codec.describe()}
    return walk(tokens, routes, {**words, **about})


def puzzle_run():
    """One grid filled in rightly and one with a clash, the first row given."""
    grids = SudokuGrids(2, symmetries=False).grids.long()
    grids[1, 80] = grids[1, 79]
    given = (torch.arange(81) < 9).expand(2, 81)
    noise = torch.where(given, grids, 9)
    tokens = torch.stack([noise, torch.where(torch.arange(81) < 40, grids, 9), grids])
    routes = torch.stack([torch.zeros_like(noise), *(tokens[1:] != tokens[:-1]).long()])
    about = {"model": "sudoku", "sampler": "confident", "seed": 0}
    described = {"codec": Sudoku().describe(), "given": given.int().tolist()}
    return walk(tokens, routes, about | described)


def page_of(path, *traces):
    write_page(traces, path)
    return path.read_text(encoding="utf-8")


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def unpacked(text, dtype, shape):
    changes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)
    return np.bitwise_xor.accumulate(changes, axis=0)


@pytest.mark.parametrize("highest, bits", [(65534, 16), (65535, 32)])
def test_a_page_holds_each_token_and_route_even_those_not_made_yet(tmp_path, highest, bits):
    tokens = torch.randint(-1, 9, (5, 3, 4))
    tokens[2, 1, 1], tokens[0] = highest, -1
    routes = torch.randint(0, 3, tokens.shape)
    (run,) = data_of(page_of(tmp_path / "p.html", walk(tokens, routes, {})))
    unsigned, signed = (("<u2", "<i2"), ("<u4", "<i4"))[bits == 32]
    assert run["bits"] == bits
    held = unpacked(run["tokens"], unsigned, tokens.shape)
    expected = tokens.numpy().astype(signed).view(unsigned)
    assert (held == expected).all()
    assert (unpacked(run["routes"], "u1", tokens.shape) == routes.numpy()).all()
    ids = unpacked(run["ids"], unsigned, (-1,)).tolist()
    names = dict(zip(ids, run["pieces"], strict=True))
    assert names[highest] == str(highest) and names[2**bits - 1] == "·"
    assert set(ids) == set(expected.flatten().tolist()), "only tokens that occur"


def test_pages_say_what_the_runs_were(tmp_path):
    text = random_run(LETTERS, mask=True)
    pixels = Pixels(3, 2, 4, levels=5, classes=("cat", "dog"))
    image = random_run(pixels, length=24, labels=[1, 0])
    (words,), (image,), (puzzle,) = (
        data_of(page_of(tmp_path / "p.html", trace)) for trace in (text, image, puzzle_run())
    )
    assert (words["model"], words["sampler"], words["seed"]) == ("toy", "cap:0.005", 3)
    assert words["kind"] == "text" and words["pieces"] == [*"abc \n<_"]
    assert words["steps"][0] == [1, 0, 1 / 7, 0.5] and len(words["steps"]) == 7
    assert image["size"] == [3, 2, 4] and image["labels"] == ["dog", "cat"]
    assert puzzle["kind"] == "puzzle" and puzzle["pieces"] == [*"123456789."]
    given = unpacked(puzzle["given"], "u1", (1, 2, 81))
    assert given[..., :9].all() and not given[..., 9:].any()
    pair = data_of(page_of(tmp_path / "p.html", text, random_run(LETTERS, num_steps=3)))
    assert [len(run["steps"]) for run in pair] == [7, 3]


def test_a_rule_with_memory_has_no_number_for_kappa(tmp_path):
    trace = Trace()
    step = Step(1.0, 0.0, 1.0, lambda memory: 0.5)
    trace(0, step, torch.zeros(1, 2).long(), torch.ones(1, 2))
    trace.save(tmp_path / "a.trace")
    for each in (trace, Trace.load(tmp_path / "a.trace")):
        assert data_of(page_of(tmp_path / "p.html", each))[0]["steps"] == [[1, 0, 1, None]]


def test_a_page_shows_sixteen_samples_at_most(tmp_path):
    (run,) = data_of(page_of(tmp_path / "p.html", random_run(LETTERS, count=MOST + 3)))
    assert run["count"] == MOST + 3
    assert unpacked(run["tokens"], "<u2", (7, MOST, 20)).shape == (7, MOST, 20)


def test_a_page_in_which_every_token_changes_at_every_step_is_below_two_megabytes(tmp_path):
    alphabet = [chr(i) for i in range(0x100, 0x20000) if not 0xD800 <= i < 0xE000][:50_258]
    trace = random_run(Characters("".join(alphabet)), num_steps=256, count=4, length=256)
    path = tmp_path / "p.html"
    write_page([trace], path)
    assert path.stat().st_size < 2_000_000


def test_no_text_ends_the_script_it_is_in(tmp_path):
    trace = random_run(evil_codec(), model=EVIL, sampler="<!--<script>", labels=[EVIL, 0])
    page = page_of(tmp_path / "p.html", trace)
    plain = page_of(tmp_path / "q.html", random_run(LETTERS))
    for tag in ("<b", "<script", "</script", "<!--"):
        assert page.count(tag) == plain.count(tag)
    (run,) = data_of(page)
    assert run["model"] == EVIL and EVIL in run["pieces"] and run["labels"] == [EVIL, "0"]


def evil_codec():
    words = {EVIL: 0, "<!--<script>": 1, "x": 2}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "x"}
    return Subwords(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def test_control_characters_are_shown_and_not_sent():
    assert pieces(Bytes(), [0, 10, 27, 65, 127, 256, 257, -1]) == [*"␀\n␛A\ufffd¶_·"]


def test_replay_says_where_the_page_is_or_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    traces = [tmp_path / "a.trace", tmp_path / "b.trace"]
    for path in traces:
        random_run(LETTERS).save(path)
    replay(traces, out=tmp_path / "deep" / "[b]page.html")
    assert str(tmp_path / "deep" / "[b]page.html") in capsys.readouterr().out
    assert len(data_of((tmp_path / "deep" / "[b]page.html").read_text("utf-8"))) == 2
    (tmp_path / "wrong").write_text("hello")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", tokens=np.zeros(3))
    out = tmp_path / "p.html"
    for files, words in (
        (traces * 2, "one trace, or two side by side; got 4"),
        ([], "got 0"),
        ([tmp_path / "none.trace"], "there is no file .*none.trace"),
        ([tmp_path], "is a folder, and a file is needed"),
        ([tmp_path / "wrong"], "wrong is damaged: File is not a zip file"),
        ([tmp_path / "array.npy"], "array.npy is damaged: "),
        ([tmp_path / "other.npz"], "other.npz is damaged: it is not a trace of psidiff"),
    ):
        with pytest.raises(ValueError, match=words):
            replay(files, out=out)
    assert not out.exists()


# --- the page in a browser ---

RECORD = """<script>
  const failures = [], fail = event => failures.push(String(event.message || event.reason ||
    event.violatedDirective));
  for (const name of ["error", "unhandledrejection", "securitypolicyviolation"])
    addEventListener(name, fail);
  console.error = (...words) => failures.push(words.join(" "));
</script><style>"""
DRIVE = """<script>
  const texts = query => [...document.querySelectorAll(query)].map(e => e.textContent);
  const text = query => texts(query).join("");
  const key = (key, on = document.body, shiftKey = false) =>
    on.dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey, bubbles: true }));
  const slide = value => {
    slider.value = value;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  };
  (function wait() {
    if (!document.body.dataset.ready) return void setTimeout(wait, 10);
    const seen = {};
    try { SCRIPT } catch (error) { failures.push(String(error)); }
    const pre = document.createElement("pre");
    pre.id = "seen";
    pre.textContent = JSON.stringify({ ...seen, failures });
    document.body.append(pre);
  })();
</script></html>"""


def in_browser(page, script):
    """What a script saw on the page, which no error may have happened on."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("there is no chromium to open the page with")
    driven = page.with_name("driven.html")
    source = page.read_text(encoding="utf-8").replace("<style>", RECORD, 1)
    tail = DRIVE.replace("SCRIPT", script)
    driven.write_text(source.replace("</html>", tail), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [browser, *options, profile, "--dump-dom", driven.as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    dom = done.stdout.decode("utf-8")
    found = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)
    assert found, re.search(r'<p id="failed".*?</p>', dom, re.DOTALL)
    seen = json.loads(html.unescape(found[1]))
    assert seen["failures"] == []
    return seen


def history_of(trace, codec, sample, place):
    """Each step at which something happened to a token, and the stretches it was kept."""
    found = []
    for i, (tokens, routes) in enumerate(trace.frames(), start=1):
        piece = pieces(codec, [int(tokens[sample, place])])[0]
        shown, route = piece.replace("\n", "↵").replace(" ", "␣"), int(routes[sample, place])
        if found and route == 0 and found[-1][2:] == [shown, 0]:
            found[-1][1] = i
        else:
            found.append([i, i, shown, route])
    words = ("kept", "predicted", "renoised")
    return [f"{a if a == b else f'{a}–{b}'}{token}{words[r]}" for a, b, token, r in found]


def test_in_a_browser_text_moves_with_slider_and_keys_and_tokens_have_a_history(tmp_path):
    long, short = random_run(LETTERS, num_steps=9, model=EVIL), random_run(LETTERS, num_steps=5)
    page = tmp_path / "p.html"
    write_page([long, short], page)
    seen = in_browser(
        page,
        """
        const look = () => ({ at: +slider.value, texts: texts(".prose"), now: texts(".now") });
        seen.title = text("h1");
        seen.start = look();
        slide(4);
        seen.slid = look();
        seen.counts = texts("section:first-child .legend b");
        seen.green = texts("section:first-child .prose .predicted").length;
        key("ArrowRight");
        key("ArrowRight");
        seen.keyed = look();
        const tokens = document.querySelectorAll(".prose")[1].children;
        tokens[6].click();
        seen.clicked = texts("#history li");
        key("ArrowRight", tokens[6], true);
        key("Enter", document.activeElement);
        seen.entered = texts("#history li");
        seen.strip = texts("#history .strip i").length;
        key("Escape");
        seen.closed = document.getElementById("history").hidden;
        key(" ");
        seen.playing = text("#play");
        key(" ");
        seen.paused = text("#play");
        """,
    )

    def decoded(i, j):
        rows = (*long.tokens[i], *short.tokens[j])
        return [LETTERS.decode(row) for row in rows]

    assert seen["title"] == f"{EVIL} beside toy"
    assert seen["start"]["at"] == 8 and seen["start"]["texts"] == decoded(8, 4)
    assert seen["slid"]["at"] == 4 and seen["slid"]["texts"] == decoded(4, 2)
    assert seen["slid"]["now"][0] == "step 5 of 9t 0.556α 0.444 → 0.556κ 0.5"
    assert seen["slid"]["now"][1].startswith("step 3 of 5t 0.600")
    counts = [str((long.routes[4] == r).sum().item()) for r in range(3)]
    assert seen["counts"] == counts and str(seen["green"]) == counts[1]
    assert seen["keyed"]["at"] == 6 and seen["keyed"]["texts"] == decoded(6, 3)
    assert seen["clicked"] == history_of(long, LETTERS, 1, 6)
    assert seen["entered"] == history_of(long, LETTERS, 1, 7) and seen["strip"] == 9
    assert seen["closed"] and seen["playing"] == "Pause" and seen["paused"] == "Play"


def test_in_a_browser_a_board_marks_clues_and_conflicts(tmp_path):
    page, trace = tmp_path / "p.html", puzzle_run()
    write_page([trace], page)
    seen = in_browser(
        page,
        """
        seen.end = texts(".board");
        seen.captions = texts("figcaption");
        seen.given = texts(".board .given").length;
        seen.clash = [...document.querySelectorAll(".clash")].map(e => +e.dataset.place);
        slide(1);
        seen.middle = texts(".board");
        seen.marked = texts(".clash").length;
        """,
    )
    boards = [["".join(pieces(Sudoku(), row.tolist())) for row in z] for z in trace.tokens]
    assert seen["end"] == boards[2] and seen["middle"] == boards[1]
    assert seen["captions"][0] == "sample 1, solved" and "conflict" in seen["captions"][1]
    assert seen["given"] == 18 and {79, 80} <= set(seen["clash"])
    assert seen["marked"] == 0


def test_in_a_browser_an_image_is_drawn_pixel_by_pixel_and_tinted_by_route(tmp_path):
    codec, page = Pixels(3, 4, 6, levels=6), tmp_path / "p.html"
    trace = random_run(codec, length=72, num_steps=12, mask=True)
    write_page([trace], page)
    seen = in_browser(
        page,
        """
        const canvas = document.querySelectorAll(".picture canvas")[1];
        const data = () => [...canvas.getContext("2d").getImageData(0, 0, 6, 4).data];
        slide(5);
        seen.plain = data();
        document.getElementById("tint").click();
        seen.tinted = data();
        seen.film = document.querySelectorAll(".film")[1].children.length;
        const box = canvas.getBoundingClientRect(), at = { bubbles: true };
        at.clientX = box.left + box.width * 2.5 / 6;
        at.clientY = box.top + box.height * 1.5 / 4;
        canvas.dispatchEvent(new MouseEvent("click", at));
        seen.heading = text("#history h2");
        seen.history = texts("#history li");
        """,
    )
    image, tinted = (np.array(seen[k]).reshape(4, 6, 4)[..., :3] for k in ("plain", "tinted"))
    assert (image == codec.decode(trace.tokens[5][1])).all()
    touched = trace.routes[5][1].view(3, 4, 6).amax(0).numpy() > 0
    assert ((image != tinted).any(-1) == touched).all()
    assert seen["film"] == 10 and seen["heading"].startswith("Pixel in row 2, column 3")
    channels = [history_of(trace, codec, 1, 24 * c + 8) for c in range(3)]
    assert seen["history"] == [*channels[0], *channels[1], *channels[2]]


# --- watching a run in the terminal ---


def watched(trace, codec, batches=1, **options):
    console = Console(file=io.StringIO(), width=80, **options)
    given = trace.about.get("given")
    with LiveView(console, codec, given=given, total=len(trace)) as watch:
        for _ in range(batches):
            for i, (tokens, routes) in enumerate(trace.frames()):
                watch(i, trace.steps[i], tokens, routes)
    return console.file.getvalue()


TERMINAL = {"force_terminal": True, "color_system": "truecolor", "height": 24}


def test_without_a_terminal_four_pictures_of_the_first_batch_are_printed():
    trace = random_run(Characters("ab"), num_steps=10, mask=True)
    shown = watched(trace, Characters("ab"), batches=2)
    assert re.findall(r"step (\d+) of 10", shown) == ["3", "5", "8", "10"]
    assert "\x1b" not in shown
    for row in trace.tokens[9]:
        assert Characters("ab").decode(row) in shown and "_" in shown
    kept, predicted, renoised = ((trace.routes[9] == r).sum().item() for r in range(3))
    assert f"kept {kept}   predicted {predicted}   renoised {renoised}" in shown


def test_in_a_terminal_few_pictures_are_drawn_and_the_last_one_always(monkeypatch):
    monkeypatch.setattr(live_view, "_PAUSE", 1000.0)
    trace = random_run(Characters("ab"), num_steps=100, count=9, length=200)
    shown = watched(trace, Characters("ab"), batches=2, **TERMINAL)
    steps = re.findall(r"step (\d+) of 100", shown)
    assert set(steps) == {"1", "25", "50", "75", "100"} and steps[-1] == "100"
    last = shown[shown.rindex("step 100") :]
    assert "\x1b[32m" in last and "\x1b[31m" in last
    assert last.count("╭") == 4 and len(last.splitlines()) <= 24, "as many as fit"


def test_a_run_that_stops_early_leaves_its_last_picture():
    trace = random_run(Characters("ab"), num_steps=6)
    console = Console(file=io.StringIO(), width=80, **TERMINAL)
    with (
        pytest.raises(KeyboardInterrupt),
        LiveView(console, Characters("ab"), total=50) as watch,
    ):
        for i, (tokens, routes) in enumerate(trace.frames()):
            watch(i, trace.steps[i], tokens, routes)
        raise KeyboardInterrupt
    assert "step 6 of 50" in console.file.getvalue()


def test_a_board_has_box_lines_and_bold_clues():
    trace = puzzle_run()
    plain = watched(trace, Sudoku())
    assert plain.count("┌───────┬───────┬───────┐") == 2 * 3 and ". . ." in plain
    assert "\x1b[1;4m" in watched(trace, Sudoku(), **TERMINAL)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_half_blocks_in_colour_or_shades_without(channels):
    codec = Pixels(channels, 3, 2, levels=2)
    tokens = torch.tensor([[1, 0, 0, 1, 1, 2] * channels])[None]
    trace = walk(tokens, torch.ones_like(tokens), {})
    rows = [line.rstrip() for line in watched(trace, codec).splitlines()]
    assert rows[-3:] == ["██", "  ██", "██▒▒"]
    shown = watched(trace, codec, **TERMINAL)
    white, black, grey = "255;255;255", "0;0;0", "128;128;128"
    assert f"\x1b[38;2;{white};48;2;{black}m▀" in shown
    assert f"\x1b[38;2;{grey}" in shown
    wide = Pixels(channels, 300, 300)
    trace = random_run(wide, num_steps=1, count=1, length=wide.length)
    last = watched(trace, wide, **TERMINAL).split("step 1 of 1")[-1]
    assert max(line.count("▀") for line in last.splitlines()) <= 80
    assert len(last.splitlines()) <= 24


def test_tokens_without_a_codec_are_numbers():
    tokens = torch.tensor([[[-1, 7, 50_000]]])
    assert "· 7 50000" in watched(walk(tokens, torch.ones_like(tokens), {}), None)
