"""Shapes and types are checked at every call of psidiff while its tests run; the command."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tensors are small; a pool of threads only gets in the way
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

if all(find_spec(tool) for tool in ("beartype", "jaxtyping")):  # elsewhere the tests run too
    from jaxtyping import install_import_hook

    install_import_hook("psidiff", "beartype.beartype").__enter__()


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws from torch's global generator is the same every time."""
    torch.manual_seed(0)


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def forget_imported_files(monkeypatch):
    """Each test imports files of its own, which may have one name."""
    from psidiff import registry

    monkeypatch.setattr(registry, "_modules", {})


@pytest.fixture
def psidiff(tmp_path, capsys, monkeypatch):
    """The command, in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments, check=True):
        monkeypatch.setattr(sys, "argv", ["psidiff", *map(str, arguments)])
        from psidiff.cli.main import main  # once the hook is in place

        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        done = Done(stopped.value.code or 0, *capsys.readouterr())
        assert not check or done.returncode == 0, done.stderr
        return done

    return run
