"""Propositions on order statistics: the largest Gaussians without drawing all of them.

    python benchmarks/paper/order_statistics.py [--draws 200000] [--vocab-size 50257]

Each of the k largest of K - 1 normals, drawn from the top down, becomes a uniform number by
the law that the propositions give: U_(1)^N, and (U_(i+1) / U_(i))^(N - i). The numbers must be
uniform and uncorrelated; beside it the largest values against sorted draws.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from drawing import COLOURS, keep, panels
from torch.special import log_ndtr

from psidiff.duality.relaxation import top_gaussians

TOP = 5
SORTED = 2**27  # normals that are drawn to be sorted


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/paper"))
    parser.add_argument("--draws", type=int, default=200_000)
    parser.add_argument("--vocab-size", type=int, default=50_257)
    options = parser.parse_args(arguments)
    N, g = options.vocab_size - 1, torch.Generator().manual_seed(0)
    draws = torch.empty(options.draws, TOP, dtype=torch.float64).exponential_(generator=g)
    values = top_gaussians(draws, N)
    log_u = log_ndtr(values)
    before = torch.cat((torch.zeros_like(log_u[:, :1]), log_u[:, :-1]), 1)
    left = N - torch.arange(TOP)
    uniforms = ((log_u - before) * left).exp()
    rows = max(1, min(options.draws, SORTED // N))
    by_sort = torch.cat(
        [
            torch.randn(part, N, generator=g).topk(TOP).values
            for part in [64] * (rows // 64) + [rows % 64]
            if part
        ]
    )
    figure, axes = panels(1, TOP, [f"largest {i + 1}" for i in range(TOP)], (2.3, 2.1))
    numbers = []
    grid = (torch.arange(options.draws, dtype=torch.float64) + 0.5) / options.draws
    limit = math.sqrt(-math.log(0.001 / 2) / 2 / options.draws)
    for i in range(TOP):
        ordered = uniforms[:, i].sort().values
        axes[i].hist(by_sort[:, i].numpy(), 40, density=True, color=COLOURS[1], alpha=0.5)
        axes[i].hist(values[:, i].numpy(), 40, density=True, histtype="step", color=COLOURS[0])
        numbers.append(
            {
                "rank": i + 1,
                "of": N,
                "draws": options.draws,
                "distance from uniform": (ordered - grid).abs().max().item(),
                "distance by chance, 1 in 1000": limit,
                "mean": values[:, i].mean().item(),
                "mean by sorting": by_sort[:, i].double().mean().item(),
                "its standard error": by_sort[:, i].double().std().item() / math.sqrt(rows),
            }
        )
    correlation = torch.corrcoef(uniforms.T).fill_diagonal_(0).abs().max().item()
    numbers.append({"largest correlation": correlation, "by chance": 4 / options.draws**0.5})
    keep(figure, numbers, options.out, "order_statistics")


if __name__ == "__main__":
    main()
