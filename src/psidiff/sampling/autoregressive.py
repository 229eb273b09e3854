"""Left to right: the sampler of an autoregressive network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import device_of, draw_key
from ..types import as_count, as_device, check_shape, traits
from .filters import RowFilter, chain
from .logit_sources import CausalLogits
from .loop import OnStep, Samples, run_steps
from .state import SampleLayout, SamplingContext


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
    count, length = shape
    if given is not None:
        check_shape("given", given, shape)
    layout = SampleLayout(
        count,
        length,
        (draw_key(generator),),
        length,
        device_of(generator) if device is None else as_device(device),
        given=given,
        first_index=as_count("first_index", first_index, least=0),
    )
    processor = chain(temperature, top_k, top_p, min_p, nucleus)
    context = causal_context(network, bos_id, layout, processor, says_bos)
    return run_steps(context.start(0, count, skip_given=False), on_step)


def causal_context(
    network: Any,
    bos_id: int,
    layout: SampleLayout,
    logits_processor: RowFilter,
    allow_bos: bool = False,
) -> SamplingContext:
    """What `left_to_right` goes through from token to token."""
    causal = traits(network).reader

    def open_source() -> CausalLogits:
        read = network.reader(layout.window) if causal else network
        return CausalLogits(read, bos_id, allow_bos)

    return SamplingContext(layout, None, (), open_source, logits_processor)
