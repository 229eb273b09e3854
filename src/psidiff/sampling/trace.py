"""A record of what happened to each token: kept, predicted or renoised, step by step.

Only changes are stored. A file of it is a zip of arrays with a JSON
header and a checksum, `load` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checksums import as_damage, damaged
from ..files import FORMAT_VERSION, known_version, load_arrays, save_arrays
from ..limits import check_limit, parse_json
from ..types import Tokens
from .plan import Step


class Trace:
    """A record of every step of a sampler: pass it as `on_step`.

    Args:
        about: plain data for whoever looks at the record later.

    Example:
        >>> import psidiff
        >>> trace = psidiff.load("digits", device="cpu").sample(2, 4, record=True).trace
        >>> len(trace), trace.shape, trace.counts().shape
        (5, (2, 64), torch.Size([3, 2, 64]))
    """

    def __init__(self, about: dict[str, Any] | None = None) -> None:
        self.about: dict[str, Any] = about or {}
        self.steps: list[Step] = []
        self._first: Tensor | None = None  # tokens after the first step
        self._last: Tensor | None = None
        self._changes: list[tuple[Tensor, Tensor, Tensor]] = []  # places, tokens, routes

    def __call__(self, i: int, step: Step, z: Tokens, route: Tensor) -> None:
        z, route = z.to("cpu", torch.int32), route.to("cpu", torch.int8)
        if self._last is None:
            self._first = self._last = z.clone()
        places = ((route != 0) | (z != self._last)).flatten().nonzero()[:, 0]
        self._changes.append((places.int(), z.flatten()[places], route.flatten()[places]))
        self._last = z.clone()
        self.steps.append(step)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and positions."""
        if self._first is None:
            raise ValueError("this trace is empty: pass it as on_step to a sampler first")
        return self._first.shape[0], self._first.shape[1]

    def frames(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens (B, L) and routes (B, L) after each step."""
        shape = self.shape
        assert self._first is not None
        tokens = self._first.flatten().clone()
        for places, values, routes in self._changes:
            route = torch.zeros(tokens.shape, dtype=torch.int8)
            tokens[places], route[places] = values, routes
            yield tokens.view(shape).clone(), route.view(shape)

    def part(self, count: int) -> Trace:
        """The trace of the first samples alone."""
        size = count * self.shape[1]
        assert self._first is not None
        made = Trace(self.about)
        made.steps, made._first = self.steps, self._first[:count]
        for places, tokens, routes in self._changes:
            kept = places < size
            made._changes.append((places[kept], tokens[kept], routes[kept]))
        return made

    @property
    def tokens(self) -> list[Tensor]:
        return [tokens for tokens, _ in self.frames()]

    @property
    def routes(self) -> list[Tensor]:
        return [routes for _, routes in self.frames()]

    def counts(self) -> Tensor:
        """How often each position was kept, predicted and renoised: (3, B, L)."""
        routes = torch.stack(self.routes)
        return torch.stack([(routes == r).sum(0) for r in range(3)])

    @classmethod
    def join(cls, parts: Sequence[Trace], about: dict[str, Any] | None = None) -> Trace:
        """The traces of batches that walked the same plan, as one of all their samples."""
        joined = cls(about or parts[0].about)
        for i, frames in enumerate(zip(*(part.frames() for part in parts), strict=True)):
            tokens, routes = (torch.cat(each) for each in zip(*frames, strict=True))
            joined(i, parts[0].steps[i], tokens, routes)
        return joined

    def save(self, path: str | Path) -> None:
        """One compact file."""
        assert self.shape and self._first is not None
        changes = zip(*self._changes, strict=True)
        places, tokens, routes = (torch.cat(each).numpy() for each in changes)
        steps = (replace(s, kappa=nan) if callable(s.kappa) else s for s in self.steps)
        header = {"format_version": FORMAT_VERSION, "about": self.about}
        arrays = {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "plan": np.array([astuple(step) for step in steps], np.float64),
            "first": self._first.numpy(),
            "counts": np.array([len(change[0]) for change in self._changes], np.int64),
            "places": places,
            "tokens": tokens,
            "routes": routes,
        }
        save_arrays(Path(path), arrays)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """What `save` wrote. A rule with memory comes back as kappa = nan."""
        held = load_arrays(Path(path))
        for name, (ndim, kinds) in _ARRAYS.items():
            array = held.get(name)
            if array is None or array.ndim != ndim or array.dtype.kind not in kinds:
                raise damaged(path, f"it is not a trace of psidiff, or has lost its {name}")
        with as_damage(path):
            header = parse_json(held["header"].tobytes(), path)
        about = known_version(path, header).get("about") if isinstance(header, dict) else None
        if not isinstance(about, dict):
            raise damaged(path, "its header does not say what the run was")
        _check(path, held)
        trace = cls(about)
        try:
            plan = held["plan"].tolist()
            trace.steps = [Step(t, a, s, k, bool(greedy)) for t, a, s, k, greedy in plan]
        except ValueError as error:
            raise damaged(path, f"it has a step that is none ({error})") from None
        trace._first = torch.from_numpy(held["first"].astype(np.int32))
        dtypes: dict[str, Any] = {"places": np.int32, "tokens": np.int32, "routes": np.int8}
        columns = (torch.from_numpy(held[each].astype(dtypes[each])) for each in dtypes)
        split = (column.split(held["counts"].tolist()) for column in columns)
        trace._changes = list(zip(*split, strict=True))
        return trace


_ARRAYS = {
    "header": (1, "u"),
    "plan": (2, "f"),
    "first": (2, "iu"),
    "counts": (1, "iu"),
    "places": (1, "iu"),
    "tokens": (1, "iu"),
    "routes": (1, "iu"),
}
_LARGEST = 2**31 - 1


def _check(path: str | Path, held: dict[str, np.ndarray]) -> None:
    """The arrays of a file fit together; -1 is a token that was not made yet."""
    plan, first, counts = (held[name] for name in ("plan", "first", "counts"))
    size = first.size
    steps = len(plan)
    check_limit("unpacked", 5 * size * steps, path, f"records {size:,} tokens {steps:,} times")
    total = sum(counts.tolist())
    fits = (
        0 < size <= _LARGEST
        and plan.shape == (len(counts), 5)
        and steps > 0
        and all(0 <= count <= size for count in counts.tolist())
        and all(len(held[name]) == total for name in ("places", "tokens", "routes"))
        and _within(first, -1, _LARGEST)
        and _within(held["places"], 0, size - 1)
        and _within(held["tokens"], -1, _LARGEST)
        and _within(held["routes"], 0, 2)
        and bool(np.isfinite(plan[:, [0, 1, 2, 4]]).all())
        and not bool(np.isinf(plan).any())
    )
    if not fits:
        raise damaged(path, "its steps, tokens and routes do not fit together")


def _within(array: np.ndarray, least: int, most: int) -> bool:
    return not array.size or bool(least <= array.min() and array.max() <= most)
