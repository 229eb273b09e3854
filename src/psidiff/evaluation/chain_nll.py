"""-log p of whole sequences by an autoregressive network, which knows it exactly."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .ragged import Sequences, in_batches, joined, marks_of


class Chained(NamedTuple):
    """Exact nats of a sequence, and whether each scored token was the likeliest."""

    nats: float
    greedy: bool


@torch.no_grad()
def chain_nll(
    network: Any,
    bos_id: int,
    rows: Sequences,
    *,
    scored: Sequences | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> list[Chained]:
    """-log p(x) = -sum_l log p(x_l | x before l), of a network that reads `bos_id` first."""
    marks = marks_of(rows, scored)
    found = [Chained(0.0, True)] * len(rows)
    for pieces in in_batches([len(row) for row in rows], 1, batch_size, mixed=True):
        x = joined([rows[p.row][None].long() for p in pieces]).to(device)
        counted = joined([marks[p.row][None] for p in pieces])
        start = torch.full_like(x[:, :1], bos_id)  # a causal network never sees the padding
        log_p = network(torch.cat((start, x[:, :-1]), 1)).float().log_softmax(-1)
        nats = -log_p.gather(-1, x[..., None]).squeeze(-1).cpu().double()
        sums = torch.where(counted, nats, 0.0).sum(-1)
        right = ((log_p.argmax(-1) == x).cpu() | ~counted).all(-1)
        for piece, total, each in zip(pieces, sums.tolist(), right.tolist(), strict=True):
            found[piece.row] = Chained(total, each)
    return found
