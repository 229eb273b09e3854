"""-log p of tokens by a network that reads them from left to right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..types import at_least_float32


class TextScore(NamedTuple):
    """-log p of a text, summed over its tokens; `cut`: it was longer than was read."""

    nats: float
    tokens: int
    cut: bool = False


def token_nats(
    logits_of: Callable[[Tensor, Tensor], Tensor],
    rows: Sequence[Sequence[int]],
    batch_size: int,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """-log p(x_l | x_<l) of each row from its second token on, the first being only read."""
    found: list[Tensor] = []
    with torch.no_grad():
        for ids, lengths in padded(rows, batch_size, device):
            nats = torch.zeros(len(ids), 0)
            if ids.shape[1] > 1:
                logits = at_least_float32(logits_of(ids[:, :-1], is_real(ids, lengths)[:, :-1]))
                flat = F.cross_entropy(
                    logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
                )
                nats = flat.view(len(ids), -1).cpu()
            found += [n[: max(k - 1, 0)] for n, k in zip(nats, lengths.tolist(), strict=True)]
    return found


def padded(
    rows: Sequence[Sequence[int]], batch_size: int, device: torch.device | str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows filled up on their right, and how long each is."""
    for start in range(0, len(rows), batch_size):
        some = [torch.tensor(row, dtype=torch.long) for row in rows[start : start + batch_size]]
        lengths = torch.tensor([len(row) for row in some], device=device)
        yield pad_sequence(some, batch_first=True).to(device), lengths


def is_real(ids: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def summed(nats: Tensor, limit: int | None, length: int) -> TextScore:
    return TextScore(
        nats.double().sum().item(), len(nats), limit is not None and length > limit
    )
