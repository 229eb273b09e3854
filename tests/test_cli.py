"""The command line, as a person meets it."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from psidiff import __version__
from psidiff.cli.main import app

RUNNER = CliRunner()


def shell(*arguments, cwd=None):
    command = [sys.executable, "-m", "psidiff", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_version_and_help_name_what_there_is():
    assert RUNNER.invoke(app, ["--version"]).output.strip() == f"psidiff {__version__}"
    output = RUNNER.invoke(app, ["--help"]).output
    assert "demo" in output and "verify" in output


def test_the_demo_shows_both_samplers_and_leaves_a_page(tmp_path):
    done = RUNNER.invoke(app, ["demo", "--steps", "8", "--out", str(tmp_path / "d")])
    assert done.exit_code == 0, done.output
    assert "ancestral" in done.output and "cap:0.05" in done.output
    page = (tmp_path / "d" / "index.html").read_text(encoding="utf-8")
    assert "__DATA__" not in page and '"ancestral"' in page and len(page) < 2_000_000


def test_verify_prints_a_table_for_each_prior():
    done = RUNNER.invoke(app, ["verify", "--rule", "ancestral"])
    assert done.exit_code == 0, done.output
    for prior in ("Masked", "Uniform", "Mixed", "Unigram"):
        assert f"{prior} prior" in done.output
    assert "All 8 samplers do what they promise" in done.output


def test_verify_checks_a_step_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def wrong(prior, z, x, alpha_s, alpha_t, kappa):\n    return x\n"
    )
    done = shell("verify", "--step", "mine.py:wrong", "--rule", "ancestral", cwd=tmp_path)
    assert done.returncode == 1 and "do not keep the marginals" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--rule", "cap"], "'cap' is no kappa rule"),
        (["verify", "--step", "nowhere.py:f"], "nowhere.py:f"),
        (["demo", "--kappa", "cap:2"], "eta must be in [0, 1], got 2"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, words, tmp_path):
    done = shell(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and words in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
