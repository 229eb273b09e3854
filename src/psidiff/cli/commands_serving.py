"""The options of `psidiff serve`, as a person types them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

_KEY = "PSIDIFF_API_KEY"


def serve(
    model: Annotated[
        str, typer.Argument(help="A name that ships, a folder, a .ckpt, a Hub id.")
    ],
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 is every one.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="0 takes one that is free.", min=0, max=65535)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="What clients must know, as OpenAI's do.", envvar=_KEY),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model. \\[its own name]")
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples that run together.", min=1)] = 64,
    queue: Annotated[
        int, typer.Option(help="Samples that may wait; after that 429.", min=1)
    ] = 256,
    deadline: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 300.0,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of a request that does not say. \\[128, if allowed]", min=1),
    ] = None,
    max_steps: Annotated[int, typer.Option(help="Steps, at most.", min=1)] = 4096,
    max_length: Annotated[int, typer.Option(help="Tokens of a sample, at most.", min=1)] = 4096,
    max_samples: Annotated[
        int, typer.Option(help="Samples of a request, at most.", min=1)
    ] = 16,
    max_windows: Annotated[
        int, typer.Option(help="Windows of a sample, at most.", min=1)
    ] = 512,
    max_work: Annotated[
        int,
        typer.Option(help="Steps x windows x samples x their tokens, at most.", min=1),
    ] = 300_000_000,
    max_body: Annotated[int, typer.Option(help="Bytes of a request, at most.", min=1)] = 2**20,
    max_in_flight: Annotated[
        int, typer.Option(help="Bytes of all requests that are being read, at most.", min=1)
    ] = 2**26,
    max_connections: Annotated[
        int, typer.Option(help="Clients at a time, at most.", min=1)
    ] = 512,
    stall: Annotated[
        float,
        typer.Option(help="Seconds for headers, for a body, for reading 16 KiB of an answer."),
    ] = 30.0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that clients may call this server by; may be repeated."),
    ] = None,
    private_health: Annotated[
        bool, typer.Option("--private-health", help="/health wants the key, too.")
    ] = False,
    private_metrics: Annotated[
        bool, typer.Option("--private-metrics", help="/metrics wants the key, too.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
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

    loaded = load(model, device, dtype)
    if api_key is None:  # a variable that is set but empty: the option is not told of it
        api_key = os.environ.get(_KEY)
    called = name or _name_of(model, loaded.config.name)
    settings = Settings(
        name=called,
        api_key=api_key,
        batch=batch,
        queue=queue,
        deadline=deadline,
        steps=min(128, max_steps) if steps is None else steps,
        most_steps=max_steps,
        length=max_length,
        samples=min(max_samples, queue),
        windows=max_windows,
        work=max_work,
        body=max_body,
        in_flight=max(max_in_flight, max_body),
        connections=max_connections,
        stall=stall,
        hosts=tuple(allow_host or ()),
        private_health=private_health,
        private_metrics=private_metrics,
    )
    run(loaded, settings, host, port, partial(_print_address, called))


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
