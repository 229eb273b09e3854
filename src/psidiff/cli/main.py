"""`psidiff VERB`: what a person types. Every mistake is one sentence and exit code 2."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from .commands_measuring import compare, evaluate
from .commands_serving import serve
from .failures import exit_message
from .options import (
    DEVICE,
    DTYPE,
    SAMPLER,
    SEED,
    ModelName,
    as_flag,
    flag,
    option,
    with_options,
)
from .terminal import print_text, say


def _bare_flags(base: Any) -> Any:
    """A class of commands whose flags are shown without <bool>, which invites `--json true`."""

    class Command(base):
        def get_params(self, ctx: Any) -> list[Any]:
            params = list(super().get_params(ctx))
            for param in params:
                if getattr(param, "is_flag", False):
                    param.metavar = ""
            return params

    return Command


app = typer.Typer(
    name="psidiff",
    cls=_bare_flags(TyperGroup),
    help="Discrete diffusion with any noise prior, sampled exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
verb = partial(app.command, cls=_bare_flags(TyperCommand))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"psidiff {__version__}")
        raise typer.Exit


@app.callback()
@with_options(
    flag("version", "Print the version.", callback=_print_version, is_eager=True),
    option(
        "imported",
        list[Path],
        "Import a Python file of yours, so that models and options may name what it "
        "defines as FILE.py:NAME; may be repeated.",
        None,
        "--import",
        metavar="FILE.py",
    ),
)
def psidiff(*, imported: list[Path] | None, **options: Any) -> None:
    """Discrete diffusion with any noise prior, sampled exactly."""
    if imported:
        from ..registry import import_file

        for path in imported:
            import_file(path)


@verb()
@with_options(
    option("out", Path, "Where the page goes.", Path("out/demo")),
    option(
        "steps", int, "Steps for 50 puzzles; the first one gets 4 times as many.", 64, min=8
    ),
    option(
        "kappa",
        str,
        "The rule beside ancestral: cap:.05, constant:.5@.1-.6, fb, ...",
        "constant:0@.05-.8",
    ),
    SEED,
)
def demo(*, out: Path, steps: int, kappa: str, seed: int) -> None:
    """Puzzles, prose and digits in a few minutes: ancestral sampling beside a Psi-sampler."""
    from ..registry import import_named
    from .demo import run

    import_named(kappa)
    run(Console(), out, steps, kappa, seed)


@verb()
@with_options(
    option("out", Path, "The run folder. \\[runs/RECIPE]"),
    flag("resume", "Go on where the folder's run was."),
    DEVICE,
    flag(
        "skip_damaged",
        "With --resume: the last checkpoint and the lines of the log that are whole.",
    ),
    flag("data_changed", "With --resume: go on though the data are others."),
    flag(
        "force",
        "Take the folder from a process of another machine that is gone for sure; needed only "
        "where the file system has no locks.",
    ),
    flag("show", "Print every key of the recipe, and stop."),
)
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A shipped recipe, or a .yaml file of yours.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as train.steps=1000.")
    ] = None,
    **options: Any,
) -> None:
    """Train a model by a recipe; without one, list the recipes.

    Many processes: torchrun --nproc-per-node 8 -m psidiff train RECIPE
    """
    from ..experiment.recipe_files import as_yaml, read_recipe, shipped
    from ..registry import import_named

    import_named(*(overrides or ()))
    if recipe is None:
        typed = [as_flag(name) for name in ("resume", "show", "out") if options[name]]
        if typed:
            raise ValueError(
                f"{typed[0]} is of a recipe: name it, as in psidiff train digits {typed[0]}"
            )
        width = max(map(len, shipped()))
        for name, about in shipped().items():
            print(f"{name:{width}}  {about}")
    elif options.pop("show"):
        print(as_yaml(read_recipe(recipe, overrides or ())), end="")
    else:
        for name in ("skip_damaged", "data_changed"):
            if options[name] and not options["resume"]:
                raise ValueError(f"{as_flag(name)} is of a run that is resumed: add --resume")
        from ..experiment.train import train as run
        from .progress import Progress

        code = run(
            recipe,
            overrides or (),
            shown=lambda first: Progress(Console(quiet=not first)),
            **options,
        )
        if code:
            raise typer.Exit(code)


@verb()
@with_options(flag("json", "One object of JSON."))
def data(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A data set by name, a recipe, a file or a folder.", show_default=False
        ),
    ] = None,
    **options: Any,
) -> None:
    """Say what is there of some data: files, counts, split, packing and the first rows.

    Without a name, list the data sets of the paper and which of them are here. Nothing is
    fetched.
    """
    from .data import run

    if not run(Console(), name, options["json"]):
        raise typer.Exit(130)


@verb()
@with_options(
    option(
        "rule",
        list[str],
        "A kappa rule to check, such as cap:.05 or FILE.py:NAME; may be repeated.",
    ),
    option(
        "prior", list[str], "A prior, such as mixed:uniform=.2 or FILE.py:NAME. \\[all four]"
    ),
    option("step", str, "Check your own step function: FILE.py:FUNCTION."),
)
def verify(*, rule: list[str] | None, prior: list[str] | None, step: str | None) -> None:
    """Check on toys, exactly, that every sampler keeps the marginals it promises."""
    from ..registry import import_named
    from .verify import load_step, show

    import_named(*(rule or ()), *(prior or ()))
    if not show(Console(), rule, load_step(step) if step else None, prior):
        raise typer.Exit(1)


@verb()
@with_options(flag("raw", "The last weights, not their average."))
def convert(
    source: Annotated[Path, typer.Argument(help="A released .ckpt, or a hub-style folder.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    *,
    raw: bool,
) -> None:
    """Write a released checkpoint in psidiff's own format. Nothing in its pickle is run."""
    from ..integrations import official

    model = official.load(source, ema=not raw)
    model.save(target)
    about = f"{model.config.network}, {model.num_parameters:,} parameters, {model.prior}"
    print_text(f"{target}: {about}")


@verb()
def models(
    name: Annotated[str | None, typer.Argument(help="One of them: its whole card.")] = None,
) -> None:
    """List the models that ship, or print the card of one: data, recipe, scores, limits."""
    from .models import run

    run(Console(), name)


@verb()
def doctor(
    checkpoint: Annotated[
        str | None, typer.Argument(help="A model to check: a name, a folder, a .ckpt.")
    ] = None,
) -> None:
    """Say what is installed, which device would be used, what is missing for which verb."""
    from .doctor import examine

    if not examine(Console(), checkpoint):
        raise typer.Exit(1)


@verb()
@with_options(
    option("num_samples", int, "How many samples.", 4, "--num", "-n", min=1),
    *SAMPLER,
    option("prompt", str, "What the text begins with."),
    option("suffix", str, "What the text ends with."),
    option("infill", str, 'A text with blanks: "Once {{8}} there was".'),
    option(
        "given", str, "Clues of a puzzle, a picture with transparent pixels, or \\[ids, -1]."
    ),
    option("labels", str, "The class, by number or name; each: all in turn.", None, "--label"),
    option("guidance_on", str, "What it acts on: x or posterior. \\[x]"),
    option("length", int, "Tokens of a sample. \\[the model's]"),
    option("overlap", int, "What a window sees of the one before. \\[half]"),
    SEED,
    option("out", Path, "A .txt, .jsonl or .png file, or a folder for shards."),
    flag("json", "Lines of JSON."),
    flag("whole", "Do not cut at the end of a text."),
    flag("watch", "See the samples form."),
    option("replay", Path, "Write a page with a slider: out.html."),
    option("trace", Path, "Record every step, for `psidiff replay`."),
    flag("resume", "Go on with the folder's shards."),
    flag(
        "force",
        "With --out FOLDER: go past locks of another machine whose processes are gone for "
        "sure; needed only where the file system has no locks.",
    ),
    option("batch_size", int, "At a time. \\[what fits]", min=1),
    option("shard_size", int, "Samples in a shard. \\[256]", min=1),
    DEVICE,
    DTYPE,
    flag("compiled", "Slow to start, then fast: for many samples.", "--compile"),
)
def sample(model: ModelName, **options: Any) -> None:
    """Sample from a model: text, images or puzzles, with prompts, blanks and labels.

    Many processes: torchrun --nproc-per-node 8 -m psidiff sample MODEL -n 50000 --out DIR
    The same command again, here or on another machine, shares the work of a folder.
    """
    from .sample import run

    if not run(Console(stderr=True), model, options):
        raise typer.Exit(130)


@verb()
@with_options(option("out", Path, "The page to write.", Path("replay.html")))
def replay(
    traces: Annotated[list[Path], typer.Argument(help="One or two files of `sample --trace`.")],
    *,
    out: Path,
) -> None:
    """A page that plays a recorded run, or two side by side."""
    from ..html.replay import write_page

    write_page(traces, out)
    say(Console(), "Open it in a browser: ", (out, "bold"), soft_wrap=True)


for each in (evaluate, compare, serve):
    verb()(each)


def main() -> None:
    """The entry point. Whatever goes wrong is said in one sentence; bugs are called bugs."""
    # before torch comes: threads that wait by spinning are ten times slower on a busy machine
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words, code = "", 0
    try:
        command = typer.main.get_command(app)
        with command.make_context("psidiff", sys.argv[1:]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except SystemExit:
        raise
    except BaseException as error:
        words, code = exit_message(error)
        _give_up_output()
    if words:
        print(words, file=sys.stderr)
    sys.exit(code)


def _give_up_output() -> None:
    """Where standard output is closed or full, Python shall not try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
