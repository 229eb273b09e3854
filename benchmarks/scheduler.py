"""The scheduler's step given logits: ours beside the law of diffusers' DiscreteDDIMScheduler.

First what is right: the kernels find what their plain form finds, and steps have the exact law
of DiscreteDDIM by chi-square. Then both are timed, alternating, in one run; each result is a
line of JSON as it is made. Without diffusers its step is the transcription below.

    python benchmarks/scheduler.py                       on a GPU: (8, 256, 262144)
    python benchmarks/scheduler.py --tiny --device cpu   seconds
    python benchmarks/scheduler.py --device cpu --shape 1 64 262144
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from append_line import append_line
from step import extra_memory
from torch import Tensor

from psidiff.integrations.psi_settings import Settings
from psidiff.integrations.psi_steps import PsiSteps
from psidiff.kernels import logit_rows
from psidiff.kernels.logit_rows import LogitBlock
from psidiff.sampling.dense_logits import row_filters
from psidiff.sampling.filters import chain

STEPS, INDEX = 32, 16
LAW = {"kappa": "ancestral", "posterior": "marginal"}
CASES: dict[str, dict[str, Any]] = {
    "DiscreteDDIM's law": {**LAW, "temperature": 1.0},
    "Psi": {"temperature": 1.0},
    "Psi, predicts plain": {"temperature": 1.0, "predicts": "plain"},
    "Psi, top-p .9": {"temperature": 1.0, "top_p": 0.9},
    "DiscreteDDIM's law, greedy": {**LAW, "temperature": 0.0},
}
TARGETS = {"Psi, top-p .9": {"bfloat16": 3.1}}  # ms on an H200
READS = {"bfloat16": 0.75, "float32": 1.5}  # three reads of the logits


def ddim_step(logits: Tensor, index: int, z: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """x_0 from the logits, then z_s from q(z_s | z_t, x_0) of uniform noise at alpha = i/N.

    With a = alpha_t / alpha_s three routes have the weights: x_0, alpha_s (1-a)/K and, where
    x_0 = z_t, a alpha_s more; z_t, a (1-alpha_s)/K; any token, (1-a)(1-alpha_s)/K.
    """
    rows, width = logits.flatten(0, 1), logits.shape[-1]
    plain = rows.float().softmax(-1)
    if temperature:
        x_0 = (rows.float() / temperature).softmax(-1).multinomial(1)
    else:
        x_0 = rows.argmax(-1, keepdim=True)
    sure, x_0 = plain.gather(-1, x_0).view_as(z), x_0.view_as(z)
    alpha_t, alpha_s = index / STEPS, (index + 1) / STEPS
    kept = alpha_t / alpha_s
    same = (z == x_0).float()
    clean = alpha_s * (1 - kept) / width + kept * alpha_s * same
    stay = torch.full_like(same, kept * (1 - alpha_s) / width)
    noise = torch.full_like(same, (1 - kept) * (1 - alpha_s) / width)
    routes = torch.stack((clean, stay, noise), -1).view(-1, 3)
    route = (routes / routes.sum(-1, keepdim=True)).multinomial(1).view_as(z)
    fresh = torch.randint(width, z.shape, device=z.device)
    return torch.where(route == 2, fresh, torch.where(route == 0, x_0, z)), x_0, sure


def peer(temperature: float) -> Callable[[Tensor, Tensor], Any]:
    """DiscreteDDIMScheduler.step, or its transcription."""
    if find_spec("diffusers") is None:
        return lambda logits, z: ddim_step(logits, INDEX, z, temperature)
    theirs = import_module("diffusers").DiscreteDDIMScheduler(STEPS)
    return lambda logits, z: theirs.step(logits, INDEX, z, temperature=temperature)


def ours(config: dict[str, Any]) -> Callable[[Tensor, Tensor], Any]:
    steps = PsiSteps(Settings.of(config), STEPS)
    return lambda logits, z: steps.step(logits, INDEX, z)


def draw_logits(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> Tensor:
    """A heavy head and a long tail, as a language model's."""
    made = torch.empty(shape, dtype=dtype, device=device)
    for rows in made:
        rows.copy_(3 * torch.randn(rows.shape, device=device))
    return made


def check_kernels(width: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The largest share of rows in which a kernel finds another token, and another number."""
    logits = draw_logits((2, 24, width), dtype, device)[:, 4:]  # rows that lie apart
    z = torch.randint(width, logits.shape[:2], device=device)
    shift = torch.randn(z.shape, device=device)
    bits = torch.randint(-(2**63), 2**63 - 1, (z.numel(),), device=device)
    tokens, numbers, count = 0.0, 0.0, 0
    kinds = (
        chain(),
        chain(0.7, top_p=0.9, static=True),
        chain(top_p=0.5, nucleus="drop", static=True),
    )
    for filters in kinds:
        for block in (LogitBlock(logits, z), LogitBlock(logits, z, shift, width // 2)):
            how = row_filters(filters)
            if not logit_rows.available(block, how):
                return {
                    "check": "kernels",
                    "dtype": str(dtype),
                    "skipped": "no GPU with Triton",
                }
            got = logit_rows.by_kernel(block, bits, how)
            want = logit_rows.plain(block, bits, how)
            for one, other in zip(got, want, strict=True):
                if one.is_floating_point():
                    error = ((one - other).abs() / other.abs().clamp(min=1e-6)).max()
                    numbers = max(numbers, float(error))
                else:
                    tokens = max(tokens, float((one != other).float().mean()))
            count += 1
    right = tokens == 0 and numbers < 1e-2
    return {
        "check": "kernels", "dtype": str(dtype), "width": width, "kinds": count, "right": right,
        "rows with another token": tokens, "largest relative error": numbers,
    }  # fmt: skip


def check_law(device: str, draws: int, temperature: float) -> dict[str, Any]:
    """Chi-square per degree of freedom of a step's tokens under DiscreteDDIM's exact law."""
    width, length, worst = 12, 4, 0.0
    logits = torch.randn(1, length, width, generator=torch.Generator().manual_seed(0))
    z = torch.arange(length)[None]
    steps = PsiSteps(Settings.of({**LAW, "temperature": temperature}), STEPS)
    x = logits[0].double().softmax(-1)
    if not temperature:
        x = torch.zeros_like(x).scatter(-1, logits[0].argmax(-1, keepdim=True), 1.0)
    for index in (0, INDEX, STEPS - 1):
        alpha_t, alpha_s = index / STEPS, (index + 1) / STEPS
        kept, one = alpha_t / alpha_s, torch.eye(width, dtype=torch.float64)
        law = torch.zeros(length, width, dtype=torch.float64)
        for x_0 in range(width):
            at_s = alpha_s * one[x_0] + (1 - alpha_s) / width
            back = kept * one[z[0]] + (1 - kept) / width  # q(z_t | z_s), by z_s
            joint = at_s * back
            law += x[:, x_0, None] * joint / joint.sum(-1, keepdim=True)
        made = steps.step(
            logits.expand(draws, -1, -1).to(device), index, z.expand(draws, -1).to(device)
        ).z.cpu()
        for column, probs in zip(made.T, law, strict=True):
            counts, expected = torch.bincount(column, minlength=width), probs * draws
            possible = expected > 0
            excess = (counts - expected)[possible].square() / expected[possible]
            worst = max(worst, float(excess.sum() / max(int(possible.sum()) - 1, 1)))
            worst = worst if not bool(counts[~possible].any()) else float("inf")
    found = {"check": "law", "temperature": temperature, "draws": draws, "worst": worst}
    return {**found, "right": worst < 5}


def timed(work: Callable[[], Any], device: str) -> float:
    """Milliseconds until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def extra_mib(work: Callable[[], Any], device: str) -> float:
    """Memory beside the logits at its peak, what is returned included."""
    if device == "cpu":
        return extra_memory(work) if Path("/proc/self/clear_refs").exists() else float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str, rounds: int
) -> list[dict[str, Any]]:
    logits, z = (
        draw_logits(shape, dtype, device),
        torch.randint(shape[2], shape[:2], device=device),
    )
    work = {name: ours(config) for name, config in CASES.items()}
    theirs = "transcribed" if find_spec("diffusers") is None else "diffusers"
    work |= {
        f"DiscreteDDIM ({theirs})": peer(1.0),
        f"DiscreteDDIM greedy ({theirs})": peer(0.0),
    }
    work["one read"] = lambda logits, z: logits.amax()
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 3):
        for name, step in work.items():
            took = timed(lambda step=step: step(logits, z), device)
            if number >= 3:  # compiled, compared, recorded and warm
                times[name].append(took)
    lines = []
    for name, step in work.items():
        word = str(dtype).removeprefix("torch.")
        line = {"case": name, "dtype": word, "shape": shape, "device": _named(device)}
        line["ms"] = round(statistics.median(times[name]), 3)
        line["least ms"] = round(min(times[name]), 3)
        line["extra MiB"] = round(extra_mib(lambda step=step: step(logits, z), device), 1)
        if name in CASES and device == "cuda" and shape == (8, 256, 262_144):
            line["wanted ms"] = TARGETS.get(name, {} if "top-p" in name else READS).get(word)
        lines.append(line)
    return lines


def _named(device: str) -> str:
    return (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{torch.get_num_threads()} threads"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", type=int, nargs=3, default=(8, 256, 262_144))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="small shapes: does it run?")
    parser.add_argument("--out", type=Path, help="a file that gets the lines, too")
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = (2, 8, 512) if args.tiny else tuple(args.shape)
    rounds, wrong = 2 if args.tiny else args.rounds, False

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if args.out:
            append_line(args.out, json.dumps(line))

    kinds = (torch.bfloat16, torch.float32)
    for dtype in kinds:
        for width in (shape[2],) if args.tiny else (shape[2], 50_258):
            say(line := check_kernels(width, dtype, args.device))
            wrong |= not line.get("right", True)
    for temperature in (0.0, 1.0):
        say(line := check_law(args.device, 5_000 if args.tiny else 50_000, temperature))
        wrong |= not line["right"]
    for dtype in kinds:
        for line in measure(shape, dtype, args.device, rounds):
            say(line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
