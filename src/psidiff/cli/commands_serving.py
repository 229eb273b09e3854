"""The options of `psidiff serve`, as a person types them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any

from rich.console import Console

from ..serve.config import Settings
from .options import DEVICE, ModelName, option, with_options

_KEY = "PSIDIFF_API_KEY"


def _options() -> Iterator[Parameter]:
    """The settings of a server that are typed as they are."""
    for each in fields(Settings):
        if typed := each.metadata.get("option"):
            least: dict[str, Any] = {"min": 1} if typed[0] is int else {}
            yield option(each.name, *typed, **least)


@with_options(
    option("host", str, "The address to listen at; 0.0.0.0 is every one.", "127.0.0.1"),
    option("port", int, "0 takes one that is free.", 8000, min=0, max=65535),
    option("api_key", str, "What clients must know, as OpenAI's do.", envvar=_KEY),
    option("name", str, "What clients call the model. \\[its own name]"),
    *_options(),
    DEVICE,
    option("dtype", str, "auto, float32 or bfloat16.", "auto"),
)
def serve(model: ModelName, **options: Any) -> None:
    """Serve a model: OpenAI's API under /v1, and a page to play with at /.

    Requests of different lengths and step counts share their steps.
    """
    try:
        from ..serve.server import run
    except ImportError as error:
        raise ValueError(
            f"the server needs {error.name}: pip install 'psidiff[serve]'"
        ) from error
    from ..model import load

    host, port, device, dtype = map(options.pop, ("host", "port", "device", "dtype"))
    loaded = load(model, device, dtype)
    name = options["name"] or _name_of(model, loaded.config.name)
    if options["api_key"] is None:  # so it is where the variable is set but empty
        options["api_key"] = os.environ.get(_KEY)
    if options["steps"] is None:
        options["steps"] = min(128, options["most_steps"])
    options |= {
        "name": name,
        "samples": min(options["samples"], options["queue"]),
        "in_flight": max(options["in_flight"], options["body"]),
        "hosts": tuple(options["hosts"] or ()),
    }
    run(loaded, Settings(**options), host, port, partial(_print_address, name))


def _print_address(name: str, url: str, is_open: bool) -> None:
    """Where the server listens, once it does."""
    console = Console(stderr=True)
    console.print(f"{name}: [bold]{url}/[/] (a page)", highlight=False)
    console.print(f"OpenAI's API: [bold]{url}/v1[/]; Ctrl-C ends it", highlight=False)
    if is_open:
        console.print("anybody who reaches this address may ask: --api-key sets a key")


def _name_of(model: str, own: str | None) -> str:
    """What was typed, where that is a name; of a file or folder the name inside."""
    path = Path(model)
    return str(own or path.stem) if path.exists() else model
