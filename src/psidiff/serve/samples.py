"""Samples of requests in the making: how they begin, and what is told of them after a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..generate import sampling_context
from ..model import Model
from ..process.posterior import PREDICTORS
from ..request import Request
from ..sampling import Step
from ..sampling.cuda_graph import CudaGraphStepper
from ..sampling.filters import Chain, Filter
from ..sampling.logit_sources import LazyLogits
from ..sampling.plan import last_change
from ..sampling.state import SampleState, SamplingContext, StepEvent
from ..types import FREE, LogitRows, traits

SHAPING = {"temperature", "top_k", "top_p", "min_p", "nucleus", "processor"}  # x_theta
_BATCHABLE = SHAPING | {"guidance", "predictor"}
_TOKENS = {"cpu": 1024}  # of a pass: more leave the cache; on a GPU as many as there are
_PADDING = {"cpu": 64}  # what costs as much as a pass more; on a GPU that is far away
_MANY = 2**16
Bias = tuple[tuple[int, float], ...]  # token ids, and what is added to their logits


@dataclass(frozen=True)
class Biased(Filter):
    """l_j + b_j"""

    denoiser: Any
    bias: Bias

    def rows(self, logits: LogitRows) -> LogitRows:
        ids, values = zip(*self.bias, strict=True)
        added = torch.tensor(values, dtype=logits.dtype, device=logits.device)
        at = torch.tensor(ids, device=logits.device)
        return logits.index_add(-1, at, added.expand(*logits.shape[:-1], -1))


@dataclass(frozen=True)
class Update:
    """A sample after a step: tokens and routes (L,); the first `settled` never change again."""

    number: int
    step: Step
    tokens: Tensor
    route: Tensor
    settled: int


def is_batchable(model: Model, request: Request) -> bool:
    """Whether its samples share forward passes with those of others: a Psi-sampler on x."""
    options = request.sampler.options()
    guidance, predictor = (options.get(name) for name in ("guidance", "predictor"))
    return (
        model.prior is not None
        and set(options) <= _BATCHABLE
        and (guidance is None or guidance.on == "x")
        and (predictor is None or predictor in PREDICTORS)
    )


def passes_of(options: Mapping[str, Any]) -> int:
    """Of a step: one more if it is guided, and one for each sweep of a corrector."""
    corrector = options.get("corrector")
    return 1 + ("guidance" in options) + (0 if corrector is None else corrector.sweeps)


def windows_of(request: Request) -> int:
    """How many windows have something to make: each of them walks the plan once."""
    given = request.given
    free = torch.ones(request.length) > 0 if given is None else given[0] == FREE
    count = 0
    for start in request.starts:
        window = slice(start, start + request.window)
        count += bool(free[window].any())
        free[window] = False
    return count


def shared_source(model: Model) -> LazyLogits | None:
    """The network for the samples of all requests; a pass pads where the network knows of
    padding and it costs less than a pass more."""
    if model.prior is None:
        return None
    device = model.device.type
    return LazyLogits(
        model.denoiser,
        model.prior,
        max_tokens=_TOKENS.get(device, _MANY),
        max_padding=_PADDING.get(device, _MANY) if traits(model.denoiser).padding else 0,
    )


def shared_graphs(
    model: Model, source: LazyLogits | None, notify: Callable[[str], None]
) -> CudaGraphStepper | None:
    """What makes the steps of all requests on a GPU, if the network can be recorded."""
    if source is None or model.device.type != "cuda" or not traits(model.denoiser).recordable:
        return None
    return CudaGraphStepper(source, model.device, True, model.length or 1, notify=notify)


class Sampling:
    """The samples of one request, and from which step on their tokens may be final."""

    def __init__(
        self,
        model: Model,
        request: Request,
        bias: Bias,
        source: LazyLogits | None,
        graphs: CudaGraphStepper | None = None,
    ) -> None:
        self.shared = is_batchable(model, request)
        alone = replace(request, graph=False)  # graphs are those of all requests
        context, chain = sampling_context(model, alone, watched=True), request.sampler.chain()
        chain = Chain((Biased(None, bias), *chain.filters)) if bias else chain
        alike = self.shared and not (context.guidance or context.watches_confidence)
        self.context: SamplingContext = replace(
            context,
            logits_processor=chain,
            open_source=(lambda: source) if self.shared else context.open_source,
            shared=self.shared,
            graphs=graphs if alike and chain.values is not None else None,
        )
        same_given = request.given is None or len(request.given) == 1
        self.divided = not (self.shared and same_given)  # each sample is a state by itself
        self.final_from = last_change(context.prior, context.steps) if self.shared else 0

    def settles(self, state: SampleState) -> bool:
        """Whether the step before this state may have made tokens final."""
        return state.i == 0 or state.i >= self.final_from

    def frame(self, state: SampleState, event: StepEvent, row: int) -> Update:
        """Sample `row` of a state, after the step that led to it."""
        tokens, route = (each[row].cpu() for each in event.whole_samples)
        tokens = tokens.to(torch.int32, copy=True)  # many may wait for a slow client
        settled = self._settled(state, event, tokens, row)
        return Update(event.number, event.step, tokens, route.clone(), settled)

    def _settled(self, state: SampleState, event: StepEvent, tokens: Tensor, row: int) -> int:
        """How many of the first tokens are final: given, made by a window before, unmasked.

        Left to right, what is there stays; of other samples that are made alone nothing is
        said before the end.
        """
        if not self.shared:
            final = tokens != FREE if self.context.prior is None else torch.zeros(1)
        else:
            final, window = state.tokens[row] != FREE, event.before.window
            if state.i >= self.final_from:
                assert self.context.prior is not None
                final[window] |= tokens[window] != self.context.prior.mask_id
        return int(final.long().cumprod(0).sum())
