"""The script that runs two commits side by side."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from compare_commits import SAMPLED, verdict  # noqa: E402


@pytest.mark.parametrize(
    ("present", "again", "free", "said"),
    [
        (1.02, 1.0, 0.0, "equal"),
        (1.05, 1.0, 0.0, "slower"),
        (1.05, 1.06, 0.0, "equal"),  # as far apart as the same code is from itself
        (1.05, 1.0, 0.1, "equal"),
        (0.9, 1.0, 0.0, "faster"),
    ],
)
def test_a_difference_counts_beyond_3_percent_and_beyond_that_of_the_same_code(
    present, again, free, said
):
    times = {"former": [1.0, 1.0, 9.0], "present": [present] * 3, "former again": [again] * 3}
    assert verdict(times, free).split(" | ")[-1] == said


@pytest.mark.slow
def test_a_commit_makes_the_tokens_it_makes():
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a checkout")
    command = [sys.executable, "benchmarks/compare_commits.py", "HEAD", "--only", "tokens"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    rows = 2 * len(SAMPLED)
    assert done.returncode == 0, done.stderr
    assert f"{rows} of {rows} equal" in done.stdout
