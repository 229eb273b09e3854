"""The options of `psidiff sample` and `psidiff replay`, as a person types them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .sampler_options import typed_options, with_sampler_options


@with_sampler_options
def sample(
    model: Annotated[
        str, typer.Argument(help="A name that ships, a folder, a .ckpt, a Hub id.")
    ],
    num: Annotated[int, typer.Option("--num", "-n", help="How many samples.", min=1)] = 4,
    *,
    prompt: Annotated[str | None, typer.Option(help="What the text begins with.")] = None,
    suffix: Annotated[str | None, typer.Option(help="What the text ends with.")] = None,
    infill: Annotated[
        str | None, typer.Option(help='A text with blanks: "Once {{8}} there was".')
    ] = None,
    given: Annotated[
        str | None,
        typer.Option(
            help="Clues of a puzzle, a picture with transparent pixels, or \\[ids, -1]."
        ),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The class, by number or name.")] = None,
    guidance_on: Annotated[
        str | None, typer.Option(help="What it acts on: x or posterior. \\[x]")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a sample. \\[the model's]")
    ] = None,
    overlap: Annotated[
        int | None, typer.Option(help="What a window sees of the one before. \\[half]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds, equal samples.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="A .txt, .jsonl or .png file, or a folder for shards.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Lines of JSON.")] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Do not cut at the end of a text.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="See the samples form.")] = False,
    replay: Annotated[
        Path | None, typer.Option(help="Write a page with a slider: out.html.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Record every step, for `psidiff replay`.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the folder's shards.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="With --out FOLDER: go past locks of another machine whose processes "
            "are gone for sure; needed only where the file system has no locks.",
        ),
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(help="At a time. \\[what fits]", min=1)
    ] = None,
    shard_size: Annotated[
        int | None, typer.Option(help="Samples in a shard. \\[256]", min=1)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")
    ] = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Slow to start, then fast: for many samples.")
    ] = False,
    **options: Any,
) -> None:
    """Sample from a model: text, images or puzzles, with prompts, blanks and labels.

    Many processes: torchrun --nproc-per-node 8 -m psidiff sample MODEL -n 50000 --out DIR
    The same command again, here or on another machine, shares the work of a folder.
    """
    from ..sampling import parse_guidance
    from .sample import Output, run

    guidance = options["guidance"]
    if guidance is not None:
        options["guidance"] = parse_guidance(guidance, guidance_on or "x")
    elif guidance_on is not None:
        raise ValueError("--guidance-on says what --guidance acts on: give that too")
    asked = {
        "num_samples": num,
        **typed_options({**options, "kappa": options["kappa"] or "auto"}),
        "prompt": prompt,
        "suffix": suffix,
        "infill": infill,
        "given": given,
        "labels": label,
        "length": length,
        "overlap": overlap,
        "seed": seed,
    }
    output = Output(
        out, as_json, whole, resume, force, batch_size, shard_size, watch, trace, replay
    )
    if not run(Console(stderr=True), model, device, dtype, compiled, asked, output):
        raise typer.Exit(130)


def replay(
    traces: Annotated[list[Path], typer.Argument(help="One or two files of `sample --trace`.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("replay.html"),
) -> None:
    """A page that plays a recorded run, or two side by side."""
    from .replay import show

    show(Console(), traces, out)
