"""What the README shows is clean to a strict type checker."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def readme_program():
    """All Python of the README, in its order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"```python[^\n]*\n(.*?)```", text, re.DOTALL)
    assert len(found) >= 5
    return "\n".join(found)


@pytest.mark.slow
def test_the_python_of_the_readme_is_clean_under_mypy_strict(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "readme.py").write_text(readme_program(), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    # functions of theirs that have no types
    command += [f"--untyped-calls-exclude={package}" for package in ("torch", "diffusers")]
    command += ["--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, str(tmp_path / "readme.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
