"""Left to right: the sampler of an autoregressive network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import Purpose, Stream, device_of, draw_key
from ..kernels.exponential_race import block_race
from ..types import as_count, as_device, check_shape
from .filters import chain
from .loop import OnStep, Samples
from .plan import Step
from .step import PREDICTED


@torch.no_grad()
def left_to_right(
    network: Any,
    bos_id: int,
    shape: tuple[int, int],
    generator: Generator | None = None,
    *,
    given: Tensor | None = None,
    says_bos: bool = False,
    temperature: float = 1.0,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k: int | None = None,
    nucleus: str = "keep",
    first_index: int = 0,
    device: torch.device | str | None = None,
    on_step: OnStep | None = None,
) -> Samples:
    """Each token from p(. | those before it); `network(tokens)` gives logits (B, l, K).

    It reads `bos_id` first, and never says it unless `says_bos`: in some vocabularies the same
    token ends a text. A network that has `reader(room)` remembers what it has read; for others
    the sequence is read anew for every token.
    given (B, L) holds ids, -1 where free; on_step hears of every place as of a step.
    """
    where = as_device(device) if device is not None else device_of(generator)
    rows = chain(temperature, top_k, top_p, min_p, nucleus)
    first_index = as_count("first_index", first_index, least=0)
    stream = Stream(draw_key(generator), shape, first_index, where)
    count, length = shape
    known = torch.full(shape, -1, device=where) if given is None else given.to(where)
    check_shape("given", known, shape)
    tokens = torch.full((count, length + 1), -1, device=where)
    tokens[:, 0] = bos_id
    causal = getattr(network, "causal", False) and hasattr(network, "reader")
    read = network.reader(length) if causal else network
    passes = 0
    for place in range(length):
        here = known[:, place].clone()
        if bool((free := here < 0).any()):
            logits = read(tokens[:, : place + 1])[:, -1].float()
            if not says_bos:
                logits[:, bos_id] = -torch.inf
            bits = stream.bits(0, Purpose.DRAW)[:, place]
            here = torch.where(free, block_race(rows(logits).softmax(-1), bits), here)
            passes += 1
        tokens[:, place + 1] = here
        if on_step is not None:
            route = torch.zeros(shape, dtype=torch.int8, device=where)
            route[:, place] = free * PREDICTED
            step = Step(1 - place / length, place / length, (place + 1) / length)
            on_step(place, step, tokens[:, 1:].clone(), route)
    return Samples(tokens[:, 1:], float(passes), count * passes)
