"""Clean tokens as soft ones: the tempered softmax of their Gaussian latents.

w = alpha_tilde x + sigma_tilde eps;  soft = softmax(w / temperature);  z_t = argmax w.
The sparse form keeps the k largest entries of w and never forms the others.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.special import erfcx, log_ndtr

from ..kernels.counter import draw_key, exponential, lanes, mix, uniform
from ..types import Probs, SoftTokens, Tokens, check_ids, working_dtype
from .order_statistics import distinct_others, top_gaussians


def relax_sparse(
    tokens: Tokens,
    gamma: Tensor,
    vocab_size: int,
    top_k: int,
    temperature: float,
    generator: Generator | None = None,
) -> SoftTokens:
    """The k largest weights of the relaxed tokens (Alg. "Scalable Top-k Curriculum Weights").

    P(hard = x) = T + (1 - T)/K, as for the dense latents.
    """
    _check(tokens, gamma, vocab_size, temperature)
    if not 1 <= top_k < vocab_size:
        raise ValueError(f"top_k must be in [1, {vocab_size - 1}], got {top_k}")
    dtype, device = working_dtype(tokens.device), tokens.device
    alpha_tilde, sigma_tilde = _signal_and_noise(gamma.to(device, dtype))
    words = _words(generator, tokens, 2 * top_k + 1)
    noise = sigma_tilde * top_gaussians(exponential(words[..., :top_k], dtype), vocab_size - 1)
    ids = distinct_others(words[..., top_k:-1] & (2**63 - 1), tokens, vocab_size)
    clean = alpha_tilde + sigma_tilde * torch.special.ndtri(uniform(words[..., -1:], dtype))
    values, ids, kept = insert_clean(noise, clean, ids, tokens)
    log_z = log_normalizer(values, clean, kept, sigma_tilde, vocab_size, temperature)
    return SoftTokens(ids, (values / temperature - log_z).exp(), ids[..., 0])


def relax_dense(
    tokens: Tokens,
    gamma: Tensor,
    vocab_size: int,
    temperature: float,
    generator: Generator | None = None,
) -> tuple[Probs, Tokens]:
    """The reference: softmax over all K latents, and their argmax."""
    _check(tokens, gamma, vocab_size, temperature)
    dtype, device = working_dtype(tokens.device), tokens.device
    alpha_tilde, sigma_tilde = _signal_and_noise(gamma.to(device, dtype))
    device_of_noise = generator.device if generator is not None else device
    w = torch.randn(
        (*tokens.shape, vocab_size), dtype=dtype, device=device_of_noise, generator=generator
    ).to(device)
    w = w * sigma_tilde
    w.scatter_add_(-1, tokens[..., None], alpha_tilde.expand(*tokens.shape, 1))
    return (w / temperature).softmax(-1), w.argmax(-1)


def insert_clean(
    noise: Tensor, clean: Tensor, ids: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor, Tensor]:
    """The clean value enters the k falling noise values at its rank, the smallest leaves.

    Returns values and ids (B, L, k), and whether the clean token was kept (B, L, 1).
    """
    values, order = torch.cat((noise, clean), -1).sort(-1, descending=True)
    k = noise.shape[-1]
    ids = torch.cat((ids, tokens[..., None]), -1).gather(-1, order)
    return values[..., :k], ids[..., :k], order[..., k:] != k


def log_normalizer(
    values: Tensor,
    clean: Tensor,
    kept: Tensor,
    sigma_tilde: Tensor,
    vocab_size: int,
    temperature: float,
) -> Tensor:
    """log Z: the kept terms, the clean one if it was not kept, and the mean of the others.

    The unseen zero-mean entries lie below the smallest kept value: K - k of them if the clean
    token is kept, K - k - 1 if not (Eqs. "normalizer", cases 2 and 1).
    """
    k = values.shape[-1]
    smallest = values[..., -1:]
    log_counts = [math.log(n) if n else -math.inf for n in (vocab_size - k - 1, vocab_size - k)]
    log_count = torch.tensor(log_counts, dtype=values.dtype, device=values.device)[kept.long()]
    tail = log_count + log_mean_tail(smallest / temperature, sigma_tilde / temperature)
    alone = torch.where(kept, -torch.inf, clean / temperature)
    return torch.cat((values / temperature, alone, tail), -1).logsumexp(-1, keepdim=True)


def log_mean_tail(cutoff: Tensor, sigma: Tensor) -> Tensor:
    """log E[exp(X) | X < cutoff], X ~ N(0, sigma^2)

    = sigma^2/2 - log Phi(c/sigma) + log Phi(c/sigma - sigma). With a = sigma - c/sigma the
    first and last terms are huge and nearly cancel; erfcx takes their difference exactly.
    """
    a = sigma - cutoff / sigma
    scaled = cutoff - (cutoff / sigma) ** 2 / 2 + (erfcx(a.clamp(min=0) / 2**0.5) / 2).log()
    direct = sigma**2 / 2 + log_ndtr(-a)
    return torch.where(a > 0, scaled, direct) - log_ndtr(cutoff / sigma)


def _signal_and_noise(gamma: Tensor) -> tuple[Tensor, Tensor]:
    """alpha_tilde^2 = sigmoid(-gamma), sigma_tilde^2 = sigmoid(gamma), both (B, 1, 1)."""
    gamma = gamma[:, None, None]
    return (-gamma).sigmoid().sqrt(), gamma.sigmoid().sqrt()


def _words(generator: Generator | None, tokens: Tokens, count: int) -> Tensor:
    """`count` random 64-bit words for each token."""
    index = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    return lanes(mix(index + draw_key(generator)), count)


def _check(tokens: Tokens, gamma: Tensor, vocab_size: int, temperature: float) -> None:
    if vocab_size < 2:
        raise ValueError(f"vocab_size must be at least 2, got {vocab_size}")
    check_ids("tokens", tokens, vocab_size)
    if gamma.shape != tokens.shape[:1]:
        raise ValueError(
            f"gamma must hold one number a sequence, shape {tuple(tokens.shape[:1])}, "
            f"got {tuple(gamma.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature:g}")
