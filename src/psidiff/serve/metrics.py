"""Counters of the server, in Prometheus' text format."""

from __future__ import annotations

import threading
from collections import defaultdict

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ABOUT = {
    "requests_total": ("counter", "Requests answered, by path and status."),
    "samples_total": ("counter", "Samples that left the engine, by how."),
    "tokens_total": ("counter", "Tokens of finished samples."),
    "ticks_total": ("counter", "Steps of the engine, each of all running samples."),
    "sample_steps_total": ("counter", "Steps of samples."),
    "passes_total": ("counter", "Sequences through the network, for finished samples."),
    "samples_running": ("gauge", "Samples in the engine."),
    "samples_waiting": ("gauge", "Samples in the queue."),
    "wait_seconds": ("histogram", "Time a sample waited for a place."),
    "sample_seconds": ("histogram", "Time from the queue to the end of a sample."),
}


class Metrics:
    """Numbers that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], float] = defaultdict(float)

    def count(self, name: str, by: int = 1, **labels: str) -> None:
        with self._lock:
            self._counts[name, _labels(labels)] += by

    def observe(self, name: str, seconds: float) -> None:
        """Into a histogram."""
        with self._lock:
            for most in _BUCKETS:
                self._counts[f"{name}_bucket", _labels({"le": f"{most:g}"})] += seconds <= most
            self._counts[f"{name}_bucket", _labels({"le": "+Inf"})] += 1
            self._counts[f"{name}_sum", ""] += seconds
            self._counts[f"{name}_count", ""] += 1

    def value(self, name: str, **labels: str) -> float:
        with self._lock:
            return self._counts[name, _labels(labels)]

    def text(self, **gauges: int) -> str:
        """All of them and these, each with its kind and what it means."""
        with self._lock:
            counts = dict(self._counts)
        counts |= {(name, ""): value for name, value in gauges.items()}
        lines = []
        for name, (kind, about) in _ABOUT.items():
            lines += [f"# HELP psidiff_{name} {about}", f"# TYPE psidiff_{name} {kind}"]
            family = (name, f"{name}_bucket", f"{name}_sum", f"{name}_count")
            lines += [
                f"psidiff_{each}{labels} {value:.15g}"
                for (each, labels), value in counts.items()
                if each in family
            ]
        return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    words = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{{{words}}}" if words else ""
