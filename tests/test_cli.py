"""The command line, as a person meets it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.main import get_command
from typer.testing import CliRunner

import psidiff
from psidiff import __version__
from psidiff.cli import doctor
from psidiff.cli.main import app
from psidiff.cli.verify import load_step
from psidiff.evaluation.verify import verify
from psidiff.models import Transformer
from psidiff.sampler_options import OPTIONS

RUNNER = CliRunner()


def shell(*arguments, cwd=None):
    command = [sys.executable, "-m", "psidiff", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_version_and_help_name_what_there_is():
    assert RUNNER.invoke(app, ["--version"]).output.strip() == f"psidiff {__version__}"
    output = RUNNER.invoke(app, ["--help"]).output
    assert all(verb in output for verb in ("demo", "verify", "convert"))


def test_sample_has_an_option_for_every_setting_of_a_sampler():
    (verb,) = (c for c in get_command(app).commands.values() if c.name == "sample")
    shown = {each.name: each.help for each in verb.params}
    for name, option in OPTIONS.items():
        assert shown[name].startswith(option.help)


def test_the_command_line_is_shown_before_torch_is_loaded():
    code = "import sys, psidiff.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_verify_prints_a_table_for_each_prior():
    done = RUNNER.invoke(app, ["verify", "--rule", "ancestral"])
    assert done.exit_code == 0, done.output
    for prior in ("Masked", "Uniform", "Mixed", "Unigram"):
        assert f"{prior} prior" in done.output
    assert "All 8 samplers that promise it keep the marginals" in done.output


def test_verify_checks_a_step_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def wrong(prior, z, x, alpha_s, alpha_t, kappa):\n    return x\n"
    )
    done = shell("verify", "--step", "mine.py:wrong", "--rule", "ancestral", cwd=tmp_path)
    assert done.returncode == 1 and "do not keep the marginals" in done.stdout


def test_doctor_says_what_to_type_for_what_is_not_installed(monkeypatch):
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    extras = extras["project"]["optional-dependencies"]
    known = {name: extra for name, _, extra, _ in doctor.OPTIONAL}
    for extra, wanted in extras.items():
        for package in wanted if extra != "dev" else ():
            assert re.match(r"[\w-]+", package)[0] in known, f"{package} of {extra}"
    for name, extra in known.items():
        assert any(p.startswith(name) for p in extras[extra]) if extra else True, name
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    monkeypatch.setenv("COLUMNS", "100")
    output = RUNNER.invoke(app, ["doctor"]).output
    assert "pip install 'psidiff[judge]'" in output and "pip install wandb" in output
    assert output.count("not installed") == len(known) == output.count("pip install")


def test_convert_writes_a_folder_that_loads(tmp_path):
    network = Transformer(11, 32, 2, 4, 16)
    state = {f"backbone.{k}": v.contiguous() for k, v in network.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    config = {
        "model_type": "duo",
        "hidden_dim": 32,
        "cond_dim": 16,
        "n_blocks": 2,
        "n_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = RUNNER.invoke(app, ["convert", str(tmp_path), str(tmp_path / "ours")])
    assert done.exit_code == 0, done.output
    assert "Uniform(vocab_size=11)" in done.output
    z = torch.zeros(1, 4, dtype=torch.int64)
    ours, theirs = psidiff.load(tmp_path / "ours"), psidiff.load(tmp_path)
    assert torch.equal(ours.denoiser(z, 0.4), theirs.denoiser(z, 0.4))


BROKEN_STEPS = {
    "raises": ("raise RuntimeError('boom')", "line 2: RuntimeError: boom"),
    "returns None": ("pass", "not NoneType"),
    "returns text": ("return 'x'", "not str"),
    "too narrow": ("return x[..., :1]", "the probabilities of a step must have shape"),
    "wrong ids": ("return z + 99", "the tokens of a step must hold token ids"),
}


@pytest.mark.parametrize("fault", BROKEN_STEPS)
def test_a_step_that_fails_is_named(fault, tmp_path):
    body, words = BROKEN_STEPS[fault]
    path = tmp_path / "mine.py"
    path.write_text(f"def f(prior, z, x, alpha_s, alpha_t, kappa):\n    {body}\n")
    with pytest.raises(ValueError, match=words):
        list(verify(load_step(f"{path}:f"), ["ancestral"]))


def test_a_step_file_with_a_mistake_is_named(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import nothing_like_this\n")
    with pytest.raises(ValueError, match="cannot be imported: line 1: ModuleNotFoundError"):
        load_step(f"{path}:f")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--rule", "cap"], "'cap' is no kappa rule"),
        (["verify", "--step", "nowhere.py:f"], "nowhere.py is not a Python file that exists"),
        (["verify", "--rule", "ancestral", "--rule", "cup:1"], "'cup:1' is no kappa rule"),
        (["convert", "nowhere.ckpt", "x"], "there is no file nowhere.ckpt"),
        (["demo", "--kappa", "cap:2"], "eta must be in [0, 1], got 2"),
        (["demo", "--kappa", "ancestral"], "name another --kappa"),
        (["demo", "--out", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, words, psidiff):
    done = psidiff(*arguments, check=False)
    assert done.returncode == 2 and words in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_a_mistake_ends_the_process_with_2(tmp_path):
    done = shell("verify", "--rule", "cap", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
