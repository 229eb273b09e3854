"""`psidiff replay`: recorded runs as one page that plays them, step by step, token by token."""

from __future__ import annotations

import base64
import math
import unicodedata
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from ..data.codec import codec_from
from ..pages import DATA, as_script, template
from ..sampling import Step, Trace
from .terminal import plain

MOST = 16  # samples of a run that a page shows
UNMADE = "·"  # how -1 is shown: a token that nobody has made yet


def show(console: Console, files: list[Path], out: Path) -> None:
    """Write the page of one trace, or of two side by side, and say where it is."""
    if len(files) not in (1, 2):
        raise ValueError(f"replay shows one trace, or two side by side; got {len(files)}")
    write_page([_load(path) for path in files], out)
    text = Text.assemble("Open it in a browser: ", (plain(out), "bold"))
    console.print(text, soft_wrap=True)


def write_page(traces: Sequence[Trace], path: Path) -> None:
    """One self-contained page of one run or two."""
    if len(traces) not in (1, 2):
        raise ValueError(f"a page holds one trace or two, got {len(traces)}")
    data = as_script([_run(trace) for trace in traces])
    path.parent.mkdir(parents=True, exist_ok=True)
    page = template("psidiff.cli", "replay.html").replace(DATA, data)
    path.write_text(page, encoding="utf-8")


def pieces(codec: Any, ids: Sequence[int]) -> list[str]:
    """Each token as a person may see it: no control character but the line feed is left."""
    if codec is None or codec.kind == "image":
        return [str(i) if i >= 0 else UNMADE for i in ids]
    found = codec.pieces(torch.tensor(ids, dtype=torch.long).clamp(min=0))
    return [_visible(p) if i >= 0 else UNMADE for i, p in zip(ids, found, strict=True)]


def _load(path: Path) -> Trace:
    try:
        return Trace.load(path)
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (TypeError, AttributeError, zlib.error) as error:  # an array, or a damaged file
        raise ValueError(f"{path} is not a trace of psidiff") from error


def _run(trace: Trace) -> dict[str, Any]:
    """What the page knows of a run."""
    about, (count, length) = trace.about, trace.shape
    codec = codec_from(about["codec"]) if about.get("codec") else None
    frames = [(z[:MOST].numpy(), route[:MOST].numpy()) for z, route in trace.frames()]
    tokens, routes = (np.stack(each) for each in zip(*frames, strict=True))
    ids = np.unique(tokens)
    wide = "<u4" if ids[-1] >= 0xFFFF else "<u2"  # the largest number stands for -1
    given = about.get("given")
    marks = np.zeros((count, length)) if given is None else np.array(given)
    return {
        "model": about.get("model"),
        "sampler": about.get("sampler"),
        "seed": about.get("seed"),
        "kind": "numbers" if codec is None else codec.kind,
        "size": _size(codec),
        "vocabulary": None if codec is None else codec.vocab_size,
        "count": count,
        "length": length,
        "labels": _labels(codec, about.get("labels")),
        "steps": [_numbers(step) for step in trace.steps],
        "bits": 32 if wide == "<u4" else 16,
        "tokens": pack(tokens.astype(wide)),
        "routes": pack(routes.astype("u1")),
        "given": pack(marks[None, :MOST].astype("u1")),
        "ids": pack(ids.astype(wide)),
        "pieces": pieces(codec, ids.tolist()),
    }


def pack(frames: np.ndarray) -> str:
    """Each frame XOR the one before, so that what stays is 0; deflated, as base64."""
    changes = frames.copy()
    changes[1:] ^= frames[:-1]
    return base64.b64encode(zlib.compress(changes.tobytes(), 9)).decode("ascii")


def _size(codec: Any) -> list[int] | None:
    """Channels, height and width of an image."""
    image = codec is not None and codec.kind == "image"
    return [codec.channels, codec.height, codec.width] if image else None


def _labels(codec: Any, labels: Sequence[Any] | None) -> list[str] | None:
    if labels is None:
        return None
    names = dict(enumerate(getattr(codec, "classes", ())))
    return [names.get(label, str(label)) for label in labels[:MOST]]


def _numbers(step: Step) -> list[float | None]:
    """t, alpha_t, alpha_s and kappa; None for a kappa that hangs on the loop's memory."""
    kappa = None if callable(step.kappa) or math.isnan(step.kappa) else step.kappa
    return [step.t, step.alpha_t, step.alpha_s, kappa]


def _visible(piece: str) -> str:
    return "".join(map(_visible_character, piece))


def _visible_character(c: str) -> str:
    if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs"):
        return c
    return chr(0x2400 + ord(c)) if ord(c) < 32 else "\ufffd"  # ␀ to ␟
