"""Figures "marginal distributions of the top-5 entries": dense and sparse weights, histograms.

    python benchmarks/paper/top_weights.py [--draws 4000] [--vocab-sizes 100000 50257]

The paper's eight settings: a tokenizer of 100k tokens and GPT-2's, inverse temperatures 100 and
1,000, gamma of -1, -2 and -4. Its captions say "log signal-to-noise ratio" of gamma, whose sign
is the other way in the curriculum (gamma = -log SNR); the numbers here are gamma as the
curriculum uses it, and --gammas takes others. The Kolmogorov-Smirnov distance of each entry
stands beside the size that chance exceeds once in a thousand.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from drawing import COLOURS, keep, panels
from torch import Tensor

from psidiff.duality import relax_dense, relax_sparse

TOP = 5
SETTINGS = ((100, -2.0), (1000, -1.0), (1000, -2.0), (1000, -4.0))
LEAST = 1e-300  # smaller weights are drawn there
ENTRIES = 2**24  # of dense weights in memory at a time


def dense(count: int, gamma: float, K: int, temperature: float) -> Tensor:
    """The five largest of K weights, (count, 5)."""
    g, found = torch.Generator().manual_seed(0), []
    while count > 0:
        rows = min(count, max(1, ENTRIES // K))
        tokens = torch.randint(K, (1, rows), generator=g)
        probs, _ = relax_dense(tokens, torch.tensor([gamma]), K, temperature, g)
        found.append(probs[0].topk(TOP).values)
        count -= rows
    return torch.cat(found)


def sparse(count: int, gamma: float, K: int, temperature: float) -> Tensor:
    """The five weights that the curriculum forms, (count, 5)."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(K, (1, count), generator=g)
    return relax_sparse(tokens, torch.tensor([gamma]), K, TOP, temperature, g).weights[0]


def distance(a: Tensor, b: Tensor) -> float:
    """The Kolmogorov-Smirnov distance of two samples."""
    a, b = a.double().sort().values, b.double().sort().values
    both = torch.cat((a, b)).sort().values
    apart = [torch.searchsorted(x, both, right=True) / len(x) for x in (a, b)]
    return (apart[0] - apart[1]).abs().max().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/paper"))
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[100_000, 50_257])
    parser.add_argument("--gammas", type=float, nargs="*", help="instead of the paper's")
    options = parser.parse_args(arguments)
    settings = SETTINGS
    if options.gammas:
        settings = tuple(
            (inverse, gamma) for inverse in (100, 1000) for gamma in options.gammas
        )
    limit = math.sqrt(-math.log(0.001 / 2) / options.draws)
    for K in options.vocab_sizes:
        titles = [
            f"1/τ = {inverse}, γ = {gamma:g}, entry {i + 1}"
            for inverse, gamma in settings
            for i in range(TOP)
        ]
        figure, axes = panels(len(settings), TOP, titles, (2.3, 1.9))
        numbers = []
        for row, (inverse, gamma) in enumerate(settings):
            how = (options.draws, gamma, K, 1 / inverse)
            both = {"dense": dense(*how), "sparse": sparse(*how)}
            for i in range(TOP):
                ax, columns = axes[row * TOP + i], [each[:, i] for each in both.values()]
                logs = [column.double().clamp(min=LEAST).log10() for column in columns]
                edges = torch.linspace(min(each.min().item() for each in logs), 0, 41).numpy()
                for name, each, colour in zip(both, logs, COLOURS, strict=False):
                    ax.hist(each.numpy(), edges, histtype="step", color=colour, label=name)
                numbers.append(
                    {
                        "vocab_size": K,
                        "inverse temperature": inverse,
                        "gamma": gamma,
                        "entry": i + 1,
                        "dense mean": columns[0].double().mean().item(),
                        "sparse mean": columns[1].double().mean().item(),
                        "distance": distance(*columns),
                        "distance by chance, 1 in 1000": limit,
                        "draws": options.draws,
                    }
                )
        axes[0].legend(frameon=False, fontsize=7)
        for ax in axes[-TOP:]:
            ax.set_xlabel("log10 of the weight", fontsize=7)
        keep(figure, numbers, options.out, f"top_weights_{K}")


if __name__ == "__main__":
    main()
