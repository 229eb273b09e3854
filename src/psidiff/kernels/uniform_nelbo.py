"""The uniform NELBO of rows of logits and its gradient, in one kernel.

`training.row_losses.uniform_row_loss` is the same in plain torch: fallback, reference in tests,
and where the formula is explained. A row is read four times: for its maximum, for the softmax,
for the sums, for the slopes; no other number of its width is ever in memory. What costs time is
arithmetic, so two tokens j, k share a logarithm and a reciprocal:
(1 + x_j)(1 + x_k) = 1 + x_jk, x_jk = x_j + x_k + x_j x_k, with x = c p at most some 1e18.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel_check import has_triton

SMALL = 16.0  # a c up to which P - c p is the better P
_BLOCK, _WARPS = 1024, 8  # the fastest of five on an H200 (docs/benchmarks.md)

# q of log1p(f) = f + f^2 q(f) on [-1/4, 1/2): the polynomial of least relative error (3e-8),
# by least squares at Chebyshev nodes, weighted anew by its own errors until they were level
LOG1P = (
    -0.500000596,
    0.333335489,
    -0.24993442,
    0.199770778,
    -0.16822812,
    0.149839163,
    -0.120673671,
    0.0541324727,
)

if has_triton:
    import triton
    import triton.language as tl

    _Q0, _Q1, _Q2, _Q3, _Q4, _Q5, _Q6, _Q7 = (tl.constexpr(q) for q in LOG1P)
    _LOG2_E = tl.constexpr(1.4426950408889634)
    _LN_2 = tl.constexpr(0.6931471805599453 * 2.0**-23)  # of an exponent left in its bits

    @triton.jit
    def _log1p(x):  # type: ignore[no-untyped-def]
        """log1p(f) + e ln 2, where 1 + x = 2^e (1 + f) and 3/4 <= 1 + f < 3/2; x >= 0.

        Without the units for log and division, which are slow. f has the digits that 1 + x
        loses, so a small x comes out as x.
        """
        exponent = ((1.0 + x).to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000
        shrink = (0x3F800000 - exponent).to(tl.float32, bitcast=True)  # 2^-e
        f = x * shrink + (shrink - 1.0)
        q = _Q4 + f * (_Q5 + f * (_Q6 + f * _Q7))
        q = _Q0 + f * (_Q1 + f * (_Q2 + f * (_Q3 + f * q)))
        return exponent.to(tl.float32) * _LN_2 + (f + f * f * q)

    @triton.jit
    def _values(row, offset, k, vocab, width, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
        """Logits at k; far below all others where k is beyond the vocabulary."""
        value = tl.load(row + k, mask=k < width, other=0.0).to(tl.float32)
        if OFFSET:
            value += tl.load(offset + k, mask=k < width, other=0.0).to(tl.float32)
        return tl.where(k < vocab, value, -1e30)

    @triton.jit
    def _shares(row, offset, k, most, vocab, width, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
        """exp(l_k - most), by the unit for 2^x alone: what is below 2^-126 becomes 0."""
        value = _values(row, offset, k, vocab, width, OFFSET)
        return tl.exp2((value - most) * _LOG2_E)

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
        """One row; the names are those of `uniform_row_loss`."""
        row = tl.program_id(0)
        first = row.to(tl.int64) * width
        here, there = logits + first, slopes + first
        place = tl.arange(0, BLOCK)
        r, i = tl.load(zs + row), tl.load(xs + row)
        c, noise, zeta = tl.load(cs + row), tl.load(noises + row), tl.load(zetas + row)

        most = tl.full((BLOCK,), -1e30, tl.float32)
        best = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab, BLOCK):
            value = _values(here, offset, start + place, vocab, width, OFFSET)
            best = tl.where(value > most, start, best)
            most = tl.maximum(most, value)
        highest = tl.max(most, 0)
        top = tl.min(tl.where(most == highest, best + place, vocab), 0)

        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            total += _shares(here, offset, start + place, highest, vocab, width, OFFSET)
        scale = 1.0 / tl.sum(total, 0)

        grow = c * scale
        others = tl.zeros((BLOCK,), tl.float32)
        sum_b = tl.zeros((BLOCK,), tl.float32)
        sum_P = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, 2 * BLOCK):
            j, k = start + place, start + BLOCK + place
            e_j = _shares(here, offset, j, highest, vocab, width, OFFSET)
            e_k = _shares(here, offset, k, highest, vocab, width, OFFSET)
            e_j, e_k = tl.where(j == top, 0.0, e_j), tl.where(k == top, 0.0, e_k)
            others += e_j + e_k
            x_j, x_k = grow * e_j, grow * e_k
            x_jk = x_j + x_k * (1.0 + x_j)
            sum_b += _log1p(x_jk)
            P_j = x_j * (1.0 + x_k) * tl.where(c < SMALL, -x_j, 1.0)
            P_k = x_k * (1.0 + x_j) * tl.where(c < SMALL, -x_k, 1.0)
            sum_P += (P_j + P_k) * (1.0 / (1.0 + x_jk))
        left = tl.sum(others, 0) * scale
        B, M = tl.sum(sum_b, 0), tl.sum(sum_P, 0)

        p_r = _shares(here, offset, r, highest, vocab, width, OFFSET) * scale
        p_i = _shares(here, offset, i, highest, vocab, width, OFFSET) * scale
        p_top = scale
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
        low = slopes.dtype.element_ty
        bend, level = -coef * grow * factor, G * scale * factor
        for start in range(0, width, 2 * BLOCK):
            j, k = start + place, start + BLOCK + place
            e_j = _shares(here, offset, j, highest, vocab, width, OFFSET)
            e_k = _shares(here, offset, k, highest, vocab, width, OFFSET)
            x_j, x_k = grow * e_j, grow * e_k
            both = bend / ((1.0 + x_j) * (1.0 + x_k))
            by_j = both * (1.0 + x_k) * tl.where(c < SMALL, -x_j, 1.0) - level
            by_k = both * (1.0 + x_j) * tl.where(c < SMALL, -x_k, 1.0) - level
            tl.store(there + j, (e_j * by_j).to(low), mask=j < width)
            tl.store(there + k, (e_k * by_k).to(low), mask=k < width)
        tl.debug_barrier()  # what follows replaces three of them
        at_r -= coef * P_r * tl.where(c < SMALL, -c * p_r, 1.0) + p_r * G
        at_i += coef * P_i * tl.where(c < SMALL, -c * p_i, 1.0) + p_i * G
        tl.store(there + r, (at_r * factor).to(low))
        tl.store(there + i, (-at_i * factor).to(low), mask=differs)
        tl.store(there + top, (-rest * factor).to(low))


def uniform_nelbo_triton(
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
    half = triton.next_power_of_2(logits.shape[-1]) // 2  # two blocks at a time
    block = min(_BLOCK, max(16, half))
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
            num_warps=min(_WARPS, max(1, block // 128)),
        )
    return losses, slopes
