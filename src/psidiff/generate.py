"""A request, carried out: in batches that fit, window after window, by all processes.

Every random number belongs to a sample by its number, so none of this changes the draws.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from .distributed import Processes
from .kernels.counter_rng import draw_key
from .model_interface import ModelInterface
from .request import Request
from .sampling import Samples, Step, Trace
from .sampling.autoregressive import causal_context
from .sampling.filters import chain
from .sampling.loop import OnStep, diffusion_context, run_steps
from .sampling.state import SampleLayout, SamplingContext
from .types import as_count, has_head

_MOST = {"cuda": 256, "cpu": 64}  # samples in a batch; more gain nothing
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Made(Samples):
    """Samples, the time they took, and a trace if one was asked for."""

    seconds: float = 0.0
    trace: Trace | None = None


@dataclass
class BatchSize:
    """How many samples at a time; fewer from where memory has run out."""

    samples: int

    def __post_init__(self) -> None:
        as_count("batch_size", self.samples)


def generate(
    model: ModelInterface,
    request: Request,
    first: int = 0,
    count: int | None = None,
    *,
    batch_size: int | BatchSize | None = None,
    record: bool = False,
    on_step: OnStep | None = None,
    notify: Notify = warnings.warn,
) -> Made:
    """Samples `first` to `first + count` of a request, here.

    batch_size None: as many at a time as fit into memory. Out of memory, the batch is halved;
    a BatchSize remembers it for the samples after these.
    """
    count = request.num_samples - first if count is None else count
    size = batch_that_fits(model, request) if batch_size is None else batch_size
    size = size if isinstance(size, BatchSize) else BatchSize(size)
    begun, end, parts = time.perf_counter(), first + count, []
    context = sampling_context(model, request, watched=record or on_step is not None)
    while first < end:
        here = min(size.samples, end - first)
        try:
            parts.append(_batch(context, first, here, record, on_step))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if here == 1:
                raise ValueError("one sample by itself does not fit into memory") from error
            size.samples = here // 2
            notify(f"out of memory with {here} samples at a time: going on with {size.samples}")
            continue
        first += here
    return join_batches(parts, time.perf_counter() - begun)


def generate_together(
    model: ModelInterface, request: Request, notify: Notify = warnings.warn, **options: Any
) -> Made:
    """All samples of a request, in order, in every process: each makes its share."""
    group = Processes.join(model.device.type)
    bounds = [request.num_samples * i // group.world for i in range(group.world + 1)]
    start, count = bounds[group.rank], bounds[group.rank + 1] - bounds[group.rank]
    made = None
    if count:
        made = generate(model, request, start, count, notify=notify, **options)
        made = replace(made, tokens=made.tokens.cpu())
    shares: list[Any] = [None] * group.world
    dist.all_gather_object(shares, made)
    parts = [part for part in shares if part is not None]
    return join_batches(parts, max(part.seconds for part in parts))


def under_torchrun() -> bool:
    """Whether this process is one of several that were started together."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def batch_that_fits(model: ModelInterface, request: Request) -> int:
    """How many samples at a time: half the free memory by a rough count of activations."""
    most = _MOST.get(model.device.type, 64)
    if (free := _free_memory(model.device)) is None:
        return most
    options = model.config.options
    width = options.get("hidden_size") or 8 * options.get("width", 64)
    K = model.prior.vocab_size if model.prior is not None else options.get("vocab_size", 1)
    numbers = 32 * width + (0 if has_head(model.denoiser) else 4 * K)
    passes = 2 if "guidance" in request.options else 1
    return max(1, min(most, free // (2 * 4 * numbers * request.window * passes)))


def sampling_context(
    model: ModelInterface, request: Request, watched: bool = False
) -> SamplingContext:
    """A request to a model as what its states are started from.

    watched: somebody looks at every step.
    """
    generator = torch.Generator().manual_seed(request.seed)
    layout = SampleLayout(
        request.num_samples,
        request.length,
        tuple(draw_key(generator) for _ in request.starts),
        request.window,
        model.device,
        tuple(request.starts),
        request.given,
        request.labels,
        request.first_index,
        watched=watched,
    )
    denoiser, options = model.denoiser, request.options
    if model.prior is None:
        bos = model.config.start_id
        says = model.codec is not None and bos < model.codec.vocab_size
        return causal_context(denoiser, bos, layout, chain(**options), says)
    timeless = model.config.options.get("time_conditioning") is False
    cached = timeless and has_head(denoiser) and "micro_batch" not in options
    steps = request.steps
    return diffusion_context(denoiser, model.prior, steps, layout, cached=cached, **options)


def _batch(
    context: SamplingContext, first: int, count: int, record: bool, on_step: OnStep | None
) -> Made:
    """A batch, window after window."""
    trace = Trace() if record else None
    listeners = [each for each in (trace, on_step) if each is not None]

    def listener(i: int, step: Step, z: Tensor, route: Tensor) -> None:
        for each in listeners:
            each(i, step, z, route)

    made = run_steps(context.start(first, count), listener if listeners else None)
    return Made(made.tokens, made.nfe, made.head_rows, trace=trace)


def join_batches(parts: list[Made], seconds: float) -> Made:
    """Batches as one, with their traces."""
    count = sum(len(part.tokens) for part in parts)
    traces = [part.trace for part in parts if part.trace is not None]
    return Made(
        torch.cat([part.tokens for part in parts]),
        sum(part.nfe * len(part.tokens) for part in parts) / count,
        sum(part.head_rows for part in parts),
        seconds,
        Trace.join(traces) if traces else None,
    )


def _free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system counts them
        return None


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "not enough memory" in str(error) or "can't allocate memory" in str(error)
