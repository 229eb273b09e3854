"""Samples in the making as immutable states, and `advance`, which moves them on by one step.

`sample`, `generate` and the server are loops over it. A state can be kept, gone back to,
divided among its samples, and moved on in one batch with others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, fold_in
from ..process.posterior import Predictor
from ..process.prior import Prior
from ..types import FREE, Tokens, working_dtype
from .confident import Confident
from .corrector import Corrector
from .cuda_graph import CapacityExceeded, CudaGraphStepper, is_capturable
from .filters import LogitsProcessor
from .guidance import Guidance
from .kappa import Memory
from .plan import Step
from .step import StepOutput, psi_step
from .step_batch import BatchSegment, StepBatch, rng_state, step_numbers
from .steppers import GuidedPosterior, Stepper, causal_step


@dataclass(frozen=True, eq=False)
class SampleLayout:
    """Which samples: how many, their windows, random numbers, labels and given tokens.

    keys         the key of the random numbers of each window
    starts       where windows begin; each has `window` positions
    given        (1 or num_samples, length), FREE where free; None if all is free
    conditioned  whether networks are told of given tokens; None: in windows that have some
    watched      whether somebody looks at every step: then no replayed step may turn out to
                 have been wrong later
    """

    num_samples: int
    length: int
    keys: tuple[int, ...]
    window: int
    device: torch.device
    starts: tuple[int, ...] = (0,)
    given: Tensor | None = None
    labels: Tensor | None = None
    first_index: int = 0
    conditioned: bool | None = None
    watched: bool = False


@dataclass(frozen=True, eq=False)
class SamplingContext:
    """What stays the same while samples are made.

    prior        None for an autoregressive network
    steps        of a window
    open_source  makes the logit source of a window
    shared       whether its states may share batches with those of other contexts
    graphs       makes the steps that a CUDA graph can hold
    """

    layout: SampleLayout
    prior: Prior | None
    steps: tuple[Step, ...]
    open_source: Callable[[], Any]
    logits_processor: LogitsProcessor
    predictor: Predictor | Confident | None = None
    guidance: Guidance | None = None
    corrector: Corrector | None = None
    shared: bool = False
    graphs: CudaGraphStepper | None = None

    @cached_property
    def pi(self) -> Tensor:
        device = self.layout.device
        like = torch.zeros((), dtype=working_dtype(device), device=device)
        return like[None] if self.prior is None else self.prior.probs(like=like)

    @cached_property
    def watches_confidence(self) -> bool:
        remembers = any(callable(step.kappa) for step in self.steps)
        return remembers or isinstance(self.predictor, Confident)

    def start(self, first: int, count: int, skip_given: bool = True) -> SampleState:
        """Samples `first` to `first + count` before their first step.

        skip_given: windows in which nothing is free make no steps.
        """
        tokens, given = torch.full((count, self.layout.length), FREE), self.layout.given
        if given is not None:
            given = given if len(given) == 1 else given[first : first + count]
            tokens = given.to("cpu").expand(count, -1).clone()
        samples = torch.arange(first, first + count)
        state = SampleState(self, samples, tokens, passes=(0,) * count)
        return _open_window(state, 0, skip_given)


@dataclass(frozen=True, eq=False)
class SampleState:
    """Samples that are all at the same step of the same window.

    samples  (B,), which of the context's
    tokens   (B, length) on the CPU, FREE where no window was finished yet
    i        the next step of this window; num_steps_done counts those of all windows
    z, free, given, confidence, sample_hash   of this window, as in StepBatch
    num_free the most positions of a sample that are free in this window
    passes   forward passes of each sample; head_rows: rows of the output layer in all
    window_start   where the window began, if recorded steps may turn out to have been wrong
    """

    context: SamplingContext
    samples: Tensor
    tokens: Tensor
    window_number: int = 0
    start: int = 0
    i: int = 0
    num_steps_done: int = 0
    z: Any = None
    free: Any = None
    given: Any = None
    confidence: Any = None
    sample_hash: Any = None
    labels: Any = None
    source: Any = None
    num_free: int = 0
    window_start: SampleState | None = None
    passes: tuple[int, ...] = ()
    head_rows: int = 0
    done: bool = False

    @property
    def window(self) -> slice:
        """Where the positions of this window are in the samples."""
        return slice(self.start, self.start + self.context.layout.window)

    @property
    def step(self) -> Step:
        """The next one."""
        return self.context.steps[self.i]

    def select(self, rows: Sequence[int]) -> SampleState:
        """Some of the samples; head rows go with the first of them."""
        if len(rows) == len(self.samples):
            return self
        at = torch.tensor(list(rows))
        here = at.to(self.z.device)
        names = ("z", "free", "given", "confidence", "sample_hash", "labels")
        found = {name: getattr(self, name) for name in names}
        found = {name: None if v is None else v[here] for name, v in found.items()}
        return replace(
            self,
            samples=self.samples[at],
            tokens=self.tokens[at],
            passes=tuple(self.passes[i] for i in rows),
            head_rows=self.head_rows if 0 in rows else 0,
            **found,
        )


@dataclass(frozen=True, eq=False)
class StepEvent:
    """A step was made: tokens and routes (B, L) of the window after it."""

    number: int
    step: Step
    z: Tokens
    route: Tensor
    before: SampleState

    @cached_property
    def whole_samples(self) -> tuple[Tokens, Tensor]:
        """Tokens and routes (B, length), whichever window was being made."""
        whole, window = self.before.tokens, self.before.window
        if self.z.shape == whole.shape:
            return self.z, self.route
        tokens = whole.to(self.z, copy=True)
        routes = torch.zeros_like(tokens, dtype=self.route.dtype)
        tokens[:, window], routes[:, window] = self.z, self.route
        return tokens, routes


@torch.no_grad()
def advance(states: Sequence[SampleState]) -> list[tuple[SampleState, StepEvent]]:
    """Every state after its next step, and what happened.

    States with equal steppers and the same source go through the network together.
    """
    outputs = _move(states, [stepper_of(state) for state in states])
    return [_after(s, _correct(s, out)) for s, out in zip(states, outputs, strict=True)]


def stepper_of(state: SampleState) -> Stepper:
    """What makes the next step."""
    context, step = state.context, state.step
    if context.prior is None:
        return causal_step
    if isinstance(context.predictor, Confident):
        return context.predictor
    guidance = context.guidance
    if guidance is not None and guidance.on == "posterior" and not step.greedy:
        weight = guidance.at(step.t)
        if weight not in (0, 1):
            return GuidedPosterior(weight)
    graphs = context.graphs
    if graphs is not None and is_capturable(step) and (graphs.watched or state.window_start):
        return graphs
    return psi_step


def _move(states: Sequence[SampleState], steppers: Sequence[Stepper]) -> list[StepOutput]:
    """Each stepper on the states that are its, joined where they may be."""
    groups: dict[Any, list[int]] = {}
    for i, (state, stepper) in enumerate(zip(states, steppers, strict=True)):
        alone = None if state.context.shared else i
        groups.setdefault((stepper, id(state.source), alone), []).append(i)
    outputs: dict[int, StepOutput] = {}
    for (stepper, *_), members in groups.items():
        batch = StepBatch.join([batch_of(states[i]) for i in members])
        output = stepper(batch, states[members[0]].source)
        outputs |= zip(members, output.split(batch), strict=True)
    return [outputs[i] for i in range(len(states))]


def _correct(state: SampleState, out: StepOutput) -> StepOutput:
    """The sweeps of a corrector after a step, at the level that it reached."""
    corrector = state.context.corrector
    for sweep in range(corrector.sweeps if corrector and state.step.alpha_s < 1 else 0):
        assert corrector is not None
        moved = replace(state, z=out.z, confidence=out.confidence)
        out = out.then(corrector(batch_of(moved, sweep), state.source))
    return out


def batch_of(state: SampleState, sweep: int | None = None) -> StepBatch:
    """What the next step of a state is made from, or a corrector's sweep after it."""
    context, step = state.context, state.step
    predictor: Any = context.predictor
    predictor = None if isinstance(predictor, Confident) else predictor
    level, draw = step.alpha_t, state.i
    if sweep is not None:
        assert context.corrector is not None
        level, draw = step.alpha_s, -1 - state.i * context.corrector.sweeps - sweep
    elif getattr(context.predictor, "commit", False):
        level = context.steps[0].alpha_t  # what is not committed is told to be noise
    elif context.prior is None:
        draw = 0
    memory = None if state.confidence is None else Memory(state.confidence)
    numbers = step_numbers(step, predictor, memory)
    segment = BatchSegment(
        len(state.z),
        state.z.shape[1],
        level,
        state.i,
        context.logits_processor,
        state.labels is not None,
        state.given is not None,
        None if context.guidance is None else context.guidance.at(step.t),
        numbers,
        len(state.z) * state.num_free,
    )
    return StepBatch(
        context.prior,
        context.pi,
        (segment,),
        numbers,
        state.sample_hash,
        draw,
        state.z,
        state.free,
        state.given,
        state.labels,
        state.confidence,
    )


def _after(state: SampleState, out: StepOutput) -> tuple[SampleState, StepEvent]:
    context, z = state.context, out.z
    if context.prior is None and state.i + 1 < z.shape[1]:
        z = z.clone()
        z[:, state.i + 1 :] = FREE  # what is given there was not read yet
    event = StepEvent(state.num_steps_done, state.step, z, out.route, state)
    after = replace(
        state,
        z=out.z,
        confidence=None if state.confidence is None else out.confidence,
        i=state.i + 1,
        num_steps_done=state.num_steps_done + 1,
        passes=tuple(map(sum, zip(state.passes, out.passes, strict=True))),
        head_rows=state.head_rows + out.head_rows,
    )
    if after.i < len(context.steps):
        return after, event
    start = after.window_start
    if start is not None and context.graphs is not None:
        try:
            after = replace(after, head_rows=after.head_rows + context.graphs.finish())
        except CapacityExceeded:  # nobody saw these steps
            return start, event
    tokens = state.tokens.clone()
    tokens[:, state.window] = out.z.to("cpu")
    return _open_window(replace(after, tokens=tokens), after.window_number + 1), event


def _open_window(state: SampleState, number: int, skip_given: bool = True) -> SampleState:
    """The next window in which something is free, before its first step."""
    starts = state.context.layout.starts
    for k in range(number, len(starts)):
        opened = replace(state, window_number=k, start=starts[k])
        free = opened.tokens[:, opened.window] == FREE
        if not skip_given or bool(free.any()):
            return _first_state(opened, free)
    return replace(state, done=True)


def _first_state(state: SampleState, free: Tensor) -> SampleState:
    """z at the prior, but for what is given; in an autoregressive run nothing is there yet."""
    context, layout, device = state.context, state.context.layout, state.context.layout.device
    index = state.samples.to(device) + layout.first_index
    key = torch.full((), layout.keys[state.window_number], dtype=torch.int64, device=device)
    sample_hash = fold_in(key, index)
    fixed = state.tokens[:, state.window].to(device).contiguous()
    conditioned = layout.conditioned
    if conditioned is None:
        conditioned = not bool(free.all())
    num_free, free = int(free.sum(1).max()), free.to(device)
    z = fixed
    if context.prior is not None:
        bits = fold_in(rng_state(sample_hash, 0, fixed.shape[1]), int(Purpose.START))
        z = torch.where(free, context.prior.from_bits(bits), fixed)
    confidence = None
    if context.watches_confidence:
        confidence = torch.full(z.shape, torch.inf, dtype=context.pi.dtype, device=device)
    state = replace(
        state,
        i=0,
        z=z,
        free=free,
        given=~free if conditioned else None,
        confidence=confidence,
        sample_hash=sample_hash,
        labels=None if layout.labels is None else layout.labels[state.samples].to(device),
        source=context.open_source(),
        num_free=num_free,
        window_start=None,
    )
    if context.graphs is None or context.graphs.watched:
        return state
    return replace(state, window_start=state)
