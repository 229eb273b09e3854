"""Types as basedpyright reads them: of the README's Python, and of all public names of the
package as it is installed. `make test-peers`."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from test_types import ROOT, readme_program

pytest.importorskip("basedpyright", reason="make test-peers installs it")

LEAST = 95.0  # percent of the public symbols have a type that is known


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A function that runs basedpyright where psidiff is installed, beside what is here."""
    place = tmp_path_factory.mktemp("types")
    venv.create(place / "env", symlinks=True)
    (packages,) = (place / "env").glob("lib/python*/site-packages")
    shutil.copytree(ROOT / "src" / "psidiff", packages / "psidiff")
    folders = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "beside.pth").write_text("\n".join(folders), encoding="utf-8")
    program = Path(sysconfig.get_path("scripts")) / "basedpyright"
    keep = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = f"{place / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = keep | {"PATH": found, "VIRTUAL_ENV": str(place / "env")}

    def run(*words):
        (place / "readme.py").write_text(readme_program(), encoding="utf-8")
        done = subprocess.run(
            [str(program), *words], capture_output=True, text=True, cwd=place, env=environment
        )
        return done.stdout

    return run


def test_the_python_of_the_readme_has_no_errors(checked):
    said = checked("readme.py", "--level", "error")
    assert re.search(r"\b0 errors", said), said


def test_the_types_of_public_names_are_known(checked):
    said = checked("--verifytypes", "psidiff", "--ignoreexternal")
    score = re.search(r"Type completeness score: ([\d.]+)%", said)
    assert score is not None and float(score[1]) > LEAST, said[-3000:]
