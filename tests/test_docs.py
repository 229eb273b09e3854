"""What the documents show runs, and what they name exists."""

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from psidiff.cli.main import app
from psidiff.evaluation.metrics import METRICS

ROOT = Path(__file__).parents[1]


def blocks(path, language):
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", ["README.md", "docs/extending.md", "docs/samplers.md"])
def test_the_examples_run_one_after_another(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = blocks(path, "python")
    assert examples
    space = {"__name__": "example"}
    for example in examples:
        exec(compile(example, path, "exec"), space)
    assert capsys.readouterr().out


def test_each_extension_takes_less_than_thirty_lines():
    assert all(example.count("\n") <= 30 for example in blocks("docs/extending.md", "python"))


def test_the_table_of_metrics_is_that_of_the_code():
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    for m in METRICS.values():
        parts = (f"`{m.name}`", ", ".join(m.needs), m.better or "–", m.unit or "–", m.about)
        assert f"| {' | '.join(parts)} |" in text


@pytest.mark.parametrize("page", ["samplers.md", "reproduce.md"])
def test_the_tables_of_a_page_are_those_of_the_code(page):
    path = ROOT / "docs/write_tables.py"
    spec = importlib.util.spec_from_file_location("write_tables", path)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert text == tables.filled(text, tables.TABLES[page]), "python docs/write_tables.py"


def test_files_of_ones_own_work_through_the_verbs_that_they_concern(psidiff):
    files = {}
    for block in blocks("docs/extending.md", "python"):
        if match := re.match(r"# (\w+\.py)\n", block):
            files[match[1]] = block
            Path(match[1]).write_text(block)
    ran = ""
    for block in blocks("docs/extending.md", "shell"):
        for line in block.strip().splitlines():
            program, *words = shlex.split(line)
            if program == "python":
                subprocess.run([sys.executable, *words], check=True)
            else:
                psidiff(*words)
            ran += line
    assert all(name in ran for name in files) and len(files) >= 3


def test_the_paper_map_names_tests_that_exist():
    text = (ROOT / "docs/paper-map.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)(?:::(test_\w+))?`", text))
    assert len(named) > 15
    for module, name in named:
        source = (ROOT / "tests" / f"{module}.py").read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, f"{module}::{name}"


def resolves(name):
    """Whether psidiff has a module, or something in one, of this dotted name."""
    for cut in range(name.count(".") + 1, -1, -1):
        parts = name.split(".")
        try:
            found = importlib.import_module(".".join(["psidiff", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[cut:])
    return False


def test_the_architecture_names_what_is_there_and_no_way_has_more_than_ten_hops():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", text))
    assert len(names) > 25
    assert {name for name in names if not resolves(name)} == set()
    ways = re.split(r"^## The way of", text, flags=re.MULTILINE)[1:]
    assert len(ways) == 3
    for way in ways:
        assert 5 <= len(re.findall(r"^\d+\. ", way, flags=re.MULTILINE)) <= 10


def test_the_picture_of_the_architecture_has_every_package():
    path = ROOT / "docs/draw_architecture.py"
    space = {"__name__": "drawing", "__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), space)
    below = space["imported_boxes"]()
    assert set(space["SAID"]) == set(below)
    assert min(space["heights"](below).values()) == 0  # and it ends: there is no circle


def test_every_command_the_documents_name_is_one():
    known = {c.name or c.callback.__name__ for c in app.registered_commands}
    named = {}
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        text = path.read_text(encoding="utf-8")
        code = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
        code += re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for piece in code:
            verbs = re.findall(r"(?:^|-m |[$&|] )psidiff\s+([a-z][\w-]*)", piece, re.MULTILINE)
            named |= dict.fromkeys(verbs, path.name)
    assert {"demo", "train", "sample", "evaluate", "verify"} <= named.keys()
    assert {verb: path for verb, path in named.items() if verb not in known} == {}


def test_no_docstring_is_of_a_time_before_the_library_was_whole():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                said = ast.get_docstring(node) or ""
                assert not re.search(r"for now|not yet implemented|TODO", said), path


def test_the_readme_names_the_two_commands_and_every_folder():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in text and "make test" in text
    for folder in (ROOT / "src/psidiff").iterdir():
        if folder.is_dir() and (folder / "__init__.py").exists():
            assert f"src/psidiff/{folder.name}/" in text
