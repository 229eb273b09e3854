"""The page of the server in a browser: what a person sees, clicks and types."""

import json

import numpy as np
import pytest
import torch
from serving import LETTERS, serving, slow, tiny, tiny_images, tiny_puzzle

pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("fcntl", reason="the browser is driven over pipes, as Unix has them")

from browser import Browser

SEEN = """
  const texts = query => [...document.querySelectorAll(query)].map(e => e.textContent);
  const text = query => texts(query).join("");
  const settled = () => !halted && runs.length > 0;
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def text_model():
    return tiny(dtype=torch.float64)


@pytest.fixture(scope="module")
def text_page(text_model):
    with serving(text_model, steps=12) as (address, _):
        yield address


def visit(browser, address, width=1200):
    browser.failures.clear()
    browser.size(width, 900)
    browser.open(f"{address}/")
    browser.until("document.body.dataset.ready === '1'")
    browser.do(SEEN.replace("const ", "globalThis."))


def put(browser, **values):
    """Type into fields by their ids."""
    for name, value in values.items():
        browser.do(f"find({name!r}).focus(); find({name!r}).value = ''")
        browser.type(str(value))


def choose(browser, sampler, **values):
    """The fields of the first sampler, or the second."""
    for name, value in values.items():
        place = f"find('samplers').children[{sampler}].querySelector('[name={name}]')"
        browser.do(f"{place}.value = {json.dumps(value)}")


def generate(browser):
    browser.do("find('go').click()")
    browser.until("settled()")
    assert browser.do("find('error').textContent") == ""


def look(browser):
    return browser.do("texts('.prose')")


def test_a_text_is_generated_scrubbed_and_played(browser, text_page, text_model):
    visit(browser, text_page)
    assert browser.do("text('h1')") == "tiny"
    assert browser.do("text('#about')") == "text · 24 tokens · uniform noise"
    put(browser, prompt="abc ", length=16, count=2, seed=7)
    browser.key("Enter", 13, modifiers=2)  # Ctrl + Enter
    browser.until("settled()")
    options = {"prompt": "abc ", "length": 20, "seed": 7, "record": True}
    made = text_model.sample(2, 12, **options)
    assert look(browser) == made.text
    frames = list(made.trace.frames())
    assert browser.do("+slider.max") == 12 and browser.do("+slider.value") == 12
    browser.do("slider.focus()")
    for _ in range(5):
        browser.key("ArrowLeft", 37)
    tokens, routes = frames[7]
    assert look(browser) == [LETTERS.decode(row) for row in tokens]
    assert browser.do("text('.now')").startswith("step 8 of 12t 0.417")
    assert "steps=12" in browser.do("text('#runs h2')")
    assert browser.do("text('#runs .soft')") == "seed 7 · 12 steps and a last one · 20 tokens"
    browser.do("go(12)")
    assert browser.do("text('.now')").startswith("the last stept 0.000")
    browser.do("go(7)")
    free = torch.arange(20) >= 4
    counts = [int(((routes == r) & free).sum()) for r in range(3)]
    assert browser.do("texts('.legend b')") == [*map(str, counts), "8"]
    for number, name in ((1, "predicted"), (2, "renoised")):
        assert browser.do(f"texts('.prose .{name}').length") == counts[number]
    assert browser.do("texts('.prose .given').join('')") == "abc abc "
    browser.do("document.activeElement.blur()")
    browser.key(" ", 32, " ")
    assert browser.do("text('#play')") == "Pause"
    browser.until("text('#play') === 'Play' && position === 12")
    browser.key("ArrowLeft", 37)
    assert browser.do("+slider.value") == 11
    assert browser.failures == []


def test_a_text_is_seen_to_form_and_can_be_stopped(browser):
    with serving(slow(0.1), steps=200) as (address, app):
        visit(browser, address)
        browser.do("find('go').click()")
        browser.until("made(runs[0]) > 3")
        seen = set()
        for _ in range(4):
            seen.add((browser.do("text('.prose')"), browser.do("text('.now')")))
            browser.until(f"made(runs[0]) > {browser.do('made(runs[0])') + 2}")
        assert len(seen) == 4, "another text each time"
        assert browser.do("live") and browser.do("position < last")
        browser.do("slider.value = 1; slider.dispatchEvent(new Event('input'))")
        assert browser.do("text('.now')").startswith("step 2 of 200")
        browser.key("Escape", 27)
        browser.until("settled()")
        assert browser.do("text('#status')") == "stopped"
        assert browser.do("text('.now')").startswith("step 2 of 200"), (
            "it stays where one looks"
        )
        while app.state.engine.running:
            pass
        assert not browser.do("find('save-replay').disabled")
    assert browser.failures == []


def test_two_samplers_stand_side_by_side_with_the_same_seed(browser, text_page, text_model):
    visit(browser, text_page)
    put(browser, seed=3)
    browser.do("find('compare').click()")
    choose(browser, 0, kappa="cap:.1", steps=9, top_p=0.9)
    choose(browser, 1, predictor="confident", steps=5)
    generate(browser)
    first = text_model.sample(1, 9, "cap:.1", top_p=0.9, seed=3)
    second = text_model.sample(1, 5, "ancestral", predictor="confident", seed=3)
    assert look(browser) == [*first.text, *second.text]
    heads = browser.do("texts('#runs h2')")
    assert heads[0].startswith("cap:.1 steps=9") and "confident" in heads[1]
    left, right = browser.do("[...find('runs').children].map(e => e.getBoundingClientRect().x)")
    assert left < right
    browser.do("go(5)")
    assert [now[:6] for now in browser.do("texts('.now')")] == ["step 6", "step 4"]
    assert browser.failures == []


def test_a_long_text_says_which_window_is_made(browser, text_page):
    visit(browser, text_page)
    put(browser, length=40)
    generate(browser)
    facts = "seed 0 · 12 steps and a last one in each of 3 windows · 40 tokens"
    assert browser.do("text('#runs .soft')") == facts
    for place, words in (
        (0, "window 1 of 3, step 1 of 12"),
        (12, "window 1 of 3, the last step"),
        (13, "window 2 of 3, step 1 of 12"),
        (38, "window 3 of 3, the last step"),
    ):
        browser.do(f"go({place})")
        assert browser.do("text('.now span:first-child')") == words
    assert browser.failures == []


def test_blanks_are_filled_in(browser, text_page, text_model):
    visit(browser, text_page)
    template = "ab {{6}}\nef{{4}}."
    put(browser, prompt=template, seed=2)
    generate(browser)
    assert look(browser) == text_model.sample(1, 12, infill=template, seed=2).text
    assert browser.do("texts('.prose .given').join('')") == "ab \nef."
    assert browser.do("texts('.prose .ends').length") >= 1
    assert browser.failures == []


def test_a_sudoku_is_typed_and_its_conflicts_are_marked(browser):
    with serving(tiny_puzzle(), steps=8) as (address, _):
        visit(browser, address)
        cells = "[...find('clues').children]"
        browser.do(f"{cells}[0].focus()")
        browser.key("5", 53, "5")
        browser.key("ArrowRight", 39)
        browser.key("3", 51, "3")
        browser.key("ArrowDown", 40)
        browser.key("x", 88, "x")
        assert browser.do("clues()") == "53" + "." * 79
        browser.key("6", 54, "6")
        assert browser.do("clues()") == "53" + "." * 8 + "6" + "." * 70
        put(browser, count=2)
        generate(browser)
        boards = browser.do("texts('#runs .board')")
        assert len(boards) == 2 and all(len(board) == 81 for board in boards)
        assert {(board[:2], board[10]) for board in boards} == {("53", "6")}
        assert browser.do("texts('#runs .board .given').length") == 6
        captions = browser.do("texts('#runs figcaption')")
        clashes = browser.do("texts('#runs .clash').length")
        assert sum(int(caption.split()[2]) for caption in captions) == clashes > 0
        browser.do("find('clear').click(); find('example').click()")
        example = browser.do("clues()")
        choose(browser, 0, predictor="confident")
        generate(browser)
        board = browser.do("text('#runs figure:first-child .board')")
        assert all(a in (b, ".") for a, b in zip(example, board, strict=True))
        assert (
            browser.do("conflicts(Array.from('531278964' + '1'.repeat(72), c => c - 1)).size")
            == 73
        )
    assert browser.failures == []


def test_images_are_painted_labelled_and_tinted(browser):
    model = tiny_images()
    with serving(model, steps=10) as (address, _):
        visit(browser, address)
        put(browser, count=3, seed=1, guidance=2)
        browser.do("find('class').value = '1'")
        generate(browser)
        trace = model.sample(3, 10, labels="bar", guidance=2.0, seed=1, record=True).trace
        assert browser.do("texts('figcaption')")[0] == "sample 1, class bar"
        pixels = "[...document.querySelectorAll('#runs canvas')[2].getContext('2d')"
        pixels += ".getImageData(0, 0, 4, 4).data]"
        browser.do("go(6)")
        image = np.array(browser.do(pixels)).reshape(4, 4, 4)[..., 0]
        assert (image == model.codec.decode(trace.tokens[6][2])).all()
        browser.do("find('tint').click()")
        tinted = np.array(browser.do(pixels)).reshape(4, 4, 4)[..., :3]
        touched = trace.routes[6][2].view(4, 4).numpy() > 0
        assert ((tinted != image[..., None]).any(-1) == touched).all()
        name, size = saved(browser, "save-samples")
        assert name == "tiny.png" and size > 100
        assert browser.failures == []
        browser.do("find('class').value = ''; find('go').click()")
        browser.until("!halted && text('#error').includes('needs a diffusion_label')")


def saved(browser, button, content=False):
    """Name and size, or content, of what a button downloads."""
    browser.do(
        """
        globalThis.caught = null;
        HTMLAnchorElement.prototype.click = function () { caught.name = this.download; };
        URL.createObjectURL = blob => { caught = { blob }; return "blob:x"; };
        """
    )
    browser.do(f"find({button!r}).click()")
    browser.until("caught && caught.name")
    if content:
        return browser.do("return [caught.name, await caught.blob.text()]")
    return browser.do("[caught.name, caught.blob.size]")


def test_samples_and_a_replay_can_be_kept(browser, text_page, text_model, tmp_path):
    visit(browser, text_page)
    put(browser, prompt="a<b", length=12, count=2, seed=4)
    browser.do("find('compare').click()")
    generate(browser)
    wanted = text_model.sample(2, 12, prompt="a<b", length=15, seed=4, record=True)
    name, text = saved(browser, "save-samples", content=True)
    assert name == "tiny.txt" and all(f"\n{each}\n" in text for each in wanted.text)
    assert text.count("----- ") == 4
    name, page = saved(browser, "save-replay", content=True)
    assert name == "tiny-replay.html"
    path = tmp_path / name
    path.write_text(page, encoding="utf-8")
    browser.open(path.as_uri())
    browser.until("document.body.dataset.ready === '1'")
    browser.do(SEEN.replace("const ", "globalThis."))
    assert look(browser)[:2] == wanted.text
    browser.do("slider.value = 5; slider.dispatchEvent(new Event('input'))")
    assert look(browser)[:2] == [LETTERS.decode(row) for row in wanted.trace.tokens[5]]
    assert browser.do("texts('h2')")[1].startswith("ancestral")
    assert browser.failures == []


def test_what_is_wrong_is_said(browser, text_page):
    visit(browser, text_page)
    put(browser, prompt="é")
    browser.do("find('go').click()")
    browser.until("!halted && text('#error')")
    assert browser.do("text('#error')").startswith("prompt: the character 'é' is not in")
    assert browser.do("find('error').getAttribute('role')") == "alert"
    assert browser.do("find('result').hidden && !find('go').disabled")
    put(browser, prompt="a")
    choose(browser, 0, kappa="cup:.1")
    browser.do("find('go').click()")
    browser.until("!halted && text('#error').includes('no kappa rule')")
    choose(browser, 0, kappa="")
    generate(browser)
    assert {f for f in browser.failures if "400" not in f} == set()


def test_a_key_is_asked_for_and_a_server_that_is_gone_is_noticed(browser):
    with serving(tiny(), api_key="sesame", steps=3) as (address, _):
        visit(browser, address)
        assert "API key" in browser.do("text('#error')")
        assert not browser.do("find('asks-key').hidden")
        put(browser, key="sesame")
        browser.do("find('key').dispatchEvent(new Event('change'))")
        browser.until("about !== null")
        generate(browser)
    browser.do("find('go').click()")
    browser.until("!halted && text('#error') === 'The server does not answer.'")


@pytest.mark.parametrize("kind", ["text", "image", "puzzle"])
def test_on_a_phone_nothing_is_wider_than_the_screen(browser, kind):
    model = {"text": tiny, "image": tiny_images, "puzzle": tiny_puzzle}[kind]()
    with serving(model, steps=4) as (address, _):
        visit(browser, address, width=390)
        assert browser.do("innerWidth") == 390
        browser.do("find('compare').click(); find('count').value = 3")
        if kind == "text":
            put(browser, prompt="abcdefgh" * 3, length=40)
        generate(browser)
        assert browser.do("document.documentElement.scrollWidth") == 390
        out = """[...document.querySelectorAll('button, input, select, textarea, canvas')]
            .filter(e => e.offsetParent && e.getBoundingClientRect().right > 390).length"""
        assert browser.do(out) == 0
        sections = "[...find('runs').children].map(e => e.getBoundingClientRect().x)"
        left, right = browser.do(sections)
        assert left == right, "one below the other"
        small = """[...document.querySelectorAll('button')]
            .filter(e => e.offsetParent && e.offsetHeight < 32).length"""
        assert browser.do(small) == 0


def test_every_control_has_a_name_and_can_be_reached_by_tab(browser, text_page):
    visit(browser, text_page)
    put(browser, prompt="a")
    generate(browser)
    nameless = """[...document.querySelectorAll('button, input, select, textarea')]
        .filter(e => !(e.labels?.length || e.textContent.trim() || e.ariaLabel)).length"""
    assert browser.do(nameless) == 0
    browser.do("find('prompt').focus()")
    reached = []
    for _ in range(25):
        browser.key("Tab", 9)
        reached.append(browser.do("document.activeElement.id || document.activeElement.name"))
    for wanted in (
        "length",
        "count",
        "seed",
        "steps",
        "kappa",
        "compare",
        "go",
        "slider",
        "play",
    ):
        assert wanted in reached
