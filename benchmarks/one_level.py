"""What infilling loses when a network knows only one level for the whole sequence.

    python benchmarks/one_level.py

A network trained with one level a sequence takes the smallest in it, so it thinks that given
tokens are as noisy as the others. Here it is the exact denoiser of a Markov chain (3 tokens, 5
positions) told so. Total variation between the law of the infilled sequence, by enumeration,
and the exact conditional, for ancestral sampling: the mean over random chains (and its standard
error), each with given tokens drawn from it at random positions. Beside it the denoiser that
hears every level.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psidiff.data.toy import Chain
from psidiff.evaluation.exact_distribution import every_state, propagate, total_variation
from psidiff.evaluation.verify import toy_priors
from psidiff.process import LogLinear, posterior
from psidiff.process.prior import Prior
from psidiff.sampling import Constant, Step, plan

STEPS = (16, 64, 256)


@dataclass(frozen=True)
class OneLevel:
    """A denoiser that hears the smallest level of each sequence."""

    denoiser: Any

    def __call__(self, z: Tensor, alpha: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.denoiser(z, alpha.amin(1, keepdim=True), labels)


def distance(chain: Chain, denoiser: Any, prior: Prior, given: Tensor, steps: int) -> float:
    """Total variation between the infilled law and the chain given these tokens."""

    def probs_at(step: Step, states: Tensor) -> Tensor:
        levels = torch.tensor([step.alpha_s, step.alpha_t], dtype=torch.float64)
        known = (given >= 0)[:, None]  # has level 1, before and after
        alpha_s, alpha_t = levels.expand(*states.shape, 2).masked_fill(known, 1).split(1, -1)
        log_x = prior.without_mask(denoiser(states, alpha_t.clamp(min=1e-9)))
        x = log_x.softmax(-1)
        return posterior(prior, states, x, alpha_s, alpha_t).probs(prior, states, x)

    # it starts so close to the prior that only steps and levels err
    walk = plan(steps, LogLinear(eps=1e-6), Constant(1.0))
    law = propagate(prior, chain.length, walk, probs_at, given)
    states = every_state(prior.vocab_size, chain.length)
    possible = (states < chain.num_tokens) & ((states == given) | (given < 0))
    target = torch.zeros_like(law)
    target[possible.all(-1)] = chain.log_prob(states[possible.all(-1)]).softmax(0)
    return total_variation(law, target)


def cases(count: int, length: int, number: int) -> list[tuple[Chain, Tensor]]:
    """Random chains, each with `count` tokens of one of its sequences, -1 elsewhere."""
    chains = [Chain.random(3, length, seed=seed) for seed in range(number)]
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(number, length, generator=generator).argsort(-1)
    tokens = torch.cat([chain.sample(1, generator) for chain in chains])
    return list(zip(chains, torch.where(order < count, tokens, -1), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--chains", type=int, default=16)
    args = parser.parse_args()
    heads = [f"one level, T = {n}" for n in STEPS]
    heads += [f"the worst of {args.chains}", f"by position, T = {STEPS[-1]}"]
    print(f"| prior | given | {' | '.join(heads)} |")
    print("|---|---|" + "---|" * len(heads))
    for prior, count in itertools.product(toy_priors(3), range(1, args.length)):
        each = cases(count, args.length, args.chains)
        biased = [
            [distance(c, OneLevel(c.denoiser(prior)), prior, g, n) for c, g in each]
            for n in STEPS
        ]
        exact = [distance(c, c.denoiser(prior), prior, g, STEPS[-1]) for c, g in each]
        cells = [f"{statistics.mean(found):.4f}" for found in (*biased, exact)]
        cells[2] += f" ± {statistics.stdev(biased[-1]) / len(each) ** 0.5:.4f}"
        cells.insert(3, f"{max(biased[-1]):.4f}")
        name = type(prior).__name__
        print(f"| {name} | {count} of {args.length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
