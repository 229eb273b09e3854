"""What whoever starts the server decides, and how it is typed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _typed(default: Any, about: str, *flags: str, typed: tuple[Any, Any] | None = None) -> Any:
    """A setting that is an option of `psidiff serve`; typed: its kind and default there."""
    kind, shown = typed or (type(default), default)
    return field(default=default, metadata={"option": (kind, about, shown, *flags)})


def _at_most(name: str, about: str, default: int) -> Any:
    return _typed(default, f"{about}, at most.", f"--max-{name}")


@dataclass(frozen=True)
class Settings:
    """Limits of the server, and who may ask.

    Steps and lengths are of a sampler and of a sample with what is given. `in_flight` counts
    the bytes of all requests that are being read and understood. `hosts` are names in a Host
    header that are answered besides the usual ones.
    """

    name: str = "model"
    api_key: str | None = None
    batch: int = _typed(64, "Samples that run together.")
    queue: int = _typed(256, "Samples that may wait; after that 429.")
    deadline: float = _typed(300.0, "Seconds that a request may take.")
    steps: int = _typed(
        128, "Steps of a request that does not say. \\[128, if allowed]", typed=(int, None)
    )
    most_steps: int = _at_most("steps", "Steps", 4096)
    length: int = _at_most("length", "Tokens of a sample", 4096)
    samples: int = _at_most("samples", "Samples of a request", 16)
    windows: int = _at_most("windows", "Windows of a sample", 512)
    work: int = _at_most("work", "Steps x windows x samples x their tokens", 300_000_000)
    body: int = _at_most("body", "Bytes of a request", 2**20)
    in_flight: int = _at_most("in-flight", "Bytes of all requests that are being read", 2**26)
    connections: int = _at_most("connections", "Clients at a time", 512)
    stall: float = _typed(
        30.0, "Seconds for headers, for a body, for reading 16 KiB of an answer."
    )
    hosts: tuple[str, ...] = _typed(
        (),
        "A name that clients may call this server by; may be repeated.",
        "--allow-host",
        typed=(list[str], None),
    )
    private_health: bool = _typed(False, "/health wants the key, too.")
    private_metrics: bool = _typed(False, "/metrics wants the key, too.")

    def __post_init__(self) -> None:
        from ..types import as_count  # the command line is read without torch

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
