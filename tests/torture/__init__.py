"""Torture: seeded, bounded attempts to break psidiff from outside; see `__main__`."""

import sys
from pathlib import Path

# the psidiff of these files, whichever one is installed
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
