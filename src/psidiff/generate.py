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

from .data.infill import FREE
from .distributed import Processes
from .kernels.counter_rng import draw_key
from .model_interface import ModelInterface
from .request import Request
from .sampling import Cached, Samples, Step, Trace, sample
from .sampling.autoregressive import left_to_right
from .sampling.loop import OnStep
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
    while first < end:
        here = min(size.samples, end - first)
        try:
            parts.append(_batch(model, request, first, here, record, on_step))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if here == 1:
                raise ValueError("one sample by itself does not fit into memory") from error
            size.samples = here // 2
            notify(f"out of memory with {here} samples at a time: going on with {size.samples}")
            continue
        first += here
    return _together(parts, time.perf_counter() - begun)


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
    return _together(parts, max(part.seconds for part in parts))


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


def _batch(
    model: ModelInterface,
    request: Request,
    first: int,
    count: int,
    record: bool,
    on_step: OnStep | None,
) -> Made:
    """A batch, window after window; window w takes the seed's key number w."""
    whole = torch.full((count, request.length), FREE)
    if (given := request.rows(first, count)) is not None:
        whole = given.clone()
    trace, passes, head_rows, steps = Trace() if record else None, 0.0, 0, 0
    listeners = [each for each in (trace, on_step) if each is not None]
    for number, start in enumerate(request.starts):
        here = slice(start, start + request.window)
        if bool((whole[:, here] != FREE).all()):
            continue
        generator = torch.Generator().manual_seed(request.seed)
        for _ in range(number):
            draw_key(generator)
        told = _in_the_whole(whole.clone(), here, listeners, steps)
        made = _window(model, request, first, whole[:, here], generator, told)
        whole[:, here] = made.tokens.cpu()
        passes, head_rows = passes + made.nfe, head_rows + made.head_rows
        steps += len(request.steps) or request.window
    return Made(whole.to(model.device), passes, head_rows, trace=trace)


def _window(
    model: ModelInterface,
    request: Request,
    first: int,
    known: Tensor,
    generator: torch.Generator,
    on_step: OnStep | None,
) -> Samples:
    shape = (known.shape[0], known.shape[1])
    shared: dict[str, Any] = dict(request.options)
    shared |= {"device": model.device, "on_step": on_step}
    shared["first_index"] = request.first_index + first
    if bool((known != FREE).any()):
        shared["given"] = known
    if model.prior is None:
        bos = model.config.start_id
        says = model.codec is not None and bos < model.codec.vocab_size
        return left_to_right(model.denoiser, bos, shape, generator, says_bos=says, **shared)
    if request.labels is not None:
        shared["labels"] = request.labels[first : first + shape[0]]
    denoiser = model.denoiser
    timeless = model.config.options.get("time_conditioning") is False
    if timeless and has_head(denoiser) and "micro_batch" not in shared:
        denoiser = Cached(denoiser)
    return sample(denoiser, model.prior, request.steps, shape, generator, **shared)


def _in_the_whole(
    whole: Tensor, here: slice, listeners: list[OnStep], before: int
) -> OnStep | None:
    """Listeners hear of whole samples, whichever window is being made; steps go on counting."""
    if not listeners:
        return None

    def on_step(i: int, step: Step, z: Tensor, route: Tensor) -> None:
        tokens, routes = whole.to(z), torch.zeros_like(whole, dtype=torch.int8).to(z.device)
        tokens[:, here], routes[:, here] = z, route
        for listener in listeners:
            listener(before + i, step, tokens, routes)

    return on_step


def _together(parts: list[Made], seconds: float) -> Made:
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
