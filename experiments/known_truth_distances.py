"""Distances between the samples of known_truth.py and the truth's own rows, on a CPU.

    python experiments/known_truth_distances.py --work DIR

DIR/tokens has the samples of each cell. A low -log p says that samples are likely, not that
they are as various as the truth: text that repeats itself is likely too. These distances see
both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from cells import Cell, lines, measure

from psidiff.data.codec import Codec
from psidiff.evaluation.text_metrics import divergence, trigram_mauve
from psidiff.model import load

NGRAMS = (1, 2, 3)


def tokens_of(work: Path, cell: Cell) -> torch.Tensor:
    """(B, L), as known_truth.py kept them."""
    kept = np.load(work / "tokens" / f"{'_'.join(map(str, cell.values()))}.npy")
    return torch.from_numpy(kept.astype(np.int64))


def distances(made: torch.Tensor, real: torch.Tensor, codec: Codec) -> Cell:
    """Of samples (B, L) from rows of the truth (N, L)."""
    found = {f"js_{n}": divergence(made, real, n) for n in NGRAMS}
    texts, reference = ([codec.decode(row) for row in rows] for rows in (made, real))
    found["mauve"] = trigram_mauve(texts, reference)
    values = {name: measured.value for name, measured in found.items()}
    return values | {f"{name}_error": measured.stderr for name, measured in found.items()}


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    read.add_argument("--work", type=Path, required=True, help="of known_truth.py")
    work = read.parse_args().work
    codec = load("books").codec
    truth = tokens_of(work, {"model": "truth"})
    sampled = [line for line in lines("known_truth") if "rule" in line]
    size = sampled[0]["samples"]
    real, spare = truth[size:], truth[:size]

    def of_cell(cell: Cell) -> Cell:
        made = spare if cell == {"model": "truth"} else tokens_of(work, cell)
        return distances(made, real, codec)

    names = ("model", "rule", "steps", "top_p", "temperature")
    asked = [{name: line[name] for name in names} for line in sampled]
    measure("known_truth_distances", [{"model": "truth"}, *asked], of_cell)


if __name__ == "__main__":
    main()
