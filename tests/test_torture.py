"""The torture program in a form of three minutes: equal seeds, equal tries, no failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forks"),
]


def torture(*options, folder):
    command = [sys.executable, "-m", "tests.torture", "--out", str(folder / "made.jsonl")]
    done = subprocess.run(
        [*command, *map(str, options)], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("area", "minutes"),
    [
        ("files", 0.8),
        ("bits", 0.3),
        ("disk", 0.2),
        ("kills-train", 0.6),
        ("kills-sample", 0.4),
        ("requests", 0.7),
    ],
)
def test_three_minutes_of_torture_break_nothing(area, minutes, tmp_path):
    code, said = torture("--area", area, "--minutes", minutes, "--seed", 7, folder=tmp_path)
    assert code == 0, said


def test_one_try_is_the_same_again_and_the_table_adds_up(tmp_path):
    from psidiff.files import read_json_lines

    for number in (0, 1):
        assert torture("--only", f"files:{number}", "--seed", 3, folder=tmp_path)[0] == 0
    torture("--only", "files:0", "--seed", 3, folder=tmp_path)
    first, _, again = read_json_lines(tmp_path / "made.jsonl")
    keys = ("area", "number", "seed", "outcome", "what")
    assert [first[key] for key in keys] == [again[key] for key in keys]
    assert "| files | 2 | 0 |" in torture("--table", folder=tmp_path)[1]
