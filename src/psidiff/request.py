"""What is asked of a model, made definite: prompts become tokens, names become rules.

Everything a user can get wrong is said here, before anything runs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .data.codec import Codec
from .data.infill import encode_prompt, encode_template
from .model_config import ModelParts
from .sampling import LEFT_TO_RIGHT, OPTIONS, Kappa, Sampler, Step
from .sampling.plan import causal_plan
from .types import FREE, as_count, as_ids

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

    @property
    def total_steps(self) -> int:
        """The steps of one sample, over all windows."""
        return len(self.plan) * len(self.starts)


def build_request(
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
        given = encode_given_tokens(model, num_samples, prompt, suffix, infill, length)
    length = given.shape[1] if given is not None else length or window
    if length is None:
        raise ValueError("this model does not say how long its sequences are: give length")
    window = min(window or length, length)
    _check_length(model, length)
    chosen = {"steps": num_steps, "kappa": kappa, "top_p": top_p, **options}
    sampler = Sampler.of(chosen, recommended_sampler(model))
    ids = None if labels is None else encode_labels(model, labels, num_samples)
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


def trace_metadata(model: ModelParts, request: Request) -> dict[str, Any]:
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


def encode_given_tokens(
    model: ModelParts,
    num_samples: int,
    prompt: str | Sequence[str] | None,
    suffix: str | None,
    infill: Any,
    length: int | None,
) -> Tensor | None:
    """What the user fixed, (1 or num_samples, length); None if nothing.

    length: of a sample; None: the model's, or as much as is given.
    """
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    prompts: Any = prompt if several else [prompt]
    if not prompts:
        raise ValueError(
            "prompt holds no texts: give one for all, one for each, or leave it out"
        )
    texts = [] if prompt is None else prompts
    for text in texts if suffix is None else [*texts, suffix]:
        if not isinstance(text, str):
            raise ValueError(
                f"prompts and suffixes are texts, got {text!r}; token ids go into infill"
            )
    if infill is not None and (prompt or suffix):
        raise ValueError("give a prompt and suffix, or a template to fill in, not both")
    if infill is not None:
        rows = _infill(model, infill, length)
    elif not prompt and not suffix:
        return None
    else:
        codec = _text_codec(model, "prompts")
        most, framed = length or model.length, model.config.framed
        rows = torch.stack([encode_prompt(codec, p, suffix, most, framed) for p in prompts])
    if len(rows) not in (1, num_samples):
        raise ValueError(
            f"there are {len(rows)} rows of given tokens for {num_samples} samples"
        )
    if not bool((rows == FREE).any()):
        raise ValueError("every token is given: there is nothing left to sample")
    if model.autoregressive and bool(((rows[:, :-1] == FREE) & (rows[:, 1:] != FREE)).any()):
        raise ValueError(
            "an autoregressive model goes left to right: it takes a prompt, nothing after it"
        )
    return rows


def _infill(model: ModelParts, infill: Any, length: int | None) -> Tensor:
    """A template, a puzzle, an image with transparent pixels, or token ids with -1."""
    codec = model.codec
    if isinstance(infill, str):
        if codec is not None and codec.kind == "puzzle":
            return codec.encode(infill)[None]
        codec = _text_codec(model, "templates")
        return encode_template(codec, infill, length, model.config.framed)[None]
    if isinstance(infill, np.ndarray) and infill.dtype == np.uint8 and infill.ndim > 1:
        if codec is None or codec.kind != "image":
            raise ValueError("this model does not make images: give token ids or a template")
        return codec.encode(infill)[None]
    rows = token_ids("given token ids", infill)
    rows = rows[None] if rows.ndim == 1 else rows
    if rows.ndim == 2 and length is not None:
        if length < rows.shape[1]:
            raise ValueError(f"{rows.shape[1]} tokens are given, and a sample has {length}")
        rows = F.pad(rows, (0, length - rows.shape[1]), value=FREE)
    if rows.ndim != 2:
        raise ValueError(f"given token ids must be (L,) or (n, L), got {tuple(rows.shape)}")
    check_ids(model, "infill", rows)
    if codec is not None and codec.length in (None, rows.shape[1]):
        codec.check(rows.cpu())
    return rows.long()


def token_ids(name: str, value: Any) -> Tensor:
    """A tensor of whole numbers from whatever somebody gave."""
    ids = None
    with suppress(TypeError, ValueError, RuntimeError):
        ids = torch.as_tensor(value)
    if ids is None or ids.is_floating_point() or ids.is_complex() or not ids.numel():
        shown = textwrap.shorten(repr(value), 60)
        raise ValueError(f"{name} must be whole numbers, -1 where free, got {shown}")
    return ids


def check_ids(model: ModelParts, name: str, rows: Tensor) -> None:
    """Given tokens are ids of the model, or -1."""
    if (size := (model.codec or model).vocab_size) is not None:
        as_ids(name, rows[rows != FREE], size)


def _text_codec(model: ModelParts, what: str) -> Codec:
    if model.codec is None:
        raise ValueError(f"{what} need a tokenizer, and this model came without one")
    if model.codec.kind != "text":
        raise ValueError(f"{what} are for models of text; this one makes {model.codec.kind}s")
    return model.codec


def encode_labels(model: ModelParts, labels: Any, num_samples: int) -> Tensor:
    """One for each sample; a number or a name stands for all, "each" for classes in turn."""
    classes = model.num_classes
    if model.config.network and classes is None:
        raise ValueError("this model has no classes: leave the labels out")
    names = () if model.codec is None else tuple(model.codec.classes)
    in_turn = isinstance(labels, str) and labels == "each" and "each" not in names
    if in_turn and classes is not None:
        return torch.arange(num_samples) % classes
    if isinstance(labels, (str, int)):
        labels = [labels]
    if isinstance(labels, (list, tuple)):
        labels = [_number_of(label, names) for label in labels]
    ids = torch.as_tensor(labels).reshape(-1)
    if ids.is_floating_point():
        raise ValueError(f"labels must be whole numbers or names, got {ids[0].item():g}")
    if classes is not None and bool(((ids < 0) | (ids > classes)).any()):
        wrong = ids[(ids < 0) | (ids > classes)][0].item()
        raise ValueError(f"there is no label {wrong}: the classes are 0 to {classes - 1}")
    if len(ids) == 1:
        ids = ids.expand(num_samples)
    if len(ids) != num_samples:
        raise ValueError(f"there are {len(ids)} labels for {num_samples} samples")
    return ids.long()


def _number_of(label: Any, names: tuple[str, ...]) -> int:
    if isinstance(label, str):
        if label in names:
            return names.index(label)
        if label.strip().lstrip("-").isdecimal():
            return int(label)
        known = f": the classes are {', '.join(names[:12])}" if names else ""
        raise ValueError(f"there is no label {label!r}{known}")
    if int(label) != label:
        raise ValueError(f"labels must be whole numbers or names, got {label:g}")
    return int(label)
