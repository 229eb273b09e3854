"""`psidiff compare` and `psidiff evaluate`: cells that survive a kill, honest numbers."""

import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import tarfile
import time

import pytest
import torch
from rich.console import Console

from psidiff.cli import progress
from psidiff.cli.compare import stacked
from psidiff.data import sudoku
from psidiff.data.sudoku import Sudoku
from psidiff.data.toy import Chain
from psidiff.distributed import Processes
from psidiff.evaluation.image_metrics import label_agreement, nearest_labels
from psidiff.evaluation.metric_result import UNKNOWN, wilson
from psidiff.evaluation.metrics import SampleSet
from psidiff.evaluation.text_metrics import Lexicon
from psidiff.experiment import compare, evaluate
from psidiff.experiment.datasets import corpus, held_out_part
from psidiff.experiment.held_out import held_out
from psidiff.experiment.recipe import SudokuData
from psidiff.experiment.recipe_files import read_recipe
from psidiff.experiment.results_log import Cell
from psidiff.experiment.sample_evaluators import (
    OracleEvaluator,
    PuzzleEvaluator,
    TextEvaluator,
    build_evaluator,
)
from psidiff.experiment.sample_files import read_samples
from psidiff.experiment.train import placed
from psidiff.model import Decoded, Model, load

QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}
GRID = ("compare", "digits", "toy-uniform", "--steps", "4,8", "--kappa", "ancestral,cap:.1")


@pytest.fixture
def psidiff(psidiff, monkeypatch):
    """All that it says, if it ends as it should."""
    monkeypatch.setenv("COLUMNS", "220")

    def run(*arguments, code=0):
        done = psidiff(*arguments, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return run


def records_of(folder):
    lines = (line for path in folder.glob("cells-*.jsonl") for line in path.open())
    return [json.loads(line) for line in lines if line.strip()]


def test_a_comparison_measures_every_cell_once_and_writes_its_report(psidiff, tmp_path):
    said = psidiff(*GRID, "--samples", 12, "--recommend", "--out", "c")
    records = records_of(tmp_path / "c")
    assert len(records) == 8 and "report.html" in said
    for record in records:
        names = {measure["name"] for measure in record["measures"]}
        assert {record["quality"], record["entropy"]} <= names
        assert record["seconds"] > 0 and record["nfe"] > 1 and record["shown"]
        assert record["seed"] == 0 and record["samples"] == 12
    for name in ("report.html", "report.md", "quality-digits.png", "frontier-toy-uniform.png"):
        assert (tmp_path / "c" / name).stat().st_size > 500, name
    times = [record["time"] for record in records]
    psidiff(*GRID, "--samples", 12, "--out", "c")
    assert [record["time"] for record in records_of(tmp_path / "c")] == times
    said = psidiff(*GRID, "--samples", 13, "--out", "c", code=2)
    assert "begun with samples = 12, and this asks for 13" in said


def test_cells_are_made_in_the_precision_that_was_asked_for(psidiff, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(Model, "compile", lambda self: compiled.append(self) or self)
    few = ("compare", "digits", "--steps", 2, "--kappa", "fb", "--samples", 2, "--out", "c")
    psidiff(*few, "--dtype", "bfloat16", "--compile")
    (record,) = records_of(tmp_path / "c")
    assert record["dtype"] == "bfloat16" and next(compiled[0].network.parameters()).dtype is (
        torch.bfloat16
    )
    assert "bfloat16" in (tmp_path / "c/report.md").read_text(encoding="utf-8")
    assert "begun with dtype = bfloat16, and this asks for auto" in psidiff(*few, code=2)
    stored = tmp_path / "c/protocol.json"
    held = json.loads(stored.read_text())
    held.pop("dtype"), held.pop("checksum")  # as an earlier version wrote it
    stored.write_text(json.dumps({**held, "format_version": 1}))
    psidiff(*few)


def test_the_grid_is_the_product_of_its_lists(psidiff, monkeypatch):
    runs = []
    monkeypatch.setattr("psidiff.cli.compare.run", lambda _, cells, *a, **k: runs.append(cells))
    psidiff("compare", "a", "b", "--steps", "4,8", "--kappa", "ancestral", "--top-p", "none,.9")
    (cells,) = runs
    assert len(cells) == 8 and len(set(cells)) == 8
    assert cells[0] == Cell("a", 4, "ancestral") and cells[-1].top_p == 0.9


@pytest.mark.slow
def test_killed_anywhere_no_finished_cell_is_measured_again(tmp_path):
    command = [sys.executable, "-m", "psidiff", *GRID, "--samples", "12", "--out", "c"]
    chance, seen = random.Random(1), {}
    for attempt in range(30):
        run = subprocess.Popen(command, cwd=tmp_path, env=QUIET, stdout=subprocess.DEVNULL)
        if attempt < 5:
            time.sleep(4 + 4 * chance.random())
            run.kill()
            assert run.wait() in (0, -signal.SIGKILL)
        elif run.wait() == 0:
            break
        for path in (tmp_path / "c").glob("cells-*.jsonl"):
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                key = json.dumps(record["cell"], sort_keys=True)
                assert seen.setdefault(key, record["time"]) == record["time"]
    assert len(seen) == 8 or len(records_of(tmp_path / "c")) == 8


def test_a_process_that_comes_late_makes_its_own_cells(psidiff, tmp_path, monkeypatch):
    class Alone(Processes):
        def wait(self):
            pass

    for rank in (0, 1):
        group = Alone(rank, 2)
        monkeypatch.setattr(compare.Processes, "join", lambda device, group=group: group)
        psidiff("compare", "toy-uniform", *GRID[3:], "--samples", 4, "--out", "c")
    cells = [
        json.dumps(record["cell"], sort_keys=True) for record in records_of(tmp_path / "c")
    ]
    assert len(cells) == len(set(cells)) == 4


@pytest.mark.slow
def test_two_processes_share_the_cells(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    more = ["--standalone", "-m", "psidiff", *GRID, "--samples", "12", "--out", "c"]
    done = subprocess.run(
        [*command, *more], cwd=tmp_path, env=QUIET, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list((tmp_path / "c").glob("cells-*.jsonl"))) == 2
    assert len(records_of(tmp_path / "c")) == 8 and (tmp_path / "c/report.html").is_file()


MISTAKES = [
    (("compare",), "name a model to compare samplers on"),
    (("compare", "hamlet"), "there is no model at hamlet"),
    (("compare", "digits", "--steps", "a"), "--steps wants numbers apart by commas"),
    (("compare", "shakespeare", "--judge", "./no-judge"), "there is no judge at ./no-judge"),
    (("compare", "digits", "--features", "no.pt"), "no.pt"),
    (("compare", "shakespeare", "--reference", "no.txt"), "there is no"),
    (("compare", "digits", "--kappa", "cup:1", "--steps", "2"), "no kappa rule"),
    (("compare", "digits", "--device", "nonsense"), "device must be auto, cpu, cuda, cuda:N"),
    (("compare", "shakespeare", "--judge", "digits"), "is no autoregressive model"),
    (("compare", "digits", "--kappa", ""), "there is nothing to compare"),
    (
        ("evaluate", "digits", "--protocol", "mine"),
        "protocol must be 'exact', 'paper' or 'released'",
    ),
    (("evaluate", "shakespeare", "--data", "no.txt"), "there is no data no.txt"),
    (("evaluate", "digits", "--data", "ptb"), "zero-shot corpora are text"),
    (("evaluate", "shakespeare", "--samples", "none"), "there are no samples at none"),
    (("evaluate", "digits", "--psi", "cup:1"), "no kappa rule"),
    (("evaluate", "books"), "--data novel.txt names a text of yours"),
    (("compare", "shakespeare", "--truth", "./no-model"), "there is no judge at ./no-model"),
    (("compare", "digits", "--judge", "gpt2"), "--judge is for models of text, and digits is"),
    (("compare", "digits", "toy-masked", "--truth", "t"), "digits and toy-masked are none"),
    (("compare", "sudoku", "--reference", "t"), "--reference is for models of text or images"),
    (("compare", "digits", "--reference", "t.txt"), "there is no "),
    (("compare", "shakespeare", "--features", "f.pt"), "--features is for models of images"),
    (("compare", "shakespeare", "--clues", "24"), "--clues is for models of puzzles"),
    (("compare", "digits", "--error", "4"), "--error is for the toys of --oracle"),
    (("evaluate", "digits", "--steps", "256"), "--steps is a part of --psi: give that too"),
    (("evaluate", "digits", "--metrics", "lexicon"), "--metrics is a part of --samples"),
    (("evaluate", "digits", "--judge", "gpt2"), "--judge is a part of --samples"),
    (("evaluate", "digits", "--questions", "3"), "--questions is a part of --harness"),
    (("evaluate", "digits", "--drop-unknown"), "--drop-unknown is a part of --data"),
    (
        ("evaluate", "digits", "--psi", "ancestral", "--protocol", "released"),
        "--psi has a protocol of its own",
    ),
    (
        ("evaluate", "shakespeare", "--samples", "s", "--protocol", "released"),
        "--protocol says how a language model judges samples: name it by --judge",
    ),
    (("compare", "shakespeare", "--protocol", "released"), "name it by --judge"),
    (
        ("evaluate", "digits", "--samples", "s", "--judge", "j", "--protocol", "mine"),
        "protocol must be 'exact', 'paper' or 'released'",
    ),
    (("compare", "shakespeare", "--choose", "best"), "--choose must be paper, got 'best'"),
    (("compare", "digits", "--choose", "paper"), "--choose is for models of text"),
    (
        ("compare", "shakespeare", "--choose", "paper", "--kappa", "fb"),
        "name ancestral in --kappa",
    ),
    (
        ("evaluate", "digits", "--samples", "s", "--psi", "fb"),
        "--psi is for real data, of",
    ),
    (
        ("evaluate", "shakespeare", "--samples", "s", "--features", "f.pt"),
        "--features is for models of images, and shakespeare is none",
    ),
]


@pytest.mark.parametrize("arguments, words", MISTAKES, ids=lambda v: str(v)[:44])
def test_a_mistake_is_one_sentence(arguments, words, psidiff, tmp_path):
    said = psidiff(*arguments, code=2)
    assert not list(tmp_path.rglob("protocol.json"))
    assert words in said and said.strip().count("\n") == 0, said


def test_evaluate_prints_every_unit_with_its_protocol(psidiff, tmp_path):
    said = psidiff("evaluate", "shakespeare", "--sequences", 8, "--out", "n.jsonl")
    for word in ("nats/token", "bits/character", "perplexity", "protocol exact", "seed 0"):
        assert word in said
    lines = [json.loads(line) for line in (tmp_path / "n.jsonl").open()]
    assert {line["unit"] for line in lines} >= {"nats/token", "bits/character"}
    assert all(line["protocol"]["sequences"] == 8 and line["error"] > 0 for line in lines)
    said = psidiff("evaluate", "digits", "--sequences", 8)
    assert "bits/dimension" in said


def test_one_row_or_sample_has_an_unknown_error_and_its_line_is_json(psidiff, tmp_path):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    psidiff("sample", "shakespeare", "-n", 1, "--steps", 4, "--out", "one.jsonl")
    ask = ("evaluate", "shakespeare", "--out", "n.jsonl")
    said = psidiff(*ask, "--samples", "one.jsonl") + psidiff(*ask, "--sequences", 1)
    assert "unknown" in said and "│ exact" not in said and "inf" not in said
    text = (tmp_path / "n.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert len(lines) > 10
    assert all(line["error"] is None and line["exact"] is False for line in lines)
    psidiff("compare", "toy-uniform", "--samples", 1, "--steps", 2, "--kappa", "fb")
    (record,) = records_of(tmp_path / "out/compare")
    assert all(m["error"] is None and not m["exact"] for m in record["measures"])
    assert "± ?" in (tmp_path / "out/compare/report.md").read_text()


def test_a_number_of_the_harness_without_an_error_is_not_called_exact(monkeypatch):
    numbers = {"questions": 3, "acc": {"value": 0.5, "error": None}}
    found = {"tasks": {"piqa": numbers}, "protocol": {}}
    monkeypatch.setattr(
        "psidiff.integrations.lm_eval_runner.run_harness", lambda *a, **k: found
    )
    asked = evaluate.Asked(harness=["piqa"])
    (measure,) = evaluate.of_choices(load("digits", device="cpu"), asked)
    assert measure.stderr == UNKNOWN


def test_evaluate_says_how_far_it_is(psidiff, monkeypatch):
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    ask = ("evaluate", "digits", "--sequences", 8, "--batch-size", 4)
    said = psidiff(*ask)
    assert "held-out data, 8 rows: 50%\nheld-out data, 8 rows: 100%\n" in said
    said = psidiff(*ask, "--psi", "fb", "--steps", 4)
    assert said.count("held-out data, 8 rows: ") == 10 and "8 rows: 60%" in said
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with progress.counter(console, "held-out data, 8 rows") as advance:
        advance(4, 8)
    assert "held-out data, 8 rows" in screen.getvalue() and "50%" in screen.getvalue()


def test_evaluate_says_that_the_levels_of_the_exact_protocol_are_not_the_schedule_s(psidiff):
    said = psidiff("evaluate", "digits", "--sequences", 2)
    assert "alpha 1 - t^3, least alpha asked 0.00100" in said and "LogLinear" not in said
    said = psidiff("evaluate", "digits", "--sequences", 2, "--protocol", "released")
    assert "schedule LogLinear(eps=0.001)" in said and "t^3" not in said


def test_auto_is_recorded_as_the_rule_that_it_stands_for_and_measured_once(psidiff, tmp_path):
    def rules(folder):
        return [record["cell"]["kappa"] for record in records_of(tmp_path / folder)]

    few = ("compare", "digits", "--samples", 4, "--steps", 2, "--out")
    own = "constant:.5@.1-.6"
    psidiff(*few, "a", "--kappa", "auto,fb,constant:0.5@0.1-0.6")
    assert rules("a") == [own, "fb"]
    psidiff(*few, "s", "--kappa", "fb", "--sampler", "auto last=greedy")
    assert rules("s") == ["fb", f"{own} last=greedy"]
    assert own in (tmp_path / "a/report.md").read_text()
    assert "auto" not in (tmp_path / "a/report.md").read_text()
    psidiff(*few, "d")
    assert rules("d") == ["ancestral", "cap:0.02", "constant:0@.05-.6", own]
    psidiff("compare", "shakespeare", *few[2:], "t")
    assert rules("t") == ["ancestral", "cap:0.02", "constant:0@.05-.6"], "one is its own"


def test_the_help_says_what_options_take_in_whole_words(psidiff):
    said = psidiff("compare", "--help")
    assert "auto is the model's own. [ancestral, cap:0.02, constant:0@.05-.6, auto]" in said
    assert "Of a Sudoku: none, minimal, or random:N or N of them. [24]" in said
    assert "Questions of each task, at most. [all]" in psidiff("evaluate", "--help")


def test_a_comparison_is_shown_in_the_order_in_which_it_was_asked(psidiff, tmp_path):
    few = ("--samples", 4, "--steps", "4,2", "--out", "c")
    psidiff("compare", "digits", "--kappa", "cap:.1", *few)
    said = psidiff("compare", "toy-uniform", "digits", "--kappa", "fb,cap:.1,ancestral", *few)
    said = said.partition("\ntoy-uniform")[2]
    rows = [line.split("│") for line in said.splitlines() if "│" in line]
    shown = [row[1].strip() for row in rows if row[0].strip().isdigit()]
    assert shown == ["fb", "cap:.1", "ancestral"] * 4 and "\ndigits" in said
    page = (tmp_path / "c/report.md").read_text()
    assert page.index("| toy-uniform | 2 | fb") < page.index("| digits | 2 | fb")


def test_the_protocol_of_a_sampler_s_bound_names_its_rule_and_steps(psidiff, tmp_path):
    psi = ("evaluate", "digits", "--sequences", 8, "--psi", "cap:.1", "--steps", 4)
    said = psidiff(*psi, "--draws", 2, "--out", "n.jsonl")
    assert "kappa cap:.1, protocol psi, draws 2, steps 4, kappas 0 to 1.00" in said
    assert "None" not in said and "alphas 0.00100 to 1.000" in said
    (line,) = map(json.loads, (tmp_path / "n.jsonl").open())
    assert line["protocol"]["kappa"] == "cap:.1" and line["protocol"]["steps"] == 4


def test_samples_made_before_are_judged_from_their_files(psidiff, tmp_path):
    psidiff("sample", "shakespeare", "-n", 3, "--steps", 4, "--out", "few")
    psidiff("sample", "shakespeare", "-n", 3, "--steps", 4, "--out", "few.jsonl")
    shards, lines = (read_samples(tmp_path / name)[0] for name in ("few", "few.jsonl"))
    assert torch.equal(shards, lines)
    said = psidiff("evaluate", "digits", "--samples", "few.jsonl", code=2)
    assert "token ids that this model does not have" in said
    psidiff("sample", "digits", "-n", 12, "--label", 3, "--steps", 16, "--out", "threes.jsonl")
    tokens, labels = read_samples(tmp_path / "threes.jsonl")
    assert tokens.shape == (12, 64) and labels.tolist() == [3] * 12
    psidiff("evaluate", "digits", "--samples", "threes.jsonl", "--out", "n.jsonl")
    found = {line["name"]: line for line in map(json.loads, (tmp_path / "n.jsonl").open())}
    assert found["label agreement"]["value"] > 0.7
    assert found["label agreement"]["protocol"]["images"] == 12
    psidiff("sample", "digits", "-n", 4, "--label", 10, "--steps", 4, "--out", "null.jsonl")
    assert "label agreement" not in psidiff("evaluate", "digits", "--samples", "null.jsonl")
    psidiff("sample", "digits", "-n", 12, "--steps", 4, "--out", "any")
    assert "label agreement" not in psidiff("evaluate", "digits", "--samples", "any")
    said = psidiff("evaluate", "shakespeare", "--samples", "few")
    (words,) = (line for line in said.splitlines() if line.startswith("lexicon: "))
    assert "lexicon 11,376 words of its own corpus" in words and "entropy-4" in said
    few = ("evaluate", "shakespeare", "--samples", "few", "--metrics")
    said = psidiff(*few, "lexicon,repetition-4")
    assert words in said and "repetition-4" in said and "entropy" not in said
    said = psidiff(*few, "rep", code=2)
    assert "'rep' is not a metric; the nearest" in said and "mauve" not in said
    for name, text, words in (
        ("empty.jsonl", "", "is empty: there are no samples"),
        ("wrong.jsonl", '{"text": "a"}\n', 'no JSON with "tokens"'),
        ("ragged.jsonl", '{"tokens": [1]}\n{"tokens": [1, 2]}\n', "of unequal length"),
    ):
        (tmp_path / name).write_text(text)
        said = psidiff("evaluate", "shakespeare", "--samples", name, code=2)
        assert words in said


def test_shards_of_a_model_with_other_tokens_are_refused_by_its_name(psidiff, tmp_path):
    psidiff("sample", "digits", "-n", 3, "--steps", 2, "--out", "threes")
    said = psidiff("evaluate", "shakespeare", "--samples", "threes", code=2)
    assert "threes has samples of digits, whose tokens mean something else than" in said
    load("digits", device="cpu").save(tmp_path / "same", dtype=torch.float16)
    few = ("sample", "same", "-n", 3, "--steps", 2, "--out", "few")
    psidiff(*few)
    assert "entropy-1" in psidiff("evaluate", "digits", "--samples", "few")
    manifest = tmp_path / "threes/sampling.json"
    held = json.loads(manifest.read_text())
    held.pop("codec"), held.pop("checksum")  # as an earlier version wrote it
    manifest.write_text(json.dumps({**held, "format_version": 1}))
    assert "entropy-1" in psidiff("evaluate", "digits", "--samples", "threes")


def test_held_out_puzzles_are_drawn_without_those_to_learn_from(monkeypatch, tmp_path):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path))
    data, drawn = SudokuData(grids=30, minimal=2, valid_grids=20), []
    learnt = corpus(data)
    held = held_out_part(data)
    assert len(learnt.train) == 30 and len(learnt.train.puzzles) == 2
    assert torch.equal(held.grids, learnt.valid.grids) and len(held.puzzles) == 0
    grids = sudoku.complete_grids
    monkeypatch.setattr(
        sudoku, "complete_grids", lambda *asked: drawn.append(asked) or grids(*asked)
    )
    monkeypatch.setattr(sudoku, "minimal_puzzles", lambda *asked: drawn.append(asked))
    assert len(held_out("sudoku", load("sudoku", device="cpu"))) == 1000
    assert drawn == [(1000, 1)]


def test_a_metric_has_one_name_and_one_number_whether_chosen_or_among_all(psidiff, tmp_path):
    (tmp_path / "real.txt").write_text("To be, or not to be: that is the question. " * 99)
    few = ("evaluate", "shakespeare", "--samples", "few.jsonl", "--reference", "real.txt")
    psidiff("sample", "shakespeare", "-n", 3, "--steps", 16, "--out", "few.jsonl")
    psidiff(*few, "--out", "all.jsonl")
    chosen = "lexicon,entropy-1,entropy-sample,distinct-2,repetition-4,divergence-2"
    psidiff(*few, "--metrics", chosen, "--out", "some.jsonl")
    usual, some = (
        {line["name"]: line for line in map(json.loads, (tmp_path / name).open())}
        for name in ("all.jsonl", "some.jsonl")
    )
    assert list(some) == chosen.split(",") and all(some[name] == usual[name] for name in some)
    assert usual["lexicon"]["protocol"]["lexicon"] == "4 words of real.txt"


def test_a_judge_of_one_s_own_is_one_file_for_evaluate_and_compare(psidiff, tmp_path):
    (tmp_path / "lm.py").write_text(
        "import math\n"
        "from psidiff.evaluation.scoring_lm import TextScore\n"
        "class Letters:\n"
        "    name, protocol = 'letters', {'alphabet': 27}\n"
        "    def score(self, texts):\n"
        "        return [TextScore(len(t) * math.log(27), len(t)) for t in texts]\n"
        "class Mute:\n"
        "    name = 'mute'\n"
    )
    psidiff("sample", "shakespeare", "-n", 2, "--steps", 4, "--out", "few.jsonl")
    few = ("evaluate", "shakespeare", "--samples", "few.jsonl", "--judge")
    psidiff(*few, "lm.py:Letters", "--out", "all.jsonl")
    first = json.loads((tmp_path / "all.jsonl").read_text().splitlines()[0])
    assert first["name"] == "generative NLL" and first["protocol"]["judge"] == "letters"
    assert first["value"] == pytest.approx(math.log(27))
    found = [json.loads(line) for line in (tmp_path / "all.jsonl").open()]
    assert found[1]["name"] == "generative perplexity"
    assert found[1]["value"] == pytest.approx(27)
    assert "must have a name, a protocol and score" in psidiff(*few, "lm.py:Mute", code=2)
    said = psidiff(*few, "lm.py:Letters", "--protocol", "released", code=2)
    assert "the judge letters has no released protocol: it needs a context and" in said
    grid = ("--steps", 4, "--kappa", "ancestral", "--samples", 2, "--out", "report")
    psidiff("compare", "shakespeare", *grid, "--judge", "lm.py:Letters")
    record = json.loads((tmp_path / "report/cells-0.jsonl").read_text().splitlines()[0])
    assert record["quality"] == "generative NLL"


def test_a_metric_of_one_s_own_is_one_file_for_evaluate_and_compare(psidiff, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def brightness(images):\n    return [image.mean() for image in images]\n"
    )
    mine = ("--metrics", "entropy-1,mine.py:brightness")
    psidiff("sample", "digits", "-n", 3, "--steps", 4, "--out", "few.jsonl")
    few = ("evaluate", "digits", "--samples", "few.jsonl")
    said = psidiff(*few, *mine, "--out", "all.jsonl")
    assert "brightness" in said and "label agreement" not in said
    line = [json.loads(line) for line in (tmp_path / "all.jsonl").open()][-1]
    assert line["name"] == "brightness" and line["value"] > 0 and line["error"] > 0
    said = psidiff(*few, "--metrics", "lexicon", code=2)
    assert "lexicon is a metric of texts, and these samples have none" in said
    grid = ("--steps", 4, "--kappa", "ancestral", "--samples", 3, "--out", "report")
    psidiff("compare", "digits", *grid, *mine)
    record = json.loads((tmp_path / "report/cells-0.jsonl").read_text().splitlines()[0])
    named = {measure["name"]: measure["value"] for measure in record["measures"]}
    assert named["brightness"] > 0 and "label agreement" in named


def test_unknown_characters_of_one_s_own_file_are_an_error_or_dropped(psidiff, tmp_path):
    known = "But soft, what light through yonder window breaks? It is the east. " * 40
    (tmp_path / "plain.txt").write_text(known)
    (tmp_path / "odd.txt").write_text(known.replace("soft", "s\u00f6oft\u20ac"))
    ask = ("evaluate", "shakespeare", "--sequences", 4, "--data")
    said = psidiff(*ask, "plain.txt,odd.txt", "--out", "n.jsonl", code=2)
    assert "psidiff: odd.txt: the character" in said and not (tmp_path / "n.jsonl").exists()
    said = psidiff(*ask, "odd.txt", "--drop-unknown", "--out", "n.jsonl")
    assert "unknown dropped" in said
    psidiff(*ask, "plain.txt", "--out", "n.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "n.jsonl").open()]
    dropped, plain = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    assert [line["value"] for line in dropped] == [line["value"] for line in plain]


def test_a_short_or_broken_file_among_the_data_is_named(psidiff, tmp_path):
    (tmp_path / "good.txt").write_text("But soft, what light? " * 40)
    (tmp_path / "short.txt").write_text("But soft")
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe")
    for name, words in (("short.txt", "needs 128"), ("broken.txt", "is not UTF-8")):
        said = psidiff("evaluate", "shakespeare", "--data", f"good.txt,{name}", code=2)
        assert name in said and words in said and "good.txt" not in said


def test_what_is_slow_once_is_not_timed(psidiff, monkeypatch):
    asked, whole = [], Model.sample

    def noted(self, num_samples, sampler, **options):
        asked.append((self.codec.kind, num_samples, sampler.steps))
        return whole(self, num_samples, sampler=sampler, **options)

    monkeypatch.setattr(Model, "sample", noted)
    two = ("compare", "digits", "toy-uniform", "--kappa", "ancestral", "--samples", 4)
    psidiff(*two, "--steps", "4,8")
    assert asked == [
        *(("image", 1, 1), ("image", 4, 4), ("image", 4, 8)),
        *(("text", 1, 1), ("text", 4, 4), ("text", 4, 8)),
    ]
    psidiff(*two, "--steps", "4,8")
    assert len(asked) == 6, "no cell is missing, so nothing is warmed up"


def test_the_table_of_a_comparison_fits_a_terminal_with_whole_names(psidiff, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rules = "ancestral,constant:0@.05-.6"
    said = psidiff("compare", "digits", "--kappa", rules, "--steps", "4", "--samples", 12)
    rows = [line for line in said.splitlines() if "│" in line]
    assert [row.split("│")[1].strip() for row in rows] == rules.split(",")
    assert "…" not in said and all(len(line) <= 80 for line in said.splitlines())
    said = psidiff(
        *("compare", "digits", "--kappa", "constant:0@.05-.6", "--steps", "4", "--samples", 12),
        *("--top-p", ".9", "--temperature", ".8", "--out", "long"),
    )
    assert "…" not in said and all(len(line) <= 80 for line in said.splitlines())
    assert "constant:0@.05-.6, top-p" in said and "0.9, temperature 0.8" in said


def test_in_a_narrow_terminal_perplexity_and_nll_are_in_one_column():
    head = [
        "steps",
        "sampler",
        "generative perplexity (low is better)",
        "generative NLL",
        "NFE",
    ]
    rows = [head, ["2", "fb", "[bold]30.6 ± 0.4[/]", "3.421 ± 0.013", "3"]]
    assert stacked(rows) == [
        ["steps", "sampler", f"{head[2]}, below it generative NLL", "NFE"],
        ["2", "fb", "[bold]30.6 ± 0.4[/]\n3.421 ± 0.013", "3"],
    ]
    alone = [["steps", "sampler", "generative NLL (low is better)", "NFE"]]
    assert stacked(alone) == alone


def test_a_report_keeps_the_cells_of_before_and_says_what_it_leaves_out(psidiff, tmp_path):
    few = ("compare", "digits", "--samples", 4, "--kappa", "ancestral", "--out", "c")
    psidiff(*few, "--steps", "2,4")
    said = psidiff(*few, "--steps", "2", "--tolerance", ".1")
    assert [line.split()[0] for line in said.splitlines() if "│" in line] == ["2", "4"]
    page = (tmp_path / "c/report.md").read_text()
    assert "| digits | 4 |" in page and "within 10% of ancestral" in page
    said = psidiff("compare", "toy-uniform", *few[2:], "--steps", "2")
    assert "left out: 2 cells of digits, which c has too" in said
    assert "digits" not in (tmp_path / "c/report.md").read_text()


def test_ctrl_c_keeps_the_finished_cells_and_says_so_in_one_sentence(
    psidiff, tmp_path, monkeypatch
):
    whole, calls = compare.measure, []

    def stopped(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*arguments)

    few = ("compare", "digits", "--samples", 4, "--kappa", "ancestral", "--steps", "2,4")
    with monkeypatch.context() as m:
        m.setattr(compare, "measure", stopped)
        said = psidiff(*few, "--out", "c", code=130)
    assert said.splitlines()[-1] == (
        "psidiff: stopped: finished cells are kept in c, and the same command goes on"
    )
    (first,) = records_of(tmp_path / "c")
    psidiff(*few, "--out", "c")
    assert len(records_of(tmp_path / "c")) == 2 and records_of(tmp_path / "c")[0] == first


def test_ctrl_c_keeps_the_numbers_that_are_finished(psidiff, tmp_path, monkeypatch):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("But soft, what light? " * 40)
    whole, calls = evaluate.likelihood, []

    def stopped(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    monkeypatch.setattr(evaluate, "likelihood", stopped)
    ask = ("evaluate", "shakespeare", "--sequences", 2, "--data")
    said = psidiff(*ask, "a.txt,b.txt", "--out", "n.jsonl", code=130)
    lines = [json.loads(line) for line in (tmp_path / "n.jsonl").open()]
    assert {line["protocol"]["data"] for line in lines} == {"a.txt"} and "nats/token" in said
    assert "stopped: what is finished is kept in n.jsonl, and --data b.txt is still" in said
    calls[:] = [None]
    said = psidiff(*ask, "a.txt", code=130)
    assert "stopped before anything was finished: the same command begins again" in said


TINY = (
    *("train.steps=2", "train.given=0", "eval.samples=0", "eval.sequences=4"),
    *("model.hidden_size=32", "model.num_blocks=1"),
)


def test_a_run_on_a_relative_path_is_evaluated_from_any_folder(psidiff, tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/corpus.txt").write_text("But soft, what light through yonder? " * 400)
    train = ("train", "shakespeare", "data.train=texts/corpus.txt", *TINY, "--out", "run")
    psidiff(*train)
    psidiff(*train, "train.steps=3", "--resume")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "nats/token" in psidiff("evaluate", "../run", "--sequences", 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path / "texts"))
    sources = {
        "texts/corpus.txt": str(tmp_path / "texts/corpus.txt"),
        "corpus.txt": "corpus.txt",  # PSIDIFF_DATA has it
        "shakespeare": "shakespeare",  # the package has it, though a folder is called so
        "datasets:owner/name": "datasets:owner/name",
        "books.tar/train.jsonl": str(tmp_path / "books.tar/train.jsonl"),
    }
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "books.tar").touch()
    for source, stored in sources.items():
        recipe = placed(read_recipe("shakespeare", [f"data.train={source}"]))
        assert recipe.data.train == stored
    (tmp_path / "digits").mkdir()
    assert placed(read_recipe("digits", [])).data.path == "digits"
    moved = placed(read_recipe("digits", ["data.path=texts"]))
    assert moved.data.path == str(tmp_path / "texts")


def test_a_judge_of_ours_scores_the_ids_of_a_model_with_its_tokenizer(psidiff, tmp_path):
    psidiff(
        *("train", "shakespeare", "objective=next-token", "prior=masked", "curriculum=null"),
        *(*TINY, "--out", "judge"),
    )
    said = psidiff(
        *("compare", "shakespeare", "--judge", "judge", "--steps", 4, "--samples", 4),
        *("--kappa", "ancestral", "--out", "c"),
    )
    assert "generative NLL" in said
    found = records_of(tmp_path / "c")[0]
    nll = next(m for m in found["measures"] if m["name"] == "generative NLL")
    assert nll["protocol"]["ids"] == "the model's own" and 3 < nll["value"] < 5.5
    assert found["better"] == "low" and found["reference"]["generative NLL"] > 3
    psidiff("compare", "judge", "--steps", "2,4", "--samples", 3, "--out", "l")
    (alone,) = records_of(tmp_path / "l")  # whatever the grid, it goes left to right
    assert alone["cell"]["kappa"] == "left-to-right" and alone["nfe"] == alone["length"]
    said = psidiff("compare", "digits", "--kappa", "left-to-right", "--out", "d", code=2)
    assert "digits is no autoregressive model" in said
    assert "takes a step a token" in psidiff("sample", "judge", "--steps", 3, code=2)
    psidiff(
        *("compare", "shakespeare", "--truth", "judge", "--steps", 4, "--samples", 4),
        *("--kappa", "ancestral", "--out", "t"),
    )
    found = records_of(tmp_path / "t")[0]
    assert found["quality"] == "excess NLL" and found["measures"][0]["protocol"]["truth"]


def test_real_text_is_judged_once(monkeypatch):
    judged = []
    monkeypatch.setattr(TextEvaluator, "_judged", lambda self, made: judged.append(made) or [])
    real = SampleSet(torch.tensor([[0, 1, 1]]), ["abb"])
    bench = TextEvaluator(real, lexicon=Lexicon(frozenset(("abb",))))
    assert bench.reference == bench.reference != {} and len(judged) == 1


def test_the_entropy_of_text_does_not_depend_on_how_many_texts_there_are():
    """So that of samples can be held against that of real text."""
    rows = torch.randint(300, (1, 50), generator=torch.Generator().manual_seed(0))
    many = torch.cat([(rows + 300 * i) % 900 for i in range(3)])
    lexicon = Lexicon(frozenset(("abb",)))
    few, more = (
        TextEvaluator(SampleSet(each, [""] * len(each)), lexicon) for each in (rows, many)
    )
    assert few.reference["entropy-sample"] == pytest.approx(more.reference[few.entropy])


def test_the_oracle_s_own_samples_have_no_excess():
    chain = Chain.syllables(length=32)
    tokens = chain.sample(2000, torch.Generator().manual_seed(0))
    found = {m.name: m for m in OracleEvaluator(chain).evaluate(Decoded(tokens, 1.0, 1))}
    excess = found["excess NLL"]
    assert abs(excess.value) < 4 * excess.stderr and found["KL of pairs"].value < 0.01
    for measure in found.values():
        assert measure.protocol["samples"] == 2000 and measure.protocol["length"] == 32
    few = OracleEvaluator(chain).evaluate(Decoded(tokens[:4], 1.0, 1))
    (illegal,) = (measure for measure in few if measure.name == "illegal pairs")
    assert illegal.value == 0 and illegal.stderr == pytest.approx(wilson(0, 4)[1] / 3.92)


def test_samples_of_a_model_that_names_its_recipe_are_held_against_its_corpus(
    psidiff, tmp_path, monkeypatch
):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    grid = ("compare", "books", "--samples", 2, "--steps", 1, "--kappa", "ancestral")
    said = psidiff(*grid, "--out", "c", code=2)
    assert "books was trained on data that are not here: there is no " in said
    assert "books.tar.xz" in said and "--reference" in said and "--judge" in said
    monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "books.tar.xz", "w:xz") as archive:
        for name in ("train.jsonl", "valid.jsonl"):
            line = json.dumps({"text": f"The king spoke of the {name} again. " * 200})
            (tmp_path / name).write_text(line + "\n")
            archive.add(tmp_path / name, name)
    assert "lexicon" in psidiff(*grid, "--out", "c")
    psidiff("sample", "books", "-n", 2, "--steps", 1, "--out", "few.jsonl")
    assert "lexicon" in psidiff("evaluate", "books", "--samples", "few.jsonl")


def test_puzzles_are_asked_with_clues_that_have_a_solution():
    bench = PuzzleEvaluator(Sudoku(), clues=30)
    given = bench.sampling_inputs(5)["infill"]
    assert ((given >= 0).sum(1) == 30).all() and torch.equal(
        given, bench.sampling_inputs(5)["infill"]
    )
    model = load("digits", device="cpu")
    assert build_evaluator("digits", model).quality == "label agreement"


def test_label_agreement_asks_the_nearest_real_images():
    real = torch.tensor([[0, 0], [0, 1], [9, 9], [9, 8]])
    labels = torch.tensor([3, 3, 5, 5])
    made = torch.tensor([[1, 0], [8, 9], [0, 0]])
    assert nearest_labels(made, real, labels, 2).tolist() == [3, 5, 3]
    found = label_agreement(made, torch.tensor([3, 5, 5]), real, labels, 2)
    assert found.value == pytest.approx(2 / 3) and "nearest of 4" in found.protocol["judge"]
