"""A record of what happened to each token: kept, predicted or renoised, step by step.

Only changes are stored. A file of it is a zip of arrays with a JSON header, `load` reads it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..files import FORMAT_VERSION
from ..types import Tokens
from .plan import Step


class Trace:
    """Pass it as `on_step`. `about` is plain data for whoever looks at the record later."""

    def __init__(self, about: dict[str, Any] | None = None) -> None:
        self.about = about or {}
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
        held = (torch.cat(each).numpy() for each in zip(*self._changes, strict=True))
        places, tokens, routes = held
        kappas = [np.nan if callable(s.kappa) else s.kappa for s in self.steps]
        plan = [
            [s.t, s.alpha_t, s.alpha_s, k, s.greedy]
            for s, k in zip(self.steps, kappas, strict=True)
        ]
        header = {"format_version": FORMAT_VERSION, "about": self.about}
        with Path(path).open("wb") as file:
            np.savez_compressed(
                file,
                header=np.frombuffer(json.dumps(header).encode(), np.uint8),
                plan=np.array(plan, np.float64),
                first=self._first.numpy(),
                counts=np.array([len(change[0]) for change in self._changes], np.int64),
                places=places,
                tokens=tokens,
                routes=routes,
            )

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """What `save` wrote. A rule with memory comes back as kappa = nan."""
        try:
            with np.load(path, allow_pickle=False) as file:
                held = {name: file[name] for name in file.files}
            header = json.loads(held["header"].tobytes())
        except (ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{path} is not a trace of psidiff") from error
        if header.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format_version {header.get('format_version')}; "
                f"this psidiff reads {FORMAT_VERSION}"
            )
        trace = cls(header["about"])
        trace.steps = [Step(t, a, s, k, bool(greedy)) for t, a, s, k, greedy in held["plan"]]
        trace._first = torch.from_numpy(held["first"])
        ends = list(accumulate(held["counts"].tolist()))
        for start, end in zip([0, *ends], ends, strict=False):
            change = (
                torch.from_numpy(held[n][start:end]) for n in ("places", "tokens", "routes")
            )
            places, tokens, routes = change
            trace._changes.append((places, tokens, routes))
        return trace
