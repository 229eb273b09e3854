"""Sampling end to end on the CPU: lazy against the straightforward dense float64 way.

A transformer of 12 x 768 with random weights, K = 50,258, L = 256. The dense way evaluates
the head at every position, takes log-softmax and truncates by a sort, forms two posteriors over
K in float64 and runs a race over all of them, at every step. Both take 16 steps that stand for
a plan of 256 (15 spread evenly, and the last, by their shares), turn by turn; the lazy way's
whole plan is run once beside them.

    python benchmarks/sampling.py [--pairs 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from step import dense_step, extra_memory

from psidiff.models import Parameterized, Transformer
from psidiff.process import LogLinear, Uniform
from psidiff.sampling import Step, parse_kappa, plan, sample


def make(width: int, blocks: int, K: int) -> Parameterized:
    """Random weights, and logits with a heavy head and a long tail."""
    torch.manual_seed(0)
    network = Transformer(K, width, blocks, width // 64, 128, dropout=0.0).eval()
    torch.nn.init.normal_(network.output_layer.linear.weight, std=3 / width**0.5)
    return Parameterized(network.requires_grad_(False), Uniform(K)).eval()


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def weighted(steps: tuple[Step, ...], count: int) -> list[tuple[Step, float]]:
    """`count` steps that stand for all: the middles of equal parts, and the last by itself."""
    most, last = steps[:-1], steps[-1]
    chosen = [most[(2 * i + 1) * len(most) // (2 * count)] for i in range(count - 1)]
    share = len(most) / len(steps) / len(chosen)
    return [*((step, share) for step in chosen), (last, 1 / len(steps))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50_258)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=16, help="of the 256, in every pair")
    parser.add_argument("--rules", nargs="+", default=["cap:0.0025"])
    args = parser.parse_args()
    denoiser, prior = make(args.width, args.blocks, args.vocab), Uniform(args.vocab)
    shape, z = (1, args.length), torch.randint(args.vocab, (1, args.length))
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.blocks} x "
        f"{args.width}, L={args.length} K={args.vocab}, medians of {args.pairs} pairs"
    )

    @torch.no_grad()
    def dense(step: Step, top_p: float | None) -> None:
        dense_step(denoiser(z, step.alpha_t), z, step, top_p)

    def lazy(steps: tuple[Step, ...], top_p: float | None) -> Any:
        generator = torch.Generator().manual_seed(0)
        return sample(denoiser, prior, steps, shape, generator, top_p=top_p)

    @torch.no_grad()
    def forward() -> None:
        denoiser.hidden(z, 0.5)

    for rule in args.rules:
        steps = plan(256, LogLinear(), parse_kappa(rule))
        for top_p in (None, 0.9):
            compare(args, rule, top_p, steps, dense, lazy, forward)
    overhead(args, forward, lazy)


def compare(
    args: Any, rule: str, top_p: float | None, steps: Any, dense: Any, lazy: Any, forward: Any
) -> None:
    """Time and memory of both, at the same steps."""
    times: dict[str, list[float]] = {"dense": [], "lazy": [], "network": []}
    for pair in range(args.pairs + 1):
        total = dict.fromkeys(times, 0.0)
        for step, weight in weighted(steps, args.steps if pair else 2):
            total["dense"] += weight * seconds(lambda step=step: dense(step, top_p))
            total["lazy"] += weight * seconds(lambda step=step: lazy((step,), top_p))
            total["network"] += weight * seconds(forward)
        if pair:  # the first pair warms up
            for name, value in total.items():
                times[name].append(value)
    ratio = statistics.median(d / o for d, o in zip(times["dense"], times["lazy"], strict=True))
    step = {name: statistics.median(values) for name, values in times.items()}
    pass_memory = extra_memory(forward)
    last = steps[-1:]
    memory = {
        "dense": extra_memory(lambda: dense(last[0], top_p)) - pass_memory,
        "lazy": max(extra_memory(lambda s=s: lazy((s,), top_p)) for s in (last[0], steps[128]))
        - pass_memory,
    }
    begun = time.perf_counter()
    made = lazy(steps, top_p)
    whole = time.perf_counter() - begun
    print(
        f"{rule}, top-p {top_p or 'off'}: dense {step['dense'] * 1e3:.0f} ms a step, lazy "
        f"{step['lazy'] * 1e3:.0f} ms, the network alone {step['network'] * 1e3:.0f} ms: "
        f"{ratio:.1f}x faster; memory beyond the pass {memory['dense']:.0f} MiB and "
        f"{memory['lazy']:.1f} MiB ({memory['lazy'] / memory['dense']:.1%}); the whole plan "
        f"lazily {whole:.1f} s ({whole / len(steps) * 1e3:.0f} ms a step), "
        f"{made.head_rows / args.length:.1f} head rows a token",
        flush=True,
    )


def overhead(args: Any, forward: Any, lazy: Any) -> None:
    """What a step of 1,024 costs beside the network, the head's rows included."""
    for rule in args.rules:
        steps = plan(1024, LogLinear(), parse_kappa(rule))
        shares = []
        for pair in range(args.pairs + 1):
            alone = beside = 0.0
            for step, weight in weighted(steps, args.steps):
                alone += weight * seconds(forward)
                beside += weight * seconds(lambda step=step: lazy((step,), None))
            if pair:
                shares.append(beside / alone - 1)
        print(
            f"{rule}, T = 1024: a step costs {statistics.median(shares):.1%} of the network "
            f"beside it (pairs {min(shares):.1%} to {max(shares):.1%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
