"""What samples are held to: the tokens that are given, and the labels they should have.

A mistake in either is said here, in one sentence.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .data.codec import Codec
from .data.infill import template_row, text_row
from .model_config import ModelParts
from .types import FREE, as_ids


def given_rows(
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
        rows = torch.stack([text_row(codec, p, suffix, most, framed) for p in prompts])
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
        return template_row(codec, infill, length, model.config.framed)[None]
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


def label_ids(model: ModelParts, labels: Any, num_samples: int) -> Tensor:
    """One for each sample; a number or a name stands for all."""
    classes = model.num_classes
    if model.config.network and classes is None:
        raise ValueError("this model has no classes: leave the labels out")
    names = () if model.codec is None else tuple(model.codec.classes)
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
