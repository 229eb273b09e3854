"""What whoever starts the server decides."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..types import as_count


@dataclass(frozen=True)
class Settings:
    """Limits of the server, and who may ask.

    batch, queue         samples that run together, samples that wait
    deadline             seconds from a request's arrival to its end
    steps, most_steps    of a sampler: where a request says nothing, and at most
    length, samples      tokens of a sample with what is given; samples of a request
    body                 bytes of a request
    """

    name: str = "model"
    api_key: str | None = None
    batch: int = 64
    queue: int = 256
    deadline: float = 300.0
    steps: int = 128
    most_steps: int = 4096
    length: int = 4096
    samples: int = 16
    body: int = 2**20

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type == "int":
                as_count(each.name, getattr(self, each.name))
        if not self.deadline > 0:
            raise ValueError(f"deadline must be above 0 seconds, got {self.deadline:g}")
        if self.samples > self.queue:
            raise ValueError(
                f"a request may have {self.samples} samples, but the queue only has "
                f"{self.queue} places"
            )
        if self.steps > self.most_steps:
            raise ValueError(
                f"a request that does not say has {self.steps} steps, but this server allows "
                f"{self.most_steps} at most"
            )
        if self.api_key is not None:
            _check_key(self.api_key)


def _check_key(key: str) -> None:
    """Some header can carry it, as it is."""
    if not key.strip():
        raise ValueError("the API key is empty: set one, or none so that anybody may ask")
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError(
            "the API key has characters that no header can carry: it must be printable ASCII "
            "without spaces around it"
        )
