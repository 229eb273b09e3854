"""Rows of `benchmarks/gpu.py` about sampling: a pass, a step, whole plans, images."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import straightforward
import torch
from gpu_measure import Bench, Record, parameters_of, transformer_flops
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from psidiff.process import LogLinear, Uniform
from psidiff.sampling import Samples, Step, parse_kappa, plan, sample
from psidiff.types import traits

RULES = {"ancestral": "ancestral", "psi": "rescale-released:.05"}


def ceilings(bench: Bench) -> Record:
    """What the chip gives: a bfloat16 product of square matrices, and a copy in its memory."""
    n, size = bench.sizes.matmul, bench.sizes.copy
    a, b = (torch.randn(n, n, device=bench.device).bfloat16() for _ in range(2))
    ms = bench.ms(lambda: a @ b, repeats=30, warm_up=10)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copied = bench.ms(lambda: target.copy_(source), repeats=20)
    return {
        "ms": ms,
        "copy_ms": copied,
        "flops_per_second": 2 * n**3 / ms * 1e3,
        "bytes_per_second": 2 * size / copied * 1e3,
    }


@torch.no_grad()
def plain_forward(bench: Bench) -> Record:
    network, s = bench.transformer().eval(), bench.sizes
    z, alpha = bench.tokens(s.batch), torch.full((s.batch, 1, 1), 0.5, device=bench.device)
    ms = bench.ms(lambda: straightforward.transformer_logits(network, z, alpha))
    with bench.peak() as memory:
        straightforward.transformer_logits(network, z, alpha)
    return {"ms": ms, **memory, "batch": s.batch}


@torch.no_grad()
def our_forward(bench: Bench) -> Record:
    """Hidden states and all logits; hidden_ms and hidden_gib: without the head."""
    s = bench.sizes
    denoiser = bench.ours(bench.transformer(), s.vocab)
    z, alpha = bench.tokens(s.batch), torch.full((1, 1, 1), 0.5, device=bench.device)

    def hidden() -> Tensor:
        return denoiser.hidden(z, alpha)

    def whole() -> Tensor:
        return denoiser.network.head(hidden().flatten(0, 1))

    hidden_ms, ms = bench.ms(hidden, 20), bench.ms(whole, 20)
    with bench.peak() as hidden_memory:
        hidden()
    with bench.peak() as memory:
        whole()
    tokens = s.batch * s.length
    return {
        "ms": ms,
        **memory,
        "hidden_ms": hidden_ms,
        "hidden_gib": hidden_memory["gib"],
        "batch": s.batch,
        "flops": transformer_flops(s, tokens, tokens, s.vocab),
        "bytes": 2 * parameters_of(denoiser),
    }


def plain_step(
    bench: Bench, rule: str, top_p: float | None, batch: int, repeats: int = 5, vocab: int = 0
) -> Record:
    """Steps in the middle of the plan, one after the other."""
    vocab = vocab or bench.sizes.vocab
    network = bench.transformer(vocab=vocab).eval()
    logits_of = partial(straightforward.transformer_logits, network)
    return _plain_steps(
        bench, logits_of, bench.tokens(batch, vocab=vocab), rule, top_p, repeats
    )


def our_steps(
    bench: Bench,
    rule: str,
    top_p: float | None,
    batch: int,
    vocab: int = 0,
    num_steps: int = 0,
) -> Record:
    """A whole plan by `psidiff.sampling.sample`; ms is the mean over all of its steps.

    extra_gib: the peak above that of the bare network, which ends at its hidden states;
    over_weights_gib: above what the weights take.
    """
    s = bench.sizes
    vocab, num_steps = vocab or s.vocab, num_steps or s.steps
    denoiser = bench.ours(bench.transformer(vocab=vocab), vocab)
    steps = plan(num_steps, LogLinear(), parse_kappa(RULES[rule]))
    _walk(bench, denoiser, vocab, warm_up(steps), batch, top_p)
    with torch.no_grad(), bench.peak() as bare:
        denoiser.hidden(
            bench.tokens(batch, vocab=vocab), torch.full((1, 1, 1), 0.5, device=bench.device)
        )
    with bench.peak() as memory:
        seconds, made = _walk(bench, denoiser, vocab, steps, batch, top_p)
    tokens, rows = batch * s.length, made.head_rows / len(steps)
    return {
        "ms": seconds / len(steps) * 1e3,
        **memory,
        "extra_gib": memory["gib"] - bare["gib"],
        "over_weights_gib": memory["gib"] - memory["before_gib"],
        "seconds": seconds,
        "steps": len(steps),
        "head_rows": made.head_rows,
        "nfe": made.nfe,
        "batch": batch,
        "flops": transformer_flops(s, tokens, rows, vocab),
        "bytes": 2 * parameters_of(denoiser),
    }


def plain_end_to_end(bench: Bench, count: int) -> Record:
    """The best batch size by a few steps each, and from it the time of the whole plan."""
    steps, found = bench.sizes.steps + 1, []
    for batch in bench.sizes.batches:
        if batch > count:
            continue
        bench.forget()
        try:
            found.append(plain_step(bench, "psi", 0.9, batch, repeats=3))
        except torch.OutOfMemoryError:
            break
    best = min(found, key=lambda one: one["ms"] / one["batch"])
    tried = {str(one["batch"]): one["ms"] for one in found}
    scaled = best["ms"] * steps * count / best["batch"]
    return {**best, "ms": scaled, "batch": count, "best_batch": best["batch"], "tried": tried}


def our_end_to_end(bench: Bench, count: int) -> Record:
    """All sequences through the whole plan, batch after batch."""
    s, size = bench.sizes, min(bench.end_batch, count)
    denoiser = bench.ours(bench.transformer(), s.vocab)
    steps = plan(s.steps, LogLinear(), parse_kappa(RULES["psi"]))
    _walk(bench, denoiser, s.vocab, warm_up(steps), size, 0.9)
    seconds, rows = 0.0, 0
    with bench.peak() as memory:
        for first in range(0, count, size):
            batch = min(size, count - first)
            took, made = _walk(bench, denoiser, s.vocab, steps, batch, 0.9, first)
            seconds, rows = seconds + took, rows + made.head_rows
    tokens = count * s.length * len(steps)
    return {
        "ms": seconds * 1e3,
        **memory,
        "batch": count,
        "at_once": size,
        "head_rows": rows,
        "flops": transformer_flops(s, tokens, rows, s.vocab),
        "bytes": 2 * parameters_of(denoiser) * len(steps) * count / size,
    }


def plain_wide(bench: Bench, vocab: int, top_p: float | None) -> Record:
    """As many sequences as ours; one, where those do not fit."""
    try:
        return plain_step(bench, "psi", top_p, bench.sizes.batch, repeats=3, vocab=vocab)
    except RuntimeError as error:
        refused = str(error).splitlines()[0]
    bench.forget()
    alone = plain_step(bench, "psi", top_p, 1, repeats=3, vocab=vocab)
    return alone | {"refused": f"B={bench.sizes.batch}: {refused}"}


def our_wide(bench: Bench, vocab: int, top_p: float | None) -> Record:
    s = bench.sizes
    return our_steps(bench, "psi", top_p, s.batch, vocab, s.few)


def plain_images(bench: Bench) -> Record:
    """The U-Net in float32."""
    network, s = bench.unet().eval(), bench.sizes
    z = bench.tokens(s.images, network.channels * s.image**2, network.vocab_size)
    return _plain_steps(bench, network, z, "psi", None, 5)


def our_images(bench: Bench) -> Record:
    s, network = bench.sizes, bench.unet()
    vocab, length = network.vocab_size, network.channels * s.image**2
    flops = image_flops(bench, network) * s.images
    denoiser = bench.ours(network, vocab)
    steps = plan(s.few, LogLinear(), parse_kappa(RULES["psi"]))
    _walk(bench, denoiser, vocab, warm_up(steps), s.images, None, length=length)
    with bench.peak() as memory:
        seconds, made = _walk(bench, denoiser, vocab, steps, s.images, None, length=length)
    ms = seconds / len(steps) * 1e3
    return {
        "ms": ms,
        **memory,
        "batch": s.images,
        "nfe": made.nfe,
        "flops": flops,
        "bytes": 2 * parameters_of(denoiser),
    }


@torch.no_grad()
def image_flops(bench: Bench, network: Any) -> int:
    """Of a forward pass for one image."""
    z = bench.tokens(1, network.channels * bench.sizes.image**2, network.vocab_size)
    with FlopCounterMode(display=False) as counter:
        network(z, 0.5)
    return counter.get_total_flops()


def warm_up(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Every eighth step and the last: every shape that the whole plan has."""
    return (*steps[:-1:8], steps[-1])


def _plain_steps(
    bench: Bench, logits_of: Any, z: Tensor, rule: str, top_p: float | None, repeats: int
) -> Record:
    steps = plan(bench.sizes.steps, LogLinear(), parse_kappa(RULES[rule]))
    middle = iter(steps[len(steps) // 2 - repeats // 2 :])
    state = z

    def one() -> None:
        nonlocal state
        step = next(middle)
        kappa = None if rule == "ancestral" else float(step.kappa)
        state = straightforward.sampling_step(
            logits_of, state, step.alpha_s, step.alpha_t, kappa, top_p
        )

    with bench.peak() as memory:
        one()
    return {"ms": bench.ms(one, repeats - 1, 1), **memory, "batch": len(z)}


def _walk(
    bench: Bench,
    denoiser: Any,
    vocab: int,
    steps: tuple[Step, ...],
    batch: int,
    top_p: float | None,
    first: int = 0,
    length: int = 0,
) -> tuple[float, Samples]:
    """Seconds, and what was made."""
    recorded = bench.cuda and traits(denoiser).recordable
    bench.wait()
    begun = time.perf_counter()
    made = sample(
        denoiser,
        Uniform(vocab),
        steps,
        (batch, length or bench.sizes.length),
        torch.Generator().manual_seed(0),
        top_p=top_p,
        first_index=first,
        device=bench.device,
        graph=True if recorded else None,
    )
    bench.wait()
    return time.perf_counter() - begun, made
