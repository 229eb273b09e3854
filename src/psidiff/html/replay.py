"""Recorded runs as one page that plays them, step by step, token by token."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checksums import as_damage, in_short
from ..data.codec import Codec, codec_from
from ..data.images import Pixels
from ..sampling import Step, Trace
from . import fill_page

MOST = 16  # samples of a run that a page shows
_VISIBLE = dict.fromkeys([*range(0x7F, 0xA0), *range(0xD800, 0xE000)], "\ufffd")
_VISIBLE |= {code: chr(0x2400 + code) for code in range(32) if code != ord("\n")}  # ␀ to ␟
UNMADE = "·"  # how -1 is shown: a token that nobody has made yet


def write_page(traces: Sequence[Trace | Path], path: Path) -> None:
    """One self-contained page of one run or two, or of the files that hold them."""
    if len(traces) not in (1, 2):
        raise ValueError(f"replay shows one trace, or two side by side; got {len(traces)}")
    runs = [_of_file(each) if isinstance(each, Path) else _run(each) for each in traces]
    fill_page(path, __package__, "replay.html", runs)


def pieces(codec: Codec | None, ids: Sequence[int]) -> list[str]:
    """Each token as a person may see it: no control character but the line feed is left."""
    if codec is None:
        return [str(i) if i >= 0 else UNMADE for i in ids]
    found = codec.pieces(torch.tensor(ids, dtype=torch.long).clamp(min=0))
    return [
        p.translate(_VISIBLE) if i >= 0 else UNMADE for i, p in zip(ids, found, strict=True)
    ]


def _of_file(path: Path) -> dict[str, Any]:
    """What the page knows of a recorded run; the file may be from anybody."""
    trace = Trace.load(path)
    with as_damage(path):
        return _run(trace)


def _run(trace: Trace) -> dict[str, Any]:
    """What the page knows of a run."""
    about, (count, length) = _checked(trace), trace.shape
    codec = _codec(about["codec"], length) if about.get("codec") else None
    frames = [(z.numpy(), route.numpy()) for z, route in trace.part(MOST).frames()]
    tokens, routes = (np.stack(each) for each in zip(*frames, strict=True))
    ids = np.unique(tokens)
    wide = "<u4" if ids[-1] >= 0xFFFF else "<u2"  # the largest number stands for -1
    given = about.get("given")
    marks = np.zeros((count, length)) if given is None else np.array(given)
    return {
        **{name: about.get(name) for name in ("model", "sampler", "seed")},
        **about_codec(codec),
        "count": count,
        "length": length,
        "labels": _labels(codec, about.get("labels")),
        "steps": [numbers_of(step) for step in trace.steps],
        "bits": 32 if wide == "<u4" else 16,
        "tokens": encode_frames(tokens.astype(wide)),
        "routes": encode_frames(routes.astype("u1")),
        "given": encode_frames(marks[None, :MOST].astype("u1")),
        "ids": encode_frames(ids.astype(wide)),
        "pieces": _shown(codec, ids.tolist()),
    }


def _checked(trace: Trace) -> dict[str, Any]:
    """What a run is said to be, each value of the kind that it should be."""
    about, (count, length) = trace.about, trace.shape
    kinds = {"model": str, "sampler": str, "seed": int}
    kinds |= {"codec": dict, "given": list, "labels": list}
    for name, kind in kinds.items():
        if about.get(name) is not None and not isinstance(about[name], kind):
            raise ValueError(f"its {name} is no {kind.__name__}")
    given, labels = about.get("given"), about.get("labels")
    if given is not None:
        rows = [row for row in given if isinstance(row, list) and len(row) == length]
        if len(rows) != count or not all(v in (0, 1) for row in rows for v in row):
            raise ValueError("the marks of given tokens are not 0 or 1 for each")
    if labels is not None and (
        len(labels) != count or not all(isinstance(label, (int, str)) for label in labels)
    ):
        raise ValueError("its labels are not one for each sample")
    return about


def _codec(described: dict[str, Any], length: int) -> Codec:
    """The codec of a run; a tokenizer may fail in every way there is."""
    try:
        codec = codec_from(described)
        wanted = codec.length
    except Exception as error:
        raise ValueError(f"its codec cannot be made: {_in_a_line(error)}") from error
    if wanted is not None and wanted != length:
        raise ValueError(f"its samples have {length} tokens, and its codec knows {wanted}")
    return codec


def _shown(codec: Codec | None, ids: Sequence[int]) -> list[str]:
    try:
        return pieces(codec, ids)
    except Exception as error:
        raise ValueError(f"its codec cannot show its tokens: {_in_a_line(error)}") from error


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {in_short(error, 200)}"


def encode_frames(frames: np.ndarray) -> str:
    """Each frame XOR the one before, so that what stays is 0; deflated, as base64."""
    changes = frames.copy()
    changes[1:] ^= frames[:-1]
    return base64.b64encode(zlib.compress(changes.tobytes(), 9)).decode("ascii")


def about_codec(codec: Codec | None) -> dict[str, Any]:
    """What tokens are, the channels, height and width of an image, and how many tokens."""
    if codec is None:
        return {"kind": "numbers", "size": None, "vocabulary": None}
    size = None
    if isinstance(codec, Pixels):
        size = [codec.channels, codec.height, codec.width]
    return {"kind": codec.kind, "size": size, "vocabulary": codec.vocab_size}


def _labels(codec: Codec | None, labels: Sequence[Any] | None) -> list[str] | None:
    if labels is None:
        return None
    names = dict(enumerate(() if codec is None else codec.classes))
    return [names.get(label, str(label)) for label in labels[:MOST]]


def numbers_of(step: Step) -> list[float | None]:
    """t, alpha_t, alpha_s and kappa; None for a kappa that hangs on the loop's memory."""
    kappa = None if callable(step.kappa) or math.isnan(step.kappa) else step.kappa
    return [step.t, step.alpha_t, step.alpha_s, kappa]
