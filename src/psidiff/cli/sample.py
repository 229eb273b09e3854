"""`psidiff sample`: samples as text, a picture, lines of JSON, or the shards of a large set."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..conditioning import check_ids, token_ids
from ..data.images import grid, write_png
from ..data.pictures import picture
from ..experiment.report.formatting import counted
from ..experiment.sample_files import as_lines
from ..experiment.sample_shards import SHARD_SIZE, ShardedRun
from ..files import write_whole
from ..generate import BatchSize, batch_that_fits, generate, under_torchrun
from ..generated import verdicts
from ..html.replay import write_page
from ..limits import parse_json, read_bytes
from ..model import Decoded, Model, load
from ..request import Request, about_trace, request_of
from ..sampling import Trace
from ..sampling.loop import OnStep
from .bar import place, progress, steps_of
from .live_view import Watch
from .terminal import print_text, say

_FILES = (".png", ".jsonl", ".txt")


@dataclass(frozen=True)
class Output:
    """Where samples go, and what else is left of the run."""

    out: Path | None = None
    as_json: bool = False
    whole: bool = False
    resume: bool = False
    force: bool = False
    batch_size: int | None = None
    shard_size: int | None = None
    watch: bool = False
    trace: Path | None = None
    replay: Path | None = None

    @property
    def folder(self) -> bool:
        """Whether the samples become shards in a folder."""
        return self.out is not None and self.out.suffix not in _FILES


def run(
    console: Console,
    name: str,
    device: str,
    dtype: str,
    compiled: bool,
    asked: dict[str, Any],
    output: Output,
) -> bool:
    """Sample, show and write; False if the user stopped it."""
    _check(output)
    model = load(name, device, dtype)
    if compiled:
        say(console, "compiling: the first steps take half a minute or more", style="dim")
        model.compile()
    request = _request(model, asked)
    _check_kind(model, output)
    if request.sampler.confident:
        say(
            console,
            "confident decoding looks at values: it does not keep the marginals of the process",
            style="dim",
        )
    if output.folder:
        assert output.out is not None
        words = {"model": name, **asked, "whole": output.whole}
        size = SHARD_SIZE if output.shard_size is None else output.shard_size

        def notify(said: object) -> None:
            say(console, said, style="yellow" if isinstance(said, Exception) else "")

        shards = ShardedRun(model, request, output.out, words, size, notify, output.force)
        with progress(console, request) as advance:
            return shards.run(output.resume, output.batch_size, output.whole, advance)
    if under_torchrun():
        raise ValueError("under torchrun the samples go into a folder: name one with --out")
    for path in (output.out, output.trace, output.replay):
        if path is not None:  # a folder that cannot be made is said before the work
            path.parent.mkdir(parents=True, exist_ok=True)
    return _few(console, name, model, request, output)


def _few(console: Console, name: str, model: Model, request: Request, output: Output) -> bool:
    """Samples that are shown: batch after batch, what is finished even after Ctrl-C."""
    size = output.batch_size or batch_that_fits(model, request)
    fits = BatchSize(size)
    recorded = output.trace is not None or output.replay is not None
    made: list[Decoded] = []
    begun, finished = time.perf_counter(), True
    try:
        with _listener(console, model, request, output) as on_step:
            for first in range(0, request.num_samples, size):
                count = min(size, request.num_samples - first)
                part = generate(
                    model,
                    request,
                    first,
                    count,
                    batch_size=fits,
                    record=recorded,
                    on_step=on_step,
                    notify=lambda said: say(console, said),
                )
                made.append(Decoded(**vars(part), codec=model.codec, whole=output.whole))
    except KeyboardInterrupt:
        finished = False
    if made:
        _write(console, name, request, made, output)
        _leave_traces(console, model, request, made, output)
        _say_valid(console, request, made)
        _say(console, request, made, time.perf_counter() - begun)
    if not finished:
        count = sum(len(part.tokens) for part in made)
        asked = counted(request.num_samples, "sample")
        say(console, f"stopped: {count} of {asked} finished")
    return finished


def _write(
    console: Console, name: str, request: Request, made: list[Decoded], output: Output
) -> None:
    """Standard output, or the one file that was named."""
    codec, out = made[0].codec, output.out
    as_json = output.as_json or (out is not None and out.suffix == ".jsonl")
    if codec is not None and codec.kind == "image" and not as_json:
        path = out or Path("out") / f"{Path(name).stem}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        images = [image for part in made for image in part.images]
        scale, lost = max(1, 64 // codec.height), _lost(path)
        write_png(grid(images, min(len(images), 10), scale, gap=2 + scale), path)
        say(console, f"{counted(len(images), 'image')}: ", (path, "bold"), lost)
        return
    lines = _records(name, request, made) if as_json else _texts(request, made)
    if out is None:
        print_text(lines.decode().removesuffix("\n"))
    else:
        lost, count = _lost(out), sum(len(part.tokens) for part in made)
        write_whole(out, lines)
        say(console, f"{counted(count, 'sample')}: ", (out, "bold"), lost)


def _lost(path: Path) -> str:
    """Whether a file is lost by writing one."""
    return ", in place of the file that was there" if path.exists() else ""


def _texts(request: Request, made: list[Decoded]) -> bytes:
    """Samples one below the other. Half a surrogate pair is written as its escape."""
    lines = []
    for index, text in enumerate(text for part in made for text in _readable(part)):
        if request.num_samples > 1:
            lines.append(f"----- {index} " + "-" * 40)
        lines.append(text)
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")


def _records(name: str, request: Request, made: list[Decoded]) -> bytes:
    """Samples as lines of JSON, with what they cost."""
    records: list[dict[str, Any]] = []
    for part in made:
        each = zip(part.tokens.tolist(), _readable(part), verdicts(part), strict=True)
        for row, text, right in each:
            record = {
                "index": len(records),
                "text": text,
                "tokens": row,
                **right,
                **_label(request, len(records)),
                "model": name,
                "sampler": str(request.sampler),
                "seed": request.seed,
                "nfe": part.nfe,
                "seconds": round(part.seconds / len(part.tokens), 4),
            }
            records.append(record)
    return as_lines(records)


def _label(request: Request, index: int) -> dict[str, int]:
    return {} if request.labels is None else {"label": int(request.labels[index])}


def _readable(part: Decoded) -> list[Any]:
    """Text where the codec knows it, else the token numbers."""
    if part.codec is None or part.codec.kind == "image":
        return [" ".join(map(str, row)) for row in part.tokens.tolist()]
    return part.text


def _leave_traces(
    console: Console, model: Model, request: Request, made: list[Decoded], output: Output
) -> None:
    traces = [part.trace for part in made if part.trace is not None]
    if not traces:
        return
    trace = Trace.join(traces, about_trace(model, _finished(request, made)))
    for path, write in ((output.trace, trace.save), (output.replay, _page_of(trace))):
        if path is not None:
            write(path)
            say(console, "step by step: ", (path, "bold"))


def _finished(request: Request, made: list[Decoded]) -> Request:
    """The request of what was finished."""
    count = sum(len(part.tokens) for part in made)
    labels = None if request.labels is None else request.labels[:count]
    given = request.given
    if given is not None and len(given) > 1:
        given = given[:count]
    return replace(request, num_samples=count, labels=labels, given=given)


def _page_of(trace: Trace) -> Callable[[Path], None]:
    return lambda path: write_page([trace], path)


def _say(console: Console, request: Request, made: list[Decoded], seconds: float) -> None:
    count = sum(len(part.tokens) for part in made)
    nfe = sum(part.nfe * len(part.tokens) for part in made) / count
    rows = sum(part.head_rows for part in made) / (count * request.length)
    speed = f" ({count * request.length / seconds:,.0f} tokens/s)" if seconds > 0 else ""
    say(
        console,
        f"{count} x {request.length} tokens in {seconds:.1f} s{speed}: "
        f"{nfe:.1f} passes a sample, {rows:.1f} head rows a token; {request.sampler}; "
        f"seed {request.seed}",
        style="dim",
    )


def _say_valid(console: Console, request: Request, made: list[Decoded]) -> None:
    """Of puzzles, how many came out right; given cells never change."""
    judged = [each["valid"] for part in made for each in verdicts(part) if each]
    if judged:
        grids = counted(len(judged), "grid")
        clues = "" if request.given is None else ", every clue kept"
        say(console, f"{sum(judged)} of {grids} valid{clues}")


@contextmanager
def _listener(
    console: Console, model: Model, request: Request, output: Output
) -> Iterator[OnStep | None]:
    """The samples as they form, or a bar."""
    if output.watch and model.codec is not None:
        given = request.rows(0, min(request.num_samples, 4))
        known = None if given is None else given >= 0
        here, total = partial(place, request=request), steps_of(request)
        with Watch(console, model.codec, total=total, given=known, place=here) as watch:
            yield watch
    else:
        with progress(console, request) as advance:
            yield advance


def _request(model: Model, asked: dict[str, Any]) -> Request:
    """The user's words, `given` among them, as a request."""
    asked = {name: value for name, value in asked.items() if value is not None}
    if model.prior is None and "num_steps" in asked:
        raise ValueError("an autoregressive model takes a step a token: leave --steps out")
    given = asked.pop("given", None)
    if given is not None:
        if "infill" in asked:
            raise ValueError("give a template or --given, not both")
        asked["infill"] = _given(model, given)
    return request_of(model, **asked)


def _given(model: Model, text: str) -> Any:
    """Clues of a puzzle, a picture with transparent pixels, or a list of ids with -1."""
    if text.lstrip().startswith("["):
        ids = token_ids("--given", parse_json(text, "--given"))
        check_ids(model, "--given", ids)
        return ids
    kind = None if model.codec is None else model.codec.kind
    if kind == "puzzle":
        return text
    if kind != "image":
        raise ValueError(
            "--given is for puzzles, images, or a list of token ids; text takes --prompt, "
            "--suffix or --infill"
        )
    return _picture(text, model.codec.channels)


def _picture(path: str, channels: int) -> np.ndarray:
    """A picture with transparent pixels, (H, W, 2) or (H, W, 4)."""
    if not Path(path).exists():
        raise ValueError(f"--given: there is no picture {path}")
    with picture(read_bytes(path), path) as opened:
        return np.asarray(opened.convert("LA" if channels == 1 else "RGBA"))


def _check(output: Output) -> None:
    if output.resume and not output.folder:
        raise ValueError("--resume goes on with a folder of shards: name it with --out")
    if output.force and not output.folder:
        raise ValueError("--force is of a folder of shards: name it with --out")
    if output.shard_size is not None and not output.folder:
        raise ValueError("--shard-size is of a folder of shards: name it with --out")
    if output.folder:
        assert output.out is not None
        if output.out.suffix[1:2].isalpha() and not output.out.is_dir():
            raise ValueError(
                f"--out takes a .txt, .jsonl or .png file or a folder, got {output.out}"
            )
        for name in ("watch", "trace", "replay", "as_json"):
            if getattr(output, name):
                word = name.replace("as_", "")
                raise ValueError(f"--{word} is for samples that are shown, not for a folder")


def _check_kind(model: Model, output: Output) -> None:
    kind = None if model.codec is None else model.codec.kind
    if output.out is not None and output.out.suffix == ".png" and kind != "image":
        raise ValueError("a .png is for images, which this model does not make")
    if output.as_json and output.out is not None:
        raise ValueError("--json goes to standard output; a file is JSON if it ends in .jsonl")
    if output.out is not None and output.out.suffix == ".txt" and kind == "image":
        raise ValueError("this model makes images: name a .png, a .jsonl or a folder")
    if output.watch and kind is None:
        print("psidiff: this model has no codec, so there is nothing to watch", file=sys.stderr)
