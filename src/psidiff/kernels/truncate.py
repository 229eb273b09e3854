"""Truncation of rows of logits: top-p, min-p and top-k without a sort.

What is cut becomes -inf. A truncation keeps a set {j : l_j >= threshold}, so tokens tied with
the last one kept are kept as well. Beside the search stands the sort it must agree with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
_CACHED = 2**18  # elements that stay in a core's cache while a search passes over them


def top_p(logits: Tensor, p: float, keep_crossing: bool = True) -> Tensor:
    """Keep the most probable tokens, in order, until their mass reaches p.

    The token that crosses p is kept (Duo, Hugging Face) or dropped (ReMDM); the most probable
    token always stays.
    """
    size = max(_CACHED // logits.shape[-1], 1) if logits.device.type == "cpu" else len(logits)
    parts = [_top_p(rows, p, keep_crossing) for rows in logits.split(max(size, 1))]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _top_p(logits: Tensor, p: float, keep_crossing: bool) -> Tensor:
    """Bisection for the smallest kept weight, over the bit patterns of floats in [0, 1].

    Positive floats order like their bits, so the search ends at one representable number.
    """
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    target = p * weights.sum(-1, keepdim=True)
    high = torch.ones_like(target).view(_INTEGER[weights.dtype])
    low = torch.zeros_like(high)
    for _ in range(int(high[0, 0]).bit_length() if len(high) else 0):
        middle = (low + high) // 2
        cut = middle.view(weights.dtype)
        above = weights > cut if keep_crossing else weights >= cut
        enough = torch.where(above, weights, 0).sum(-1, keepdim=True) <= target
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle)
    return logits.masked_fill(weights < high.view(weights.dtype), -torch.inf)


def top_p_by_sort(logits: Tensor, p: float, keep_crossing: bool = True) -> Tensor:
    """The reference: sort, accumulate, cut, unsort. Ties fall where the sort left them."""
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    total = probs.cumsum(-1)
    cut = (total - probs if keep_crossing else total) > p
    cut[..., 0] = False
    return logits.masked_fill(cut.gather(-1, order.argsort(-1)), -torch.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep the tokens whose probability is at least p times the largest one."""
    least = logits.amax(-1, keepdim=True) + (math.log(p) if p else -math.inf)
    return logits.masked_fill(logits < least, -torch.inf)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k most probable tokens and what is tied with the k-th."""
    if k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)
