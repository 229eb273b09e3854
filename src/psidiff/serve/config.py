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
    windows              that a sample is made by, at most
    work                 steps x windows x samples x tokens of a window, of a request
    body, in_flight      bytes of a request; of all that are being read and understood
    connections          clients at a time
    stall                seconds for headers, for a body, and for reading 16 KiB of an answer
    hosts                names in a Host header that are answered besides the usual ones
    private_health, private_metrics   these paths want the key, too
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
    windows: int = 512
    work: int = 300_000_000
    body: int = 2**20
    in_flight: int = 2**26
    connections: int = 512
    stall: float = 30.0
    hosts: tuple[str, ...] = ()
    private_health: bool = False
    private_metrics: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type == "int":
                as_count(each.name, getattr(self, each.name))
        for name in ("deadline", "stall"):
            if not getattr(self, name) > 0:
                seconds = getattr(self, name)
                raise ValueError(f"{name} must be above 0 seconds, got {seconds:g}")
        if self.in_flight < self.body:
            raise ValueError(
                f"a request may have {self.body} bytes, but all of them together only "
                f"{self.in_flight}: raise --max-in-flight"
            )
        for private in ("private_health", "private_metrics"):
            if getattr(self, private) and self.api_key is None:
                option = private.replace("_", "-")
                raise ValueError(
                    f"--{option} asks for a key, and there is none: give --api-key"
                )
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
