"""Clean sequences noised block by block, for training: as BlockRefinementScheduler.add_noise,
for any prior."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import CounterRNG, Purpose
from ..process import NoiseSchedule, Prior
from ..types import as_count, as_tokens, check_shape


def noised_views(
    tokens: Tensor,
    attention_mask: Tensor,
    prior: Prior,
    schedule: NoiseSchedule,
    prompt_length: int,
    block_length: int,
    generator: Generator | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two views (B, L) of which each is noise where the other is clean, and where they are.

    Every block after the prompt has a time of its own, uniform in [0, 1]. Padding, where
    attention_mask (B, L) is 0, stays clean in both.
    """
    tokens = as_tokens("original_samples", tokens, prior.vocab_size)
    check_shape("attention_mask", attention_mask, tuple(tokens.shape))
    start = as_count("prompt_length", prompt_length, least=0)
    size, (count, length) = as_count("block_length", block_length), tokens.shape
    stream = CounterRNG.seeded(generator, (count, length), tokens.device)
    times = stream.uniform(0, Purpose.SELECT, torch.float64)
    place = torch.arange(length, device=tokens.device) - start
    first = (place - place % size + start).clamp(min=0)  # of each position's block
    share = 1 - torch.as_tensor(schedule.alpha(times[:, first].cpu())).to(tokens.device)
    valid = attention_mask.to(tokens.device, torch.bool) & (place >= 0)
    noised = stream.uniform(0, Purpose.COIN, torch.float64) < share
    masked, masked_rev = valid & noised, valid & ~noised
    noise = prior.from_bits(stream.bits(0, Purpose.NOISE))
    views = (torch.where(each, noise, tokens) for each in (masked, masked_rev))
    return (*views, masked, masked_rev)  # type: ignore[return-value]
