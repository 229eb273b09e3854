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

from .data.codec import Codec
from .data.puzzle import Puzzle
from .distributed import Processes
from .kernels.counter_rng import new_key
from .model_config import ModelParts
from .request import Request
from .sampling import Samples, Trace
from .sampling.logit_sources import CausalLogits
from .sampling.loop import OnStep, diffusion_context, run_steps
from .sampling.state import SampleLayout, SamplingContext
from .types import as_count, traits

_MOST = {"cuda": 256, "cpu": 64}  # samples in a batch; more gain nothing
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Decoded(Samples):
    """Samples that know what their tokens mean; the time they took, a trace if there is one.

    A text ends before its first end-of-text token, where the codec has one; `whole` shows all.
    """

    seconds: float = 0.0
    trace: Trace | None = None
    codec: Codec | None = None
    whole: bool = False

    @property
    def text(self) -> list[str]:
        """Each sample as text; a puzzle as its lines."""
        return self._decoded("text", "puzzle")

    @property
    def images(self) -> list[Any]:
        """Each sample as an array of uint8, (H, W) or (H, W, 3)."""
        return self._decoded("image")

    def _decoded(self, *kinds: str) -> list[Any]:
        if self.codec is None or self.codec.kind not in kinds:
            kind = "tokens only" if self.codec is None else f"a codec for {self.codec.kind}"
            raise ValueError(f"this model has {kind}: its samples are not {kinds[0]}")
        end = None if self.whole else self.codec.end_id
        return [self.codec.decode(until_end(row, end)[0]) for row in self.tokens.cpu()]


def until_end(row: Tensor, end: int | None, prompted: bool = False) -> tuple[Tensor, bool]:
    """A row up to its end, and whether it has one; those it opens with only count after a
    prompt."""
    if end is None:
        return row, False
    if not prompted:
        text = (row != end).nonzero()[:, 0]
        row = row[text[0] :] if len(text) else row[:0]
    ends = (row == end).nonzero()[:, 0]
    return (row[: int(ends[0])], True) if len(ends) else (row, False)


@dataclass
class BatchSize:
    """How many samples at a time; fewer from where memory has run out."""

    samples: int

    def __post_init__(self) -> None:
        as_count("batch_size", self.samples)


def validity_flags(made: Decoded) -> list[dict[str, bool]]:
    """Of each puzzle whether its answer is right; of others nothing."""
    if not isinstance(made.codec, Puzzle):
        return [{} for _ in made.tokens]
    return [{"valid": each} for each in made.codec.valid(made.tokens).tolist()]


def generate(
    model: ModelParts,
    request: Request,
    first: int = 0,
    count: int | None = None,
    *,
    batch_size: int | BatchSize | None = None,
    record: bool = False,
    on_step: OnStep | None = None,
    notify: Notify = warnings.warn,
) -> Decoded:
    """Samples `first` to `first + count` of a request, here.

    batch_size None: as many at a time as fit into memory. Out of memory, the batch is halved;
    a BatchSize remembers it for the samples after these.
    """
    count = request.num_samples - first if count is None else count
    size = largest_batch_size(model, request) if batch_size is None else batch_size
    size = size if isinstance(size, BatchSize) else BatchSize(size)
    start, end, parts = time.perf_counter(), first + count, []
    context = sampling_context(model, request, watched=record or on_step is not None)
    while first < end:
        count = min(size.samples, end - first)
        trace = Trace() if record else None
        try:
            made = run_steps(context.start(first, count), trace, on_step)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if count == 1:
                raise ValueError("one sample by itself does not fit into memory") from error
            size.samples = count // 2
            notify(
                f"out of memory with {count} samples at a time: going on with {size.samples}"
            )
            continue
        parts.append(Decoded(made.tokens, made.nfe, made.head_rows, trace=trace))
        first += count
    return replace(join_batches(parts, time.perf_counter() - start), codec=model.codec)


def generate_distributed(
    model: ModelParts, request: Request, notify: Notify = warnings.warn, **options: Any
) -> Decoded:
    """All samples of a request, in order, in every process: each makes its share."""
    group = Processes.join(model.device.type)
    bounds = [request.num_samples * i // group.world for i in range(group.world + 1)]
    start, count = bounds[group.rank], bounds[group.rank + 1] - bounds[group.rank]
    made = None
    if count:
        made = generate(model, request, start, count, notify=notify, **options)
        made = replace(made, tokens=made.tokens.cpu(), codec=None)
    shares: list[Any] = [None] * group.world
    dist.all_gather_object(shares, made)
    parts = [part for part in shares if part is not None]
    made = join_batches(parts, max(part.seconds for part in parts))
    return replace(made, codec=model.codec)


def under_torchrun() -> bool:
    """Whether this process is one of several that were started together."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def largest_batch_size(model: ModelParts, request: Request) -> int:
    """How many samples at a time: half the free memory by a rough count of activations."""
    most = _MOST.get(model.device.type, 64)
    if (free := _free_memory(model.device)) is None:
        return most
    options = model.config.options
    width = options.get("hidden_size") or 8 * options.get("width", 64)
    head = traits(model.denoiser).head
    numbers = 32 * width + (0 if head else 4 * (model.vocab_size or 1))
    passes = 1 if request.sampler.guidance is None else 2
    return max(1, min(most, free // (2 * 4 * numbers * request.window * passes)))


def sampling_context(
    model: ModelParts, request: Request, watched: bool = False
) -> SamplingContext:
    """A request to a model as what its states are started from.

    watched: somebody looks at every step.
    """
    generator = torch.Generator().manual_seed(request.seed)
    layout = SampleLayout(
        request.num_samples,
        request.length,
        tuple(new_key(generator) for _ in request.starts),
        request.window,
        model.device,
        tuple(request.starts),
        request.given,
        request.labels,
        request.first_index,
        watched=watched,
    )
    denoiser, sampler = model.denoiser, request.sampler
    if model.prior is None:
        bos = model.config.start_id
        allow_bos = model.codec is not None and bos < model.codec.vocab_size
        remembers = traits(denoiser).reader

        def open_source() -> CausalLogits:
            read = denoiser.reader(layout.window) if remembers else denoiser
            return CausalLogits(read, bos, allow_bos)

        return SamplingContext(layout, None, request.plan, open_source, sampler.chain())
    timeless = model.config.options.get("time_conditioning") is False
    cached = timeless and traits(denoiser).head and sampler.micro_batch is None
    return diffusion_context(
        denoiser, model.prior, request.steps, layout, sampler, request.graph, cached
    )


def join_batches(parts: list[Decoded], seconds: float) -> Decoded:
    """Batches as one, with their traces."""
    count = sum(len(part.tokens) for part in parts)
    traces = [part.trace for part in parts if part.trace is not None]
    return replace(
        parts[0],
        tokens=torch.cat([part.tokens for part in parts]),
        nfe=sum(part.nfe * len(part.tokens) for part in parts) / count,
        head_rows=sum(part.head_rows for part in parts),
        seconds=seconds,
        trace=Trace.join(traces) if traces else None,
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
