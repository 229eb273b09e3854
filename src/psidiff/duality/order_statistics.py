"""The largest of many random numbers, and who they belong to, without drawing them all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.special import ndtri


def top_gaussians(exponentials: Tensor, count: int) -> Tensor:
    """The k largest of `count` standard normals, falling, from k draws of Exp(1).

    In log space (Alg. "Reverse Sampling from Order Statistics"): log U_(i) adds -E_i / (N - i),
    and Phi^{-1}(U) = -Phi^{-1}(1 - U) keeps the digits of a U that is all but 1.
    """
    k = exponentials.shape[-1]
    remaining = count - torch.arange(k, dtype=exponentials.dtype, device=exponentials.device)
    log_u = -(exponentials / remaining).cumsum(-1)
    return -ndtri(-log_u.expm1())


def distinct_others(words: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
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
