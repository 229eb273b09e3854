"""The options of `psidiff serve`, as a person types them."""

from __future__ import annotations

import os
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any

from rich.console import Console

from .options import DEVICE, ModelName, as_flag, flag, option, with_options

_KEY = "PSIDIFF_API_KEY"


def _at_most(name: str, about: str, default: int) -> Parameter:
    return option(name, int, f"{about}, at most.", default, as_flag(f"max-{name}"), min=1)


@with_options(
    option("host", str, "The address to listen at; 0.0.0.0 is every one.", "127.0.0.1"),
    option("port", int, "0 takes one that is free.", 8000, min=0, max=65535),
    option("api_key", str, "What clients must know, as OpenAI's do.", envvar=_KEY),
    option("name", str, "What clients call the model. \\[its own name]"),
    option("batch", int, "Samples that run together.", 64, min=1),
    option("queue", int, "Samples that may wait; after that 429.", 256, min=1),
    option("deadline", float, "Seconds that a request may take.", 300.0),
    option("steps", int, "Steps of a request that does not say. \\[128, if allowed]", min=1),
    option("most_steps", int, "Steps, at most.", 4096, "--max-steps", min=1),
    _at_most("length", "Tokens of a sample", 4096),
    _at_most("samples", "Samples of a request", 16),
    _at_most("windows", "Windows of a sample", 512),
    _at_most("work", "Steps x windows x samples x their tokens", 300_000_000),
    _at_most("body", "Bytes of a request", 2**20),
    _at_most("in_flight", "Bytes of all requests that are being read", 2**26),
    _at_most("connections", "Clients at a time", 512),
    option(
        "stall",
        float,
        "Seconds for headers, for a body, for reading 16 KiB of an answer.",
        30.0,
    ),
    option(
        "hosts",
        list[str],
        "A name that clients may call this server by; may be repeated.",
        None,
        "--allow-host",
    ),
    flag("private_health", "/health wants the key, too."),
    flag("private_metrics", "/metrics wants the key, too."),
    DEVICE,
    option("dtype", str, "auto, float32 or bfloat16.", "auto"),
)
def serve(model: ModelName, **options: Any) -> None:
    """Serve a model: OpenAI's API under /v1, and a page to play with at /.

    Requests of different lengths and step counts share their steps.
    """
    try:
        from ..serve.config import Settings
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
