"""`psidiff sample`: samples as text, a picture, lines of JSON, or the shards of a large set."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..data.image_files import open_picture
from ..data.images import Pixels, grid, write_png
from ..data.puzzle import Puzzle
from ..experiment.report.formatting import pluralize
from ..experiment.sample_files import as_lines
from ..experiment.sample_shards import SHARD_SIZE, ShardedRun
from ..files import write_atomic
from ..generate import (
    BatchSize,
    generate,
    join_batches,
    largest_batch_size,
    under_torchrun,
    validity_flags,
)
from ..html.replay import write_page
from ..limits import parse_json, read_bytes
from ..model import Decoded, Model, load
from ..registry import import_named
from ..request import Request, build_request, check_ids, token_ids, trace_metadata
from ..sampling import OPTIONS, parse_guidance
from ..sampling.loop import OnStep
from .live_view import LiveView
from .options import as_flag
from .progress import place, step_bar
from .terminal import print_text, say

_FILES = (".png", ".jsonl", ".txt")
_OF_FOLDERS = {"resume": "goes on with", "force": "is of", "shard_size": "is of"}


@dataclass(frozen=True)
class Outputs:
    """Where samples go, and what else is left of the run."""

    out: Path | None
    json: bool
    whole: bool
    resume: bool
    force: bool
    batch_size: int | None
    shard_size: int | None
    watch: bool
    trace: Path | None
    replay: Path | None

    @property
    def folder(self) -> Path | None:
        """Where the samples become shards, if they do."""
        return self.out if self.out and self.out.suffix not in _FILES else None


def run(console: Console, name: str, options: dict[str, Any]) -> bool:
    """Sample, show and write; False if the user stopped it."""
    device, dtype, compiled = map(options.pop, ("device", "dtype", "compiled"))
    output = Outputs(**{each.name: options.pop(each.name) for each in fields(Outputs)})
    arguments = _arguments(options)
    _check(output)
    model = load(name, device, dtype)
    if compiled:
        say(console, "compiling: the first steps take half a minute or more", style="dim")
        model.compile()
    request = _request(model, arguments)
    _check_kind(model, output)
    if request.sampler.confident:
        say(
            console,
            "confident decoding looks at values: it does not keep the marginals of the process",
            style="dim",
        )
    if output.folder is not None:
        words = {"model": name, **arguments, "whole": output.whole}
        size = SHARD_SIZE if output.shard_size is None else output.shard_size

        def notify(message: object) -> None:
            say(console, message, style="yellow" if isinstance(message, Exception) else "")

        shards = ShardedRun(model, request, output.folder, words, size, notify, output.force)
        with step_bar(console, request) as advance:
            return shards.run(output.resume, output.batch_size, output.whole, advance)
    if under_torchrun():
        raise ValueError("under torchrun the samples go into a folder: name one with --out")
    for path in (output.out, output.trace, output.replay):
        if path is not None:  # a folder that cannot be made is said before the work
            path.parent.mkdir(parents=True, exist_ok=True)
    return _few(console, name, model, request, output)


def _few(console: Console, name: str, model: Model, request: Request, output: Outputs) -> bool:
    """Samples that are shown: batch after batch, what is finished even after Ctrl-C."""
    size = output.batch_size or largest_batch_size(model, request)
    fits = BatchSize(size)
    parts: list[Decoded] = []
    begun, finished = time.perf_counter(), True
    try:
        with _listener(console, model, request, output) as on_step:
            for first in range(0, request.num_samples, size):
                part = generate(
                    model,
                    request,
                    first,
                    min(size, request.num_samples - first),
                    batch_size=fits,
                    record=output.trace is not None or output.replay is not None,
                    on_step=on_step,
                    notify=partial(say, console),
                )
                parts.append(part)
    except KeyboardInterrupt:
        finished = False
    if parts:
        joined = join_batches(parts, sum(part.seconds for part in parts))
        samples = replace(joined, codec=model.codec, whole=output.whole)
        _write(console, name, request, samples, parts, output)
        _leave_trace(console, model, request, samples, output)
        _say_valid(console, request, samples)
        _say_cost(console, request, samples, time.perf_counter() - begun)
    if not finished:
        count = sum(len(part.tokens) for part in parts)
        wanted = pluralize(request.num_samples, "sample")
        say(console, f"stopped: {count} of {wanted} finished")
    return finished


def _write(
    console: Console,
    name: str,
    request: Request,
    samples: Decoded,
    parts: Sequence[Decoded],
    output: Outputs,
) -> None:
    """Standard output, or the one file that was named."""
    as_json = output.json or (output.out is not None and output.out.suffix == ".jsonl")
    is_image = samples.codec is not None and samples.codec.kind == "image" and not as_json
    if not is_image:
        records = _records(name, request, samples, parts)
        lines = as_lines(records) if as_json else _texts(request, samples)
        if output.out is None:
            print_text(lines.decode().removesuffix("\n"))
            return
    path = output.out or Path("out") / f"{Path(name).stem}.png"
    lost = ", in place of the file that was there" if path.exists() else ""
    if is_image:
        path.parent.mkdir(parents=True, exist_ok=True)
        images = samples.images
        scale = max(1, 64 // len(images[0]))
        write_png(grid(images, min(len(images), 10), scale, gap=2 + scale), path)
    else:
        write_atomic(path, lines)
    what = pluralize(len(samples.tokens), "image" if is_image else "sample")
    say(console, f"{what}: ", (path, "bold"), lost)


def _texts(request: Request, samples: Decoded) -> bytes:
    """Samples one below the other. Half a surrogate pair is written as its escape."""
    lines = []
    for index, text in enumerate(_readable(samples)):
        if request.num_samples > 1:
            lines.append(f"----- {index} " + "-" * 40)
        lines.append(text)
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")


def _records(
    name: str, request: Request, samples: Decoded, parts: Sequence[Decoded]
) -> Iterator[dict[str, Any]]:
    """Samples as lines of JSON, with what they cost."""
    costs = [(part.nfe, part.seconds / len(part.tokens)) for part in parts for _ in part.tokens]
    rows, texts = samples.tokens.tolist(), _readable(samples)
    each = zip(rows, texts, validity_flags(samples), costs, strict=True)
    for index, (row, text, right, (nfe, seconds)) in enumerate(each):
        label = {} if request.labels is None else {"label": int(request.labels[index])}
        yield {
            "index": index,
            "text": text,
            "tokens": row,
            **right,
            **label,
            "model": name,
            "sampler": str(request.sampler),
            "seed": request.seed,
            "nfe": nfe,
            "seconds": round(seconds, 4),
        }


def _readable(samples: Decoded) -> list[Any]:
    """Text where the codec knows it, else the token numbers."""
    if samples.codec is None or samples.codec.kind == "image":
        return [" ".join(map(str, row)) for row in samples.tokens.tolist()]
    return samples.text


def _leave_trace(
    console: Console, model: Model, request: Request, samples: Decoded, output: Outputs
) -> None:
    """The recorded steps in a file, on a page, or both; of what was finished."""
    if samples.trace is None:
        return
    count = len(samples.tokens)
    labels = None if request.labels is None else request.labels[:count]
    given = None if request.given is None else request.given[:count]
    finished = replace(request, num_samples=count, labels=labels, given=given)
    samples.trace.about = trace_metadata(model, finished)
    for path, write in (
        (output.trace, samples.trace.save),
        (output.replay, partial(write_page, [samples.trace])),
    ):
        if path is not None:
            write(path)
            say(console, "step by step: ", (path, "bold"))


def _say_cost(console: Console, request: Request, samples: Decoded, seconds: float) -> None:
    count = len(samples.tokens)
    rows = samples.head_rows / (count * request.length)
    speed = f" ({count * request.length / seconds:,.0f} tokens/s)" if seconds > 0 else ""
    say(
        console,
        f"{count} x {request.length} tokens in {seconds:.1f} s{speed}: "
        f"{samples.nfe:.1f} passes a sample, {rows:.1f} head rows a token; {request.sampler}; "
        f"seed {request.seed}",
        style="dim",
    )


def _say_valid(console: Console, request: Request, samples: Decoded) -> None:
    """Of puzzles, how many came out right; given cells never change."""
    if isinstance(samples.codec, Puzzle):
        judged = [each["valid"] for each in validity_flags(samples)]
        clues = "" if request.given is None else ", every clue kept"
        say(console, f"{sum(judged)} of {pluralize(len(judged), 'puzzle')} valid{clues}")


def _listener(
    console: Console, model: Model, request: Request, output: Outputs
) -> AbstractContextManager[OnStep]:
    """The samples as they form, or a bar."""
    if not output.watch or model.codec is None:
        return step_bar(console, request)
    given = request.given
    known = None if given is None else given.expand(request.num_samples, -1)[:4] >= 0
    where, total = partial(place, request=request), request.total_steps
    return LiveView(console, model.codec, total=total, given=known, place=where)


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    """What was typed, as `Model.sample` calls it; files that the sampler names are imported."""
    guidance, guidance_on = options["guidance"], options.pop("guidance_on")
    if guidance is not None:
        options["guidance"] = parse_guidance(guidance, guidance_on or "x")
    elif guidance_on is not None:
        raise ValueError("--guidance-on says what --guidance acts on: give that too")
    typed = [options[name] for name in (*OPTIONS, "preset", "sampler")]
    import_named(*(value for value in typed if isinstance(value, str)))
    options["kappa"] = options["kappa"] or "auto"
    return {"num_steps" if name == "steps" else name: v for name, v in options.items()}


def _request(model: Model, arguments: dict[str, Any]) -> Request:
    """The user's words, `given` among them, as a request."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if model.prior is None and "num_steps" in arguments:
        raise ValueError("an autoregressive model takes a step a token: leave --steps out")
    given = arguments.pop("given", None)
    if given is not None:
        if "infill" in arguments:
            raise ValueError("give a template or --given, not both")
        arguments["infill"] = _given(model, given)
    return build_request(model, **arguments)


def _given(model: Model, text: str) -> Any:
    """Clues of a puzzle, a picture with transparent pixels, or a list of ids with -1."""
    if text.lstrip().startswith("["):
        ids = token_ids("--given", parse_json(text, "--given"))
        check_ids(model, "--given", ids)
        return ids
    if model.codec is not None and model.codec.kind == "puzzle":
        return text
    if not isinstance(model.codec, Pixels):
        raise ValueError(
            "--given is for puzzles, images, or a list of token ids; text takes --prompt, "
            "--suffix or --infill"
        )
    if not Path(text).exists():
        raise ValueError(f"--given: there is no picture {text}")
    with open_picture(read_bytes(text), text) as opened:  # (H, W, 2) or (H, W, 4)
        return np.asarray(opened.convert("LA" if model.codec.channels == 1 else "RGBA"))


def _check(output: Outputs) -> None:
    """Options of a folder of shards without one, and the other way round."""
    folder = output.folder
    for name, does in _OF_FOLDERS.items():
        if getattr(output, name) and folder is None:
            raise ValueError(f"{as_flag(name)} {does} a folder of shards: name it with --out")
    if folder is None:
        return
    if folder.suffix[1:2].isalpha() and not folder.is_dir():
        raise ValueError(f"--out takes a .txt, .jsonl or .png file or a folder, got {folder}")
    for name in ("watch", "trace", "replay", "json"):
        if getattr(output, name):
            raise ValueError(f"{as_flag(name)} is for samples that are shown, not for a folder")


def _check_kind(model: Model, output: Outputs) -> None:
    """Files and options that are not for what the model makes."""
    kind = None if model.codec is None else model.codec.kind
    suffix = None if output.out is None else output.out.suffix
    if suffix == ".png" and kind != "image":
        raise ValueError("a .png is for images, which this model does not make")
    if output.json and output.out is not None:
        raise ValueError("--json goes to standard output; a file is JSON if it ends in .jsonl")
    if suffix == ".txt" and kind == "image":
        raise ValueError("this model makes images: name a .png, a .jsonl or a folder")
    if output.watch and kind is None:
        print("psidiff: this model has no codec, so there is nothing to watch", file=sys.stderr)
