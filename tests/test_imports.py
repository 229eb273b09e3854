"""Who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import psidiff

ROOT = Path(psidiff.__file__).parent
# From the bottom to the top: a part imports parts of the lines above its own, never of its own
# line. An import inside a function or under TYPE_CHECKING counts like any other.
LAYERS = """
types limits checksums locks sampler_options sampler_presets recipes pretrained
files pickles distributed
registry torch_files kernels
process
duality models
sampling
data
evaluation training html model_config released_checkpoints
model_card
request
generate
model
wrapping
__init__
integrations
experiment
serve
cli
__main__
"""
LAYER_OF = {part: i for i, line in enumerate(LAYERS.split("\n")) for part in line.split()}
FILES = sorted(ROOT.rglob("*.py"))


def name_of(path):
    """The module of a file, such as ("psidiff", "sampling", "plan")."""
    parts = ("psidiff", *path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {name_of(path): path for path in FILES}


def part_of(module):
    """A package or a module at the root of psidiff; "__init__" is psidiff itself."""
    return module[1] if len(module) > 1 else "__init__"


def imported(path):
    """The modules of psidiff that a file imports anywhere in it."""
    package = ("psidiff", *path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            full = (*base, *(node.module.split(".") if node.module else ()))
            names = [(*full, a.name) for a in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(a.name.split(".")) for a in node.names]
        else:
            continue
        for name in names:
            if name[0] == "psidiff":
                yield name if name in MODULES else name[:-1]


def test_the_layers_name_every_package_and_module():
    assert {part_of(module) for module in MODULES} == set(LAYER_OF)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_go_down(path):
    part = part_of(name_of(path))
    others = {part_of(module) for module in imported(path)} - {part}
    assert {other for other in others if LAYER_OF[other] >= LAYER_OF[part]} == set()


def test_no_modules_import_each_other_in_a_circle():
    left = {module: set(imported(path)) - {module} for module, path in MODULES.items()}
    while free := {module for module, below in left.items() if not below & left.keys()}:
        left = {module: below for module, below in left.items() if module not in free}
    assert sorted(".".join(module) for module in left) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_command_line_knows_a_console(path):
    if part_of(name_of(path)) != "cli":
        tree = ast.walk(ast.parse(path.read_text()))
        names = [n.module or "" for n in tree if isinstance(n, ast.ImportFrom) and not n.level]
        assert not {name.split(".")[0] for name in names} & {"rich", "typer"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_opens_with_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_package_runs_without_its_development_tools_and_what_windows_lacks():
    code = (
        "import sys; sys.modules.update(jaxtyping=None, beartype=None, scipy=None)\n"
        "sys.modules.update(resource=None)\n"
        "import psidiff.duality, psidiff.evaluation.verify, psidiff.cli.main\n"
        "import psidiff.training, psidiff.experiment.train, psidiff.cli.evaluate\n"
        "from psidiff.process import Uniform, LogLinear\n"
        "from psidiff.sampling import sample, plan, Cap\n"
        "import torch\n"
        "f = lambda z, a, labels=None: torch.zeros(*z.shape, 5).log_softmax(-1)\n"
        "print(sample(f, Uniform(5), plan(4, LogLinear(), Cap(.1)), (2, 3)).tokens.shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[2, 3]" in done.stdout
