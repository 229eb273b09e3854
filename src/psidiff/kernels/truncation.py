"""Truncation of rows of logits: top-p, min-p and top-k without a sort.

What is cut becomes -inf. A truncation keeps a set {j : l_j >= threshold}, so tokens tied with
the last one kept are kept as well.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
_COARSE = 6  # halvings over whole rows


def top_p(
    logits: Tensor, p: float | Tensor, keep_crossing: bool = True, static: bool = False
) -> Tensor:
    """Keep the most probable tokens, in order, until their mass reaches p, a number or (N, 1).

    The token that crosses p is kept (Duo, Hugging Face) or dropped (ReMDM); the most probable
    token always stays. The smallest kept weight is found by bisection over the bit patterns of
    positive floats: they order like the floats themselves, so the search ends at one number. A
    few halvings over whole rows leave few candidates; the other halvings look at those alone,
    unless `static`: then shapes do not depend on values, and the host is not asked.
    """
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True)
    bits, target = _INTEGER[weights.dtype], p * total

    def bisect(
        weights: Tensor, heavier: Tensor | int, low: Tensor, high: Tensor, halvings: int
    ) -> tuple[Tensor, Tensor]:
        """Halve (low, high], where tokens from `high` on are few enough, from `low` too many:
        their mass, without (keep) or with (drop) the lightest, is at most the target."""
        for _ in range(halvings):
            middle = low + (high - low) // 2
            cut = middle.view(weights.dtype)
            above = weights > cut if keep_crossing else weights >= cut
            mass = heavier + torch.where(above, weights, 0).sum(-1, keepdim=True)
            few = mass <= target
            high = torch.where(few, middle, high)
            low = torch.where(few, low, middle)
        return low, high

    # tokens below (1-p)/K together weigh less than 1-p, so the search may start above them
    low = (total * ((1 - p) * (1 - 1e-3) / logits.shape[-1])).clamp(max=1).view(bits)
    high = torch.ones_like(total).view(bits)
    low, high = bisect(weights, 0, low, high, torch.iinfo(bits).bits if static else _COARSE)
    if not static:
        least, most = low.view(weights.dtype), high.view(weights.dtype)
        heavier = torch.where(weights > most, weights, 0).sum(-1, keepdim=True)
        candidates = _compact(weights, (weights > least) & (weights <= most))
        rest = int((high - low).max()).bit_length() if len(high) else 0
        _, high = bisect(candidates, heavier, low, high, rest)
    least = high.view(weights.dtype)
    if isinstance(p, Tensor):  # sums are rounded: of p = 1 nothing is cut, whatever they are
        least = least.masked_fill(p >= 1, 0)
    return logits.masked_fill(weights < least, -torch.inf)


def _compact(weights: Tensor, wanted: Tensor) -> Tensor:
    """The wanted entries of each row, moved to its front; as narrow as the fullest row."""
    counts = wanted.sum(-1)
    row, column = wanted.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    compact = weights.new_zeros(len(weights), int(counts.max()) if len(counts) else 0)
    compact[row, place] = weights[row, column]
    return compact


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep the tokens whose probability is at least p times the largest one."""
    return near_largest(logits, math.log(p) if p else -math.inf)


def near_largest(logits: Tensor, log_p: float | Tensor) -> Tensor:
    """Min-p by log p, a number or (N, 1)."""
    least = logits.amax(-1, keepdim=True) + log_p
    return logits.masked_fill(logits < least, -torch.inf)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k most probable tokens and what is tied with the k-th."""
    if k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def top_k_by_row(logits: Tensor, k: Tensor, most: int) -> Tensor:
    """Top-k with k (N, 1), none of it above `most`; at 0 all tokens are kept."""
    largest = logits.topk(min(most, logits.shape[-1]), dim=-1).values
    least = largest.gather(-1, (k - 1).clamp(0, largest.shape[-1] - 1))
    return logits.masked_fill((logits < least) & (k > 0), -torch.inf)
