"""The folder of a run: one process at a time, the data it was trained on, all of it checked."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from psidiff.cli.main import app
from psidiff.experiment.datasets import corpus
from psidiff.experiment.recipe import ImageData, SudokuData, TextData
from psidiff.experiment.train import commit_of
from psidiff.files import read_object
from psidiff.locks import Lock
from psidiff.training import read_log

RECIPE = """
data: {kind: text, train: TRAIN, tokenizer: characters, length: 8, valid_share: 0.2}
model: {kind: transformer, hidden_size: 16, num_blocks: 1, num_heads: 2}
train: {steps: 4, batch_size: 4, log_every: 1, save_every: 2, warmup: 1}
eval: {sequences: 4, samples: 2, steps: 2}
tracker: none
"""
WORDS = "the cat sat on the mat and saw a bat\n" * 20


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe of a small text: the recipe's path and the text's."""
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    text, path = tmp_path / "words.txt", tmp_path / "tiny.yaml"
    text.write_text(WORDS)
    path.write_text(RECIPE.replace("TRAIN", str(text)))
    return path, text


def train(recipe, folder, *options):
    arguments = ("train", recipe, "--out", folder, "--device", "cpu", *options)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_data_that_changed_are_refused_unless_they_are_meant(recipe, tmp_path):
    path, text = recipe
    folder = tmp_path / "run"
    assert train(path, folder).exit_code == 0
    (start,) = read_object(folder / "run.json")["starts"]
    moved = tmp_path / "moved.txt"  # the same text under another name is no change
    assert train(path, folder, "--resume", "train.steps=5").exit_code == 0
    text.rename(moved)
    moved.rename(text)
    os.utime(text)
    assert train(path, folder, "--resume", "train.steps=6").exit_code == 0
    text.write_text(WORDS[: len(WORDS) // 2])
    refused = train(path, folder, "--resume", "train.steps=7")
    assert isinstance(refused.exception, ValueError)
    assert f"have changed since {folder} was trained" in str(refused.exception)
    assert "--data-changed" in str(refused.exception)
    assert len(read_object(folder / "run.json")["starts"]) == 3
    done = train(path, folder, "--resume", "train.steps=7", "--data-changed")
    assert done.exit_code == 0, done.output
    last = read_object(folder / "run.json")["starts"][-1]
    assert last["data_changed_from"] == start["data"] != last["data"]
    assert train(path, folder, "--resume", "train.steps=8").exit_code == 0  # it is known now


def test_where_git_is_missing_a_run_is_of_no_known_commit(recipe, tmp_path, monkeypatch):
    path, _ = recipe
    monkeypatch.setenv("PATH", str(tmp_path))
    assert train(path, tmp_path / "run").exit_code == 0
    (start,) = read_object(tmp_path / "run" / "run.json")["starts"]
    assert start["commit"] is None


def test_a_system_that_does_not_say_its_memory_trains_all_the_same(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "resource", None)  # Windows has none
    monkeypatch.setattr("psidiff.cli.progress._EVERY", 0.0)
    path, _ = recipe
    done = train(path, tmp_path / "run")
    assert done.exit_code == 0 and "? GiB" in done.output
    losses = [r for r in read_log(tmp_path / "run" / "log.jsonl") if "loss" in r]
    assert len(losses) == 4 and all(each["memory_gib"] is None for each in losses)


def test_the_commit_of_a_file_is_not_that_of_a_checkout_around_it(tmp_path):
    about = ["-c", "user.name=a", "-c", "user.email=a@b"]
    git = ["git", "-C", str(tmp_path), *about]
    for name in ("ours.py", "installed.py"):
        (tmp_path / name).touch()
    for command in (["init", "-q"], ["add", "ours.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert commit_of(tmp_path / "ours.py") == head.strip() != ""
    assert commit_of(tmp_path / "installed.py") is None


def test_what_stands_for_data_is_what_they_hold(recipe, tmp_path):
    _, text = recipe
    section = TextData(str(text), tokenizer="bytes", length=8)
    one = corpus(section).content
    assert one == corpus(section).content
    other = tmp_path / "other.txt"
    other.write_text(WORDS)
    renamed = TextData(str(other), tokenizer="bytes", length=8)
    assert corpus(renamed).content == one
    other.write_text(WORDS.replace("cat", "rat"))
    assert corpus(renamed).content != one
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 4, 4, 1), dtype=np.uint8)
    found = set()
    for shown in (pixels, 255 - pixels):
        np.savez(folder / "train.npz", images=shown)
        found.add(corpus(ImageData(str(folder / "train.npz"), labels=False)).content)
    assert len(found) == 2 and None not in found
    grids = [SudokuData(grids=8, valid_grids=2, seed=seed) for seed in (0, 0, 7)]
    one, same, other = (corpus(section).content for section in grids)
    assert one == same != other


def test_options_of_a_resumed_run_need_resume(recipe, tmp_path):
    for option in ("--data-changed", "--skip-damaged"):
        done = train(recipe[0], tmp_path / "run", option)
        assert f"{option} is of a run that is resumed" in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_the_name_of_a_folder_is_no_markup(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = train(recipe[0], "[/]run[bold]", "name=a[red]")
    assert done.exit_code == 0, done.exception
    assert "\na[red]: " in done.output
    assert done.output.endswith("done: [/]run[bold]\n")


def test_one_process_at_a_time_has_the_folder(recipe, tmp_path, monkeypatch):
    path, folder = recipe[0], tmp_path / "run"
    with Lock(folder / ".lock", "training"):
        for options in ((), ("--force",)):  # what lives is not taken from
            done = train(path, folder, *options)
            wanted = f"{folder} is in use: process {os.getpid()} on"
            assert str(done.exception).startswith(wanted)
    assert os.listdir(folder) == []
    assert train(path, folder).exit_code == 0
    assert not (folder / ".lock").exists()
    log = (folder / "log.jsonl").read_text()
    with Lock(folder / ".lock", "training"):
        done = train(path, folder, "--resume", "train.steps=9")
        assert "is training there" in str(done.exception)
    assert (folder / "log.jsonl").read_text() == log


@pytest.mark.parametrize("name", [".lock", "model.safetensors", "samples/step-00000005.txt"])
def test_a_run_from_a_stranger_does_not_write_where_its_links_lead(recipe, tmp_path, name):
    path, _ = recipe
    folder, mine = tmp_path / "run", tmp_path / "mine"
    assert train(path, folder).exit_code == 0
    mine.write_text("precious")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(mine)
    refused = train(path, folder, "--resume", "train.steps=5")
    assert f"{name} is a link" in str(refused.exception)
    assert mine.read_text() == "precious"
    if name == ".lock":
        with pytest.raises(OSError), Lock(folder / name, "training"):
            pass
        assert mine.read_text() == "precious"


def test_where_locks_are_words_a_process_of_another_machine_gives_way_to_force(
    recipe, tmp_path, monkeypatch
):
    path, folder = recipe[0], tmp_path / "run"
    monkeypatch.setattr("psidiff.locks.fcntl", None)
    folder.mkdir()
    (folder / ".lock").write_text('{"pid": 3, "host": "elsewhere", "what": "training"}')
    done = train(path, folder)
    assert "process 3 on elsewhere" in str(done.exception) and "--force" in str(done.exception)
    assert train(path, folder, "--force").exit_code == 0


def test_a_run_that_does_not_begin_leaves_no_folder(recipe, tmp_path):
    done = train(recipe[0], tmp_path / "run", "data.length=100000")
    assert "data.length=100000" in str(done.exception)
    assert not (tmp_path / "run").exists()
    (tmp_path / "own").mkdir()
    train(recipe[0], tmp_path / "own", "data.length=100000")
    assert (tmp_path / "own").is_dir()


def test_half_a_character_is_refused_before_anything_is_trained(recipe, tmp_path):
    path, _ = recipe
    lines = tmp_path / "words.jsonl"
    rows = [{"text": WORDS}, {"text": WORDS + "\ud83d"}]
    lines.write_text("\n".join(map(json.dumps, rows)))
    done = train(path, tmp_path / "run", f"data.train={lines}")
    assert f"line 2 of {lines} has half of a character" in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_samples_of_a_run_that_learnt_half_a_character_are_written(
    recipe, tmp_path, monkeypatch
):
    decoded = "psidiff.data.characters.Characters.decode"
    monkeypatch.setattr(decoded, lambda codec, tokens: "a\ud83d")
    assert train(recipe[0], tmp_path / "run").exit_code == 0
    (path,) = (tmp_path / "run/samples").iterdir()
    assert path.read_text().startswith("a?\n")


def test_a_flipped_bit_in_a_run_is_found(recipe, tmp_path):
    path, folder = recipe[0], tmp_path / "run"
    assert train(path, folder).exit_code == 0
    draw = random.Random(0)
    for name in ("codec.json", "run.json", "log.jsonl"):
        whole = (folder / name).read_bytes()
        for _ in range(4):
            changed, bit = bytearray(whole), draw.randrange(8 * len(whole))
            changed[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(changed)
            done = train(path, folder, "--resume", "train.steps=6")
            assert isinstance(done.exception, ValueError), (name, bit)
            assert name in str(done.exception) and "\n" not in str(done.exception)
        (folder / name).write_bytes(whole)
    done = train(path, folder, "--resume", "train.steps=6")
    assert done.exit_code == 0, done.exception
    assert [r["step"] for r in read_log(folder / "log.jsonl") if "loss" in r] == [*range(1, 7)]


def test_a_damaged_log_is_said_before_anything_is_written(recipe, tmp_path):
    path, folder = recipe[0], tmp_path / "run"
    assert train(path, folder).exit_code == 0
    log = folder / "log.jsonl"
    log.write_text(log.read_text().replace('"step": 2', '"step": 1', 1))
    before = {name: (folder / name).read_bytes() for name in ("run.json", "log.jsonl")}
    done = train(path, folder, "--resume", "train.steps=6")
    assert f"line 2 of {log} is damaged: its checksum does not fit" in str(done.exception)
    assert "delete the file, and the run goes on without its past" in str(done.exception)
    assert before == {name: (folder / name).read_bytes() for name in before}
    done = train(path, folder, "--resume", "train.steps=6", "--skip-damaged")
    assert done.exit_code == 0, done.exception
    assert f"passed over: line 2 of {log} is damaged" in done.output
    steps = [r["step"] for r in read_log(log) if "loss" in r]
    assert steps == [1, 3, 4, 5, 6]
    log.unlink()  # as the sentence said
    assert train(path, folder, "--resume", "train.steps=8").exit_code == 0
    assert [r["step"] for r in read_log(log) if "loss" in r] == [7, 8]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("run.json", "delete the file, and the run goes on without knowing how it was begun"),
        ("codec.json", "delete the file, and it is made again from the data"),
    ],
)
def test_what_can_be_done_about_a_damaged_file_of_a_run_is_true(recipe, tmp_path, name, advice):
    path, folder = recipe[0], tmp_path / "run"
    assert train(path, folder).exit_code == 0
    held = folder / name
    held.write_text(held.read_text().replace(":", ";", 1))
    done = train(path, folder, "--resume", "train.steps=5")
    assert f"{held} is damaged: " in str(done.exception) and advice in str(done.exception)
    assert "copy it again" not in str(done.exception)
    held.unlink()
    assert train(path, folder, "--resume", "train.steps=5").exit_code == 0


@pytest.mark.parametrize("name", ["step-00000999", "step-99999999999999999999999"])
def test_a_folder_that_is_no_checkpoint_is_passed_over_when_asked(recipe, tmp_path, name):
    path, folder = recipe[0], tmp_path / "run"
    assert train(path, folder).exit_code == 0
    stray = folder / "checkpoints" / name
    stray.mkdir()
    done = train(path, folder, "--resume", "train.steps=5")
    assert f"{stray} is damaged: it has no facts.json" in str(done.exception)
    assert "--skip-damaged" in str(done.exception)
    done = train(path, folder, "--resume", "train.steps=5", "--skip-damaged")
    assert done.exit_code == 0, done.exception
    assert "resumed at step 4" in done.output


def test_resume_says_which_checkpoint_it_passed_over(recipe, tmp_path):
    path, folder = recipe[0], tmp_path / "run"
    assert train(path, folder).exit_code == 0
    facts = folder / "checkpoints/step-00000004/facts.json"
    facts.write_text(facts.read_text().replace('"step": 4', '"step": 5'))
    done = train(path, folder, "--resume")
    assert "--resume --skip-damaged" in str(done.exception)
    done = train(path, folder, "--resume", "--skip-damaged")
    assert done.exit_code == 0, done.exception
    assert f"passed over: {facts} is damaged" in done.output
    assert "resumed at step 2" in done.output
    assert read_object(facts)["step"] == 4


def test_what_a_kill_left_unfinished_goes_when_the_run_goes_on(recipe, tmp_path):
    path, folder = recipe[0], tmp_path / "run"
    assert train(path, folder).exit_code == 0
    left = folder / ".log.jsonl.12-0123abcd.part", folder / "samples/.a.txt.9-0123abcd.part"
    for each in left:
        each.write_bytes(b"half")
    with Lock(folder / ".lock", "training"):
        train(path, folder, "--resume")
        assert all(each.exists() for each in left)  # they may be of who holds the folder
    assert train(path, folder, "--resume").exit_code == 0
    assert not any(each.exists() for each in left)
