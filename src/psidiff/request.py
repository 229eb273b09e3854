"""What is asked of a model, made definite: prompts become tokens, names become rules.

Everything a user can get wrong is said here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from .conditioning import given_rows, label_ids
from .model_config import ModelParts
from .sampling import LEFT_TO_RIGHT, OPTIONS, Kappa, Sampler, Step
from .sampling.plan import causal_plan
from .types import FREE, as_count

_OF_REQUESTS = (
    *("num_samples", "num_steps", "seed", "prompt", "suffix", "infill", "labels", "length"),
    *("overlap", "preset", "sampler", "first_index", "batch_size", "record", "whole", "split"),
    *("on_step", "graph"),
)


@dataclass(frozen=True)
class Request:
    """All that decides the tokens of `num_samples` samples.

    given (1 or num_samples, length) holds -1 where free. The network sees `window` positions at
    a time; a longer sample is made by windows of which each sees `overlap` tokens of the one
    before. `steps` is the sampler's plan for this model. graph is as in `sample`.
    """

    num_samples: int
    length: int
    window: int
    overlap: int
    seed: int
    steps: tuple[Step, ...]
    sampler: Sampler
    given: Tensor | None = None
    labels: Tensor | None = None
    first_index: int = 0
    graph: bool | None = None

    @property
    def plan(self) -> tuple[Step, ...]:
        """The steps of a window; left to right each position is one."""
        return self.steps or causal_plan(self.window)

    @property
    def starts(self) -> list[int]:
        """Where windows begin."""
        stride = self.window - self.overlap
        last = max(self.length - self.window, 0)
        return [*range(0, last, stride), last]


def request_of(
    model: ModelParts,
    num_samples: int,
    num_steps: int | None = None,
    kappa: str | Kappa = "auto",
    top_p: float | None = None,
    seed: int = 0,
    prompt: str | Sequence[str] | None = None,
    infill: Any = None,
    labels: Any = None,
    *,
    suffix: str | None = None,
    length: int | None = None,
    overlap: int | None = None,
    first_index: int = 0,
    graph: bool | None = None,
    **options: Any,
) -> Request:
    """A request from what `Model.sample` takes."""
    as_count("num_samples", num_samples)
    as_count("first_index", first_index, least=0)
    if as_count("seed", seed, least=0) >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {seed}")
    window = model.length
    if length is not None:
        as_count("length", length)
    _check_names(options)
    given = None
    if any(each is not None for each in (prompt, suffix, infill)):
        given = given_rows(model, num_samples, prompt, suffix, infill, length)
    length = given.shape[1] if given is not None else length or window
    if length is None:
        raise ValueError("this model does not say how long its sequences are: give length")
    window = min(window or length, length)
    _check_length(model, length)
    chosen = {"steps": num_steps, "kappa": kappa, "top_p": top_p, **options}
    sampler = Sampler.of(chosen, recommended_sampler(model))
    ids = None if labels is None else label_ids(model, labels, num_samples)
    sampler.check(model.prior, ids is not None)
    if graph is not None and sampler.left_to_right:
        raise ValueError("an autoregressive model takes no graph")
    return Request(
        num_samples,
        length,
        window,
        _overlap(overlap, length, window),
        seed,
        sampler.plan(model.schedule, model.prior),
        sampler,
        given,
        ids,
        first_index,
        graph,
    )


def recommended_sampler(model: ModelParts) -> Sampler:
    """What the model's card says, else cap:.005 in 256 steps."""
    if not model.autoregressive:
        return Sampler.parse(model.config.recommended_kappa)
    _ = model.config.start_id  # refused here, not after the first pass
    return Sampler(LEFT_TO_RIGHT)


def about_trace(model: ModelParts, request: Request) -> dict[str, Any]:
    """What a replay says of a run."""
    about: dict[str, Any] = {
        "model": model.config.title,
        "sampler": str(request.sampler),
        "seed": request.seed,
        "codec": None if model.codec is None else model.codec.describe(),
    }
    if request.given is not None:
        given = (request.given != FREE).int()
        about["given"] = given.expand(request.num_samples, -1).tolist()
    if request.labels is not None:
        about["labels"] = request.labels.tolist()
    return about


def _check_length(model: ModelParts, length: int) -> None:
    """Images and puzzles have one length."""
    codec = model.codec
    if codec is not None and codec.length not in (None, length):
        raise ValueError(
            f"every {codec.kind} of this model has {codec.length} tokens, got a length of "
            f"{length}"
        )


def _overlap(overlap: int | None, length: int, window: int) -> int:
    """What a window sees of the one before: half of it unless somebody says."""
    if overlap is None:
        return window // 2
    if length == window:
        raise ValueError(
            f"overlap is of windows, and {length} tokens fit into one: give a length beyond "
            "the model's, or leave it out"
        )
    if not 0 < as_count("overlap", overlap, least=0) < window:
        raise ValueError(f"overlap must be between 1 and {window - 1}, got {overlap}")
    return overlap


def _check_names(options: Iterable[str]) -> None:
    """Only what a sampler has, and nothing that is named otherwise here."""
    for name in options:
        if name not in (*OPTIONS, "preset", "sampler") or name == "steps":
            known = [each for each in OPTIONS if each != "steps"]
            near = get_close_matches(name, (*known, *_OF_REQUESTS), n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise ValueError(f"Model.sample takes no option {name!r}{hint}")
