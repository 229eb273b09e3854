"""The uniform NELBO of rows of logits and its gradient, in one kernel.

`training.rows.uniform_row` is the same in plain torch: the fallback, the reference in tests,
and where the formula is explained. A row is read three times: for the softmax, for the sums,
for the slopes; no other number of its width is ever in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .trust import has_triton

SMALL = 16.0  # a c up to which P - c p is the better P
_BLOCK, _WARPS = 4096, 16

if has_triton:
    import triton
    import triton.language as tl

    @triton.jit
    def _log1p(x):  # type: ignore[no-untyped-def]
        """With the digits that 1 + x loses; x >= 0."""
        grown = 1.0 + x
        kept = grown - 1.0
        return tl.where(kept == 0.0, x, tl.log(grown) * (x / tl.where(kept == 0.0, 1.0, kept)))

    @triton.jit
    def _values(row, offset, k, inside, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
        """Logits at k; far below all others where they are not inside."""
        value = tl.load(row + k, mask=inside, other=-1e30).to(tl.float32)
        if OFFSET:
            value += tl.load(offset + k, mask=inside, other=0.0).to(tl.float32)
        return value

    @triton.jit
    def _row(  # type: ignore[no-untyped-def]  # Triton would look for the types' names
        logits,
        offset,
        slopes,
        losses,
        weights,
        zs,
        xs,
        cs,
        noises,
        zetas,
        ws,
        vocab,
        width,
        SMALL: tl.constexpr,
        OFFSET: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One row; the names are those of `uniform_row`."""
        row = tl.program_id(0)
        first = row.to(tl.int64) * width
        place = tl.arange(0, BLOCK)
        r, i = tl.load(zs + row), tl.load(xs + row)
        c, noise, zeta = tl.load(cs + row), tl.load(noises + row), tl.load(zetas + row)

        most = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        best = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab, BLOCK):
            k = start + place
            inside = k < vocab
            value = _values(logits + first, offset, k, inside, OFFSET)
            more = tl.maximum(most, value)
            total = total * tl.exp(most - more) + tl.where(inside, tl.exp(value - more), 0.0)
            best = tl.where(value > most, k, best)
            most = more
        highest = tl.max(most, 0)
        scale = 1.0 / tl.sum(total * tl.exp(most - highest), 0)
        top = tl.min(tl.where(most == highest, best, vocab), 0)

        others = tl.zeros((BLOCK,), tl.float32)
        sum_b = tl.zeros((BLOCK,), tl.float32)
        sum_P = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            k = start + place
            inside = (k < vocab) & (k != top)
            value = _values(logits + first, offset, k, inside, OFFSET)
            p = tl.where(inside, tl.exp(value - highest) * scale, 0.0)
            grown = c * p
            others += p
            sum_b += _log1p(grown)
            sum_P += grown / (1.0 + grown) * tl.where(c < SMALL, -grown, 1.0)
        left = tl.sum(others, 0)
        B, M = tl.sum(sum_b, 0), tl.sum(sum_P, 0)

        l_r = _values(logits + first, offset, r, r < vocab, OFFSET)
        l_i = _values(logits + first, offset, i, i < vocab, OFFSET)
        p_top, p_r, p_i = scale, tl.exp(l_r - highest) * scale, tl.exp(l_i - highest) * scale
        b_top, b_r, b_i = _log1p(c * p_top), _log1p(c * p_r), _log1p(c * p_i)
        P_r, P_i = c * p_r / (1.0 + c * p_r), c * p_i / (1.0 + c * p_i)
        P_top = c * p_top / (1.0 + c * p_top) * tl.where(c < SMALL, -c * p_top, 1.0)
        left_r = tl.where(r == top, left, 1.0 - p_r)
        left_i = tl.where(i == top, left, 1.0 - p_i)
        but_r = tl.where(r == top, B, B + b_top - b_r)
        but_i = tl.where(i == top, B, B + b_top - b_i)
        d_r, d_i = -_log1p(c * left_r / (1.0 + c * p_r)), -_log1p(c * left_i / (1.0 + c * p_i))
        K = vocab.to(tl.float32)
        jump_scale = K / (noise * (1.0 + c * p_r))
        differs = r != i
        jump = tl.where(differs, -p_r, left_r * zeta) * c * jump_scale
        if_differs = (K + c) * b_r - but_i - (1.0 + c) * d_i
        if_equal = zeta * ((K - 1.0) * d_r - but_r)
        factor = tl.load(ws + row) * tl.load(weights + row)
        tl.store(losses + row, factor * (jump + tl.where(differs, if_differs, if_equal)))

        alpha = c * noise / K
        coef = tl.where(differs, 1.0, zeta)
        if_differs = alpha * (K * p_r - 1.0) * jump_scale + c
        if_equal = -alpha * (K * left_r + c + 1.0) * zeta * jump_scale
        at_r = P_r * tl.where(differs, if_differs, if_equal)
        at_i = tl.where(differs, c * P_i, 0.0)
        G = -coef * (M + P_top) + at_r - at_i
        rest = -coef * M - left * G
        rest += tl.where(r == top, 0.0, at_r) - tl.where(i == top, 0.0, at_i)
        for start in range(0, width, BLOCK):
            k = start + place
            inside = k < vocab
            value = _values(logits + first, offset, k, inside, OFFSET)
            p = tl.exp(value - highest) * scale
            grown = c * p
            P = grown / (1.0 + grown) * tl.where(c < SMALL, -grown, 1.0)
            slope = -coef * P - p * G
            slope += tl.where(k == r, at_r, 0.0) - tl.where(k == i, at_i, 0.0)
            slope = tl.where(k == top, -rest, slope) * factor
            slope = tl.where(inside, slope, 0.0)
            tl.store(slopes + first + k, slope.to(slopes.dtype.element_ty), mask=k < width)


def judge(
    low: torch.dtype,
    vocab: int,
    logits: Tensor,
    offset: Tensor | None,
    weights: Tensor,
    *columns: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weighted losses (n,) and slopes (n, width) of logits (n, width), beyond `vocab` zeros.

    columns: z, x, c, noise, zeta, w.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    slopes = torch.empty(logits.shape, dtype=low, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(logits.shape[-1]))
    with torch.cuda.device_of(logits):
        _row[(len(logits),)](
            logits,
            offset,
            slopes,
            losses,
            weights,
            *columns,
            vocab,
            logits.shape[-1],
            SMALL=SMALL,
            OFFSET=offset is not None,
            BLOCK=block,
            num_warps=min(_WARPS, max(1, block // 256)),
        )
    return losses, slopes
