"""Left to right: the sampler of an autoregressive network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator

from ..kernels.counter import Purpose, Stream, device_of, draw_key
from ..kernels.race import block_race
from .filters import chain
from .loop import Samples


@torch.no_grad()
def left_to_right(
    network: Any,
    bos_id: int,
    shape: tuple[int, int],
    generator: Generator | None = None,
    *,
    temperature: float = 1.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    nucleus: str = "keep",
    first_index: int = 0,
    device: torch.device | str | None = None,
) -> Samples:
    """Each token from p(. | those before it); `network(tokens)` gives logits (B, l, K).

    It reads `bos_id` first, and never says it. The sequence is read anew for every token.
    """
    where = torch.device(device) if device is not None else device_of(generator)
    rows = chain(temperature, top_k, top_p, min_p, nucleus)
    stream = Stream(draw_key(generator), shape, first_index, where)
    tokens = torch.full((shape[0], 1), bos_id, device=where)
    for place in range(shape[1]):
        logits = network(tokens)[:, -1].float()
        logits[:, bos_id] = -torch.inf
        bits = stream.bits(0, Purpose.DRAW)[:, place]
        drawn = block_race(rows(logits).softmax(-1), bits)
        tokens = torch.cat((tokens, drawn[:, None]), 1)
    return Samples(tokens[:, 1:], float(shape[1]), shape[0] * shape[1])
