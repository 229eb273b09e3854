"""Who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import psidiff

ROOT = Path(psidiff.__file__).parent
BELOW = {
    "types": set(),
    "pages": set(),
    "limits": set(),
    "checksums": set(),
    "locks": set(),
    "options": {"checksums"},
    "registry": {"checksums", "options"},
    "sampler_options": set(),
    "pickles": {"limits", "checksums"},
    "torch_files": {"limits", "checksums", "pickles"},
    "files": {"limits", "checksums"},
    "parallel": {"types"},
    "kernels": {"types"},
    "process": {"types", "registry", "kernels"},
    "duality": {"types", "process", "kernels"},
    "models": {"types", "limits", "kernels", "process"},
    "sampling": {
        "types",
        "files",
        "checksums",
        "limits",
        "registry",
        "sampler_options",
        "kernels",
        "process",
    },
    "training": {
        "types",
        "files",
        "limits",
        "checksums",
        "pickles",
        "torch_files",
        "parallel",
        "kernels",
        "process",
        "duality",
    },
    "data": {"types", "limits", "checksums", "options", "files", "pickles", "process"},
    "evaluation": {
        "types",
        "limits",
        "checksums",
        "files",
        "torch_files",
        "process",
        "sampling",
        "data",
    },
}
EVERYTHING = {
    "model",
    "wrapped",
    "request",
    "conditions",
    "decoded",
    "generate",
    "integrations",
    "serve",
    "cli",
    "recipes",
    "shipped",
    "__main__",
}


def imported_parts(path):
    """The parts of psidiff that a file imports, relative and absolute ones."""
    package = ("psidiff", *path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            full = (*base, *(node.module.split(".") if node.module else ()))
            names = [(*full, a.name) for a in node.names] if len(full) == 1 else [full]
        elif isinstance(node, ast.Import):
            names = [tuple(a.name.split(".")) for a in node.names]
        else:
            continue
        yield from (name[1] for name in names if name[0] == "psidiff" and len(name) > 1)


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_only_go_down(path):
    part = path.relative_to(ROOT).with_suffix("").parts[0]
    if part in EVERYTHING or part == "__init__":
        return
    assert set(imported_parts(path)) <= BELOW[part] | {part}


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_file_opens_with_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_package_runs_without_its_development_tools_and_what_windows_lacks():
    code = (
        "import sys; sys.modules.update(jaxtyping=None, beartype=None, scipy=None)\n"
        "sys.modules.update(resource=None)\n"
        "import psidiff.duality, psidiff.evaluation.verify, psidiff.cli.main\n"
        "import psidiff.training, psidiff.cli.train, psidiff.cli.evaluate\n"
        "from psidiff.process import Uniform, LogLinear\n"
        "from psidiff.sampling import sample, plan, Cap\n"
        "import torch\n"
        "f = lambda z, a, labels=None: torch.zeros(*z.shape, 5).log_softmax(-1)\n"
        "print(sample(f, Uniform(5), plan(4, LogLinear(), Cap(.1)), (2, 3)).tokens.shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[2, 3]" in done.stdout
