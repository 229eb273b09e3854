"""Clean tokens as soft ones: the tempered softmax of their Gaussian latents.

w = alpha_tilde x + sigma_tilde eps;  soft = softmax(w / temperature);  z_t = argmax w.
The sparse form keeps the k largest entries of w and never forms the others.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.special import erfcx, log_ndtr, ndtri

from ..kernels.counter_rng import exponential, mix, new_key, split, uniform
from ..types import Probs, SoftTokens, Tokens, as_count, as_ids, check_shape, working_dtype
from .transform import as_gamma


def relax_sparse(
    tokens: Tokens,
    gamma: Tensor,
    vocab_size: int,
    top_k: int,
    temperature: float,
    generator: Generator | None = None,
) -> SoftTokens:
    """Draw the k largest weights of the relaxed tokens.

    The other K - k latents are never formed (Alg. "Scalable Top-k Curriculum Weights").
    P(hard = x) = T + (1 - T)/K, as for dense latents.

    Args:
        tokens: clean token ids, (B, L).
        gamma: level of each sequence, (B,).
        vocab_size: number of tokens K.
        top_k: how many weights are kept, below K.
        temperature: of the softmax, above 0.
        generator: where one random key is drawn from; None: torch's global generator.

    Returns:
        `SoftTokens`: ids and weights (B, L, k) by falling weight, and hard (B, L) = z_t.
        Weights are float64 on the CPU (most lie closer to 0 or 1 than float32 can tell),
        float32 elsewhere.

    Raises:
        ValueError: if ids, gamma, top_k or temperature are out of range.

    Example:
        >>> from psidiff.duality import relax_sparse
        >>> tokens, gamma = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([-2.0])
        >>> soft = relax_sparse(tokens, gamma, vocab_size=50, top_k=2, temperature=1e-3)
        >>> soft.ids.shape, bool((soft.hard == soft.ids[..., 0]).all())
        (torch.Size([1, 3, 2]), True)
    """
    tokens, gamma = _checked(tokens, gamma, vocab_size, top_k, temperature)
    return relaxed(tokens, gamma, vocab_size, top_k, temperature, generator)


def relaxed(
    tokens: Tokens,
    gamma: Tensor,
    vocab_size: int,
    top_k: int,
    temperature: float,
    generator: Generator | None = None,
) -> SoftTokens:
    """`relax_sparse` without its checks, which would make a GPU wait."""
    alpha_tilde, sigma_tilde = signal_and_noise(gamma, tokens.device)
    words = _words(generator, tokens, 2 * top_k + 1)
    values, clean, kept, ids = top_latents(words, tokens, alpha_tilde, sigma_tilde, vocab_size)
    weights = kept_weights(values, clean, kept, sigma_tilde, vocab_size, temperature)
    return SoftTokens(ids, weights, ids[..., 0])


def relax_dense(
    tokens: Tokens,
    gamma: Tensor,
    vocab_size: int,
    temperature: float,
    generator: Generator | None = None,
) -> tuple[Probs, Tokens]:
    """Draw all K weights of the relaxed tokens: the reference for `relax_sparse`.

    Args:
        tokens: clean token ids, (B, L).
        gamma: level of each sequence, (B,).
        vocab_size: number of tokens K.
        temperature: of the softmax, above 0.
        generator: None: torch's global generator.

    Returns:
        The softmax over all K latents, (B, L, K), and their argmax z_t, (B, L).

    Raises:
        ValueError: if ids, gamma or temperature are out of range.

    Example:
        >>> from psidiff.duality import relax_dense
        >>> tokens, gamma = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([-2.0])
        >>> probs, hard = relax_dense(tokens, gamma, vocab_size=5, temperature=0.1)
        >>> probs.shape, bool((probs.argmax(-1) == hard).all())
        (torch.Size([1, 3, 5]), True)
    """
    tokens, gamma = _checked(tokens, gamma, vocab_size, None, temperature)
    alpha_tilde, sigma_tilde = signal_and_noise(gamma, tokens.device)
    if generator is not None and generator.device != tokens.device:  # B L K numbers stay here
        key = new_key(generator) & (2**63 - 1)
        generator = Generator(tokens.device).manual_seed(key)
    shape, dtype = (*tokens.shape, vocab_size), sigma_tilde.dtype
    w = torch.randn(shape, dtype=dtype, device=tokens.device, generator=generator)
    w *= sigma_tilde
    w.scatter_add_(-1, tokens[..., None], alpha_tilde.expand(*tokens.shape, 1))
    hard = w.argmax(-1)
    return w.div_(temperature).softmax(-1), hard


def top_latents(
    words: Tensor, tokens: Tokens, alpha_tilde: Tensor, sigma_tilde: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The k largest of the K latents from 2k + 1 random words a token.

    Returns their values, the clean token's value, whether it is among them, and their ids.
    """
    k, dtype = words.shape[-1] // 2, sigma_tilde.dtype
    noise = sigma_tilde * top_gaussians(exponential(words[..., :k], dtype), vocab_size - 1)
    ids = sample_distinct_tokens(words[..., k:-1] & (2**63 - 1), tokens, vocab_size)
    clean = alpha_tilde + sigma_tilde * ndtri(uniform(words[..., -1:], dtype))
    values, ids, kept = insert_clean(noise, clean, ids, tokens)
    return values, clean, kept, ids


def top_gaussians(exponentials: Tensor, count: int) -> Tensor:
    """The k largest of `count` standard normals, falling, from k draws of Exp(1).

    In log space (Alg. "Reverse Sampling from Order Statistics"): log U_(i) adds -E_i / (N - i),
    and Phi^{-1}(U) = -Phi^{-1}(1 - U) keeps the digits of a U that is all but 1.
    """
    k = exponentials.shape[-1]
    remaining = count - torch.arange(k, dtype=exponentials.dtype, device=exponentials.device)
    log_u = -(exponentials / remaining).cumsum(-1)
    return -ndtri(-log_u.expm1())


def sample_distinct_tokens(words: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """A uniform *ordered* tuple of k different ids, none of them `tokens`: (..., k).

    The i-th word names one of the ids that are left, counted past those already taken.
    """
    taken = tokens[..., None]  # kept sorted
    chosen = []
    for i in range(words.shape[-1]):
        pick = words[..., i : i + 1] % (vocab_size - 1 - i)
        for j in range(i + 1):
            pick = pick + (pick >= taken[..., j : j + 1])
        chosen.append(pick)
        taken = torch.cat((taken, pick), -1).sort(-1).values
    return torch.cat(chosen, -1)


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


def kept_weights(
    values: Tensor,
    clean: Tensor,
    kept: Tensor,
    sigma_tilde: Tensor,
    vocab_size: int,
    temperature: float,
) -> Tensor:
    """exp(value / temperature) / Z for the kept values; Z has three parts.

    The kept terms, the clean one if it was not kept, and the mean of the unseen others, which
    lie below the smallest kept value: K - k of them if the clean token is kept, K - k - 1 if
    not (Eqs. "normalizer", cases 2 and 1). Together a softmax, so that no digit is lost.
    """
    k = values.shape[-1]
    log_few, log_more = (
        math.log(n) if n else -math.inf for n in (vocab_size - k - 1, vocab_size - k)
    )
    log_count = torch.full_like(clean, log_few).masked_fill_(kept, log_more)
    tail = log_count + log_mean_tail(values[..., -1:] / temperature, sigma_tilde / temperature)
    alone = torch.where(kept, -torch.inf, clean / temperature)
    return torch.cat((values / temperature, alone, tail), -1).softmax(-1)[..., :k]


def log_mean_tail(cutoff: Tensor, sigma: Tensor) -> Tensor:
    """log E[exp(X) | X < cutoff], X ~ N(0, sigma^2)

    = sigma^2/2 - log Phi(c/sigma) + log Phi(c/sigma - sigma). With a = sigma - c/sigma the
    first and last terms are huge and nearly cancel; erfcx takes their difference exactly.
    """
    a = sigma - cutoff / sigma
    scaled = cutoff - (cutoff / sigma) ** 2 / 2 + (erfcx(a.clamp(min=0) / 2**0.5) / 2).log()
    direct = sigma**2 / 2 + log_ndtr(-a)
    return torch.where(a > 0, scaled, direct) - log_ndtr(cutoff / sigma)


def signal_and_noise(gamma: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """alpha_tilde^2 = sigmoid(-gamma), sigma_tilde^2 = sigmoid(gamma), both (B, 1, 1)."""
    gamma = gamma.to(device, working_dtype(device))[:, None, None]
    return (-gamma).sigmoid().sqrt(), gamma.sigmoid().sqrt()


def _words(generator: Generator | None, tokens: Tokens, count: int) -> Tensor:
    """`count` random 64-bit words for each token."""
    index = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    return split(mix(index + new_key(generator)), count)


def check_relaxation(vocab_size: int, top_k: int | None, temperature: float) -> None:
    """So many of K weights (None: all), and how soft they are."""
    as_count("vocab_size", vocab_size, least=2)
    if top_k is not None and as_count("top_k", top_k) >= vocab_size:
        raise ValueError(f"top_k must be below vocab_size = {vocab_size}, got {top_k}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature:g}")


def _checked(
    tokens: Tokens, gamma: Tensor, vocab_size: int, top_k: int | None, temperature: float
) -> tuple[Tokens, Tensor]:
    check_relaxation(vocab_size, top_k, temperature)
    tokens = as_ids("tokens", tokens, vocab_size)
    gamma = as_gamma(gamma)
    check_shape("gamma", gamma, tuple(tokens.shape[:1]))
    return tokens, gamma
