"""One Psi step on the CPU: ours against the straightforward dense float64 way.

Both get the same log x_theta, (1, 256, 50258) in float32, so the network's cost is in neither.
The dense way is what research code does: float64 probabilities, a sort for top-p, two full
posteriors with a one-hot, an exponential race over all K.

    python benchmarks/step.py
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from psidiff.process import LogLinear, Uniform
from psidiff.sampling import Step, parse_kappa, sample


def dense_step(log_x: Tensor, z: Tensor, step: Step, top_p: float | None) -> Tensor:
    """Everything materialised, in float64."""
    K = log_x.shape[-1]
    log_x = log_x.double()
    if top_p is not None:
        ordered, order = log_x.sort(-1, descending=True)
        drop = ordered.exp().cumsum(-1) > top_p
        drop[..., 1:] = drop[..., :-1].clone()
        drop[..., 0] = False
        log_x = log_x.masked_fill(drop.scatter(-1, order, drop), -torch.inf).log_softmax(-1)
    x = log_x.exp()
    one_hot = F.one_hot(z, K)

    def posterior(alpha_s: float) -> Tensor:
        alpha_t, survival = step.alpha_t, step.alpha_t / alpha_s
        top = K * alpha_t * x * one_hot + (survival - alpha_t) * one_hot
        top = top + (alpha_s - alpha_t) * x + (1 - survival) * (1 - alpha_s) / K
        return top / (K * alpha_t * x.gather(-1, z[..., None]) + 1 - alpha_t)

    corrector = step.alpha_s * posterior(1.0) + (1 - step.alpha_s) / K
    probs = step.kappa * posterior(step.alpha_s) + (1 - step.kappa) * corrector
    race = 1e-10 - (torch.rand_like(probs) + 1e-10).log()
    return (probs / race).argmax(-1)


def our_step(log_x: Tensor, prior: Uniform, step: Step, top_p: float | None) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (log_x.shape[0], log_x.shape[1])
    return sample(
        lambda z, alpha, labels=None: log_x, prior, (step,), shape, generator, top_p=top_p
    ).tokens


def extra_memory(work: Callable[[], object]) -> float:
    """Peak resident memory during `work` above that before it, in MiB (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)  # give freed memory back, or reusing it would look free
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident("VmRSS")
    work()
    return (resident("VmHWM") - before) / 1024


def resident(field: str) -> int:
    """A line of /proc/self/status, in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50_258)
    args = parser.parse_args()
    torch.manual_seed(0)
    prior, schedule = Uniform(args.vocab), LogLinear()
    # logits with a heavy head and a long tail, as a language model's
    log_x = (3 * torch.randn(1, args.length, args.vocab)).log_softmax(-1)
    z = torch.randint(args.vocab, (1, args.length))
    rule = parse_kappa("cap:0.005")

    def step_at(t: float, s: float) -> Step:
        alpha_t, alpha_s = schedule.alpha(t), schedule.alpha(s) if s else 1.0
        return Step(t, alpha_t, alpha_s, rule(t, alpha_s, alpha_t))

    cases = {
        "a step of 256 at t = 1/2": step_at(0.5, 0.5 - 1 / 256),
        "the last step: every row is read": step_at(1e-3, 0.0),
    }
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, B=1 L={args.length} "
        f"K={args.vocab}, medians of {args.pairs} alternating pairs"
    )
    for name, step in cases.items():
        for top_p in (None, 0.9):
            work = {
                "dense": lambda step=step, p=top_p: dense_step(log_x, z, step, p),
                "ours": lambda step=step, p=top_p: our_step(log_x, prior, step, p),
            }
            times: dict[str, list[float]] = {"dense": [], "ours": []}
            for pair in range(args.pairs + 1):
                for which, run in work.items():
                    start = time.perf_counter()
                    run()
                    if pair:  # the first pair warms up
                        times[which].append(time.perf_counter() - start)
            seconds = {which: statistics.median(t) for which, t in times.items()}
            memory = {which: extra_memory(run) for which, run in work.items()}
            print(
                f"{name}, top-p {top_p or 'off'}: dense {seconds['dense'] * 1e3:.0f} ms "
                f"{memory['dense']:.0f} MiB, ours {seconds['ours'] * 1e3:.1f} ms "
                f"{memory['ours']:.1f} MiB: {seconds['dense'] / seconds['ours']:.0f}x faster, "
                f"{memory['dense'] / max(memory['ours'], 0.1):.0f}x less memory"
            )


if __name__ == "__main__":
    main()
