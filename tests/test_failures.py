"""How the command ends: in one sentence with an exit code, and with a file for a bug."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from psidiff.cli import failures, main, models
from psidiff.cli.failures import exit_message
from psidiff.cli.terminal import plain, say


def caught(run, *arguments):
    """The exception as the command would meet it, with its traceback."""
    try:
        run(*arguments)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def raised(error):
    def run():
        raise error

    return caught(run)


def broken(*arguments):
    return {}["what nobody put there"]


@pytest.fixture(autouse=True)
def reports(tmp_path, monkeypatch):
    """Where tracebacks go."""
    monkeypatch.setattr(failures.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_bug_is_called_one_and_leaves_its_traceback_in_a_file(psidiff, monkeypatch):
    monkeypatch.setattr(models, "run", broken)
    done = psidiff("models", check=False)
    assert done.returncode == 70 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("psidiff: this is a bug: KeyError: 'what nobody put there' (")
    assert "Traceback" not in done.stderr
    report = Path(re.search(r"the traceback is in (\S+):", done.stderr)[1]).read_text()
    assert "test_failures.py" in report and "in broken" in report
    assert f"torch {torch.__version__}" in report and "['psidiff', 'models']" in report


def test_a_bug_on_a_full_disk_is_told_on_standard_error(monkeypatch, capsys):
    def full(**options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(failures.tempfile, "mkstemp", full)
    words, code = exit_message(caught(broken))
    assert code == 70 and "the traceback is above" in words
    assert "in broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    "run",
    [
        lambda: int("a"),
        lambda: json.loads("["),
        lambda: torch.zeros(3) + torch.zeros(4),
        lambda: b"\xff".decode(),
        lambda: list(zip([1], [], strict=True)),
        lambda: raised(EOFError()).add_note(1),
        lambda: raised(ValueError("of somebody else")).missing,
    ],
)
def test_an_error_that_no_sentence_was_made_for_is_a_bug(run):
    words, code = exit_message(caught(run))
    assert code == 70 and words.startswith("psidiff: this is a bug: "), words


def test_a_value_error_that_python_raises_in_our_own_line_is_a_bug():
    # any function of ours in which python would raise
    from psidiff.experiment.recipe import Recipe
    from psidiff.types import as_count

    assert exit_message(caught(as_count, "steps", 0)) == (
        "psidiff: steps must be an integer of at least 1, got 0",
        2,
    )
    code = compile("int('x')", Path(failures.__file__).with_name("nobody.py"), "exec")
    assert exit_message(caught(exec, code))[1] == 70
    code = compile("raise ValueError('so')", Path(failures.__file__).with_name("a.py"), "exec")
    assert exit_message(caught(exec, code)) == ("psidiff: so", 2)
    assert Recipe


def test_an_end_of_file_is_not_taken_for_a_ctrl_c(psidiff, monkeypatch):
    def ended(*arguments):
        raise EOFError("No data left in file")

    monkeypatch.setattr(models, "run", ended)
    done = psidiff("models", check=False)
    assert done.returncode == 70 and "EOFError: No data left in file" in done.stderr


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (KeyboardInterrupt(), "psidiff: stopped", 130),
        (typer.Abort(), "psidiff: stopped", 130),
        (typer.Exit(3), "", 3),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "", 1),
        (MemoryError(), "psidiff: there is not enough memory for this", 2),
        (
            RuntimeError("can't allocate memory: you tried\nto ..."),
            "psidiff: there is not enough memory for this: can't allocate memory: you tried",
            2,
        ),
        (
            OSError(errno.ENOSPC, "few/a.npz cannot be written: No space left on device"),
            "psidiff: few/a.npz cannot be written: No space left on device",
            2,
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "x\x1b[31m"),
            r"psidiff: Permission denied: x\x1b[31m",
            2,
        ),
    ],
)
def test_what_is_no_bug_is_said_plainly(error, words, code):
    assert exit_message(raised(error)) == (words, code)


def test_a_process_whose_fellow_died_does_not_call_it_a_bug(monkeypatch):
    error = raised(
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [x]")
    )
    assert exit_message(error)[1] == 70
    monkeypatch.setenv("WORLD_SIZE", "2")
    words, code = exit_message(error)
    assert code == 1 and words.startswith("psidiff: another process of this run ended")


def test_nothing_in_an_error_acts_on_the_terminal(psidiff, tmp_path):
    name = "a\x1b]0;owned\x07\nb\u202e[red]\x9b31m\udc80.trace"
    done = psidiff("replay", name, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert r"a\x1b]0;owned\x07\nb\u202e[red]\x9b31m\udc80.trace" in done.stderr
    done = psidiff("verify", "--rule", "\x1b[2J", check=False)
    assert done.returncode == 2 and r"\x1b[2J" in done.stderr and "\x1b" not in done.stderr


def test_names_are_no_markup(psidiff, tmp_path):
    folder = tmp_path / "[bold]"
    folder.mkdir()
    ask = ("sample", "shakespeare", "-n", 1, "--steps", 2, "--out")
    assert "[bold]/[red]x.txt" in psidiff(*ask, "[bold]/[red]x.txt").stderr
    assert "in [bold]/x[1]" in psidiff(*ask, "[bold]/x[1]").stderr
    assert (
        "[bold]/[red]x.png"
        in psidiff(
            "sample", "digits", "-n", 1, "--steps", 2, "--out", "[bold]/[red]x.png"
        ).stderr
    )


def test_words_stay_as_they_are_where_they_do_nothing():
    text = "Ψ ≤ 1 [x] ü 漢字 😀 \u00a0|\u200d"
    assert plain(text) == text and plain("a\tb\n", keep="\n") == "a\\tb\n"
    from rich.console import Console

    console = Console(width=80, force_terminal=True, color_system=None)
    with console.capture() as capture:
        say(console, "a [b]", ("[/c]", "bold"), "\x1b[31m")
    assert capture.get() == "a [b][/c]\\x1b[31m\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_and_a_closed_one_are_said_plainly():
    command = [sys.executable, "-m", "psidiff", "models", "digits"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2, done.stderr
    said = "psidiff: standard output or a file cannot be written: No space left on device\n"
    assert done.stderr == said
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_main_lets_no_exception_through(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["psidiff", "models", "nobody"])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert stopped.value.code == 2 and "no model 'nobody' ships" in capsys.readouterr().err
