"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import psidiff

ROOT = Path(psidiff.__file__).parent
WITH_EXAMPLES = sorted(
    path.relative_to(ROOT.parent).with_suffix("").as_posix().replace("/", ".")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name.removesuffix(".__init__"))
    except ImportError as error:
        pytest.skip(str(error))
    space = {**vars(module), "torch": torch}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testmod(module, extraglobs=space, optionflags=flags)
    assert tried and not failed
