"""What a run costs: time and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Steps and seconds since it was last looked at, but for evaluating and saving."""

    def __init__(self, step: int) -> None:
        self.step, self.started = step, time.monotonic()

    def lap(self, step: int) -> tuple[int, float]:
        now = time.monotonic()
        passed = step - self.step, now - self.started
        self.step, self.started = step, now
        return passed

    @contextmanager
    def stopped(self) -> Iterator[None]:
        paused = time.monotonic()
        yield
        self.started += time.monotonic() - paused


def memory_gib(device: torch.device) -> float | None:
    """The most memory that was in use, in GiB; None: this system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
