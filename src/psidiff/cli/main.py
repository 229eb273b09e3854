"""`psidiff VERB`: what a person types. Every mistake is one sentence and exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from .commands_measuring import compare, evaluate
from .commands_sampling import replay, sample
from .commands_serving import serve
from .failures import told
from .terminal import print_text


class _Verb(TyperCommand):
    """A verb whose flags are shown without <bool>, which would invite `--json true`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_bare(super().get_params(ctx))


class _Verbs(TyperGroup):
    """All of them, shown likewise. What they raise comes out of them as it is."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_bare(super().get_params(ctx))

    def main(self, *given: Any, **options: Any) -> Any:
        if options.get("standalone_mode", True):
            return super().main(*given, **options)
        with self.make_context("psidiff", sys.argv[1:]) as context:
            return self.invoke(context)


def _flags_bare(params: Iterable[Any]) -> list[Any]:
    params = list(params)
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


app = typer.Typer(
    name="psidiff",
    cls=_Verbs,
    help="Discrete diffusion with any noise prior, sampled exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"psidiff {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def psidiff(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    imported: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            metavar="FILE.py",
            help="Import a Python file of yours, so that models and options may name what it "
            "defines as FILE.py:NAME; may be repeated.",
        ),
    ] = None,
) -> None:
    """Discrete diffusion with any noise prior, sampled exactly."""
    if imported:
        from ..registry import import_file

        for path in imported:
            import_file(path)


@app.command(cls=_Verb)
def demo(
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("out/demo"),
    steps: Annotated[
        int,
        typer.Option(help="Steps for 50 puzzles; the first one gets 4 times as many.", min=8),
    ] = 64,
    kappa: Annotated[
        str,
        typer.Option(help="The rule beside ancestral: cap:.05, constant:.5@.1-.6, fb, ..."),
    ] = "constant:0@.05-.8",
    seed: Annotated[int, typer.Option(help="Equal seeds, equal samples.", min=0)] = 0,
) -> None:
    """Puzzles, prose and digits in a few minutes: ancestral sampling beside a Psi-sampler."""
    from ..registry import import_named
    from .demo import run

    import_named(kappa)
    run(Console(), out, steps, kappa, seed)


@app.command(cls=_Verb)
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A shipped recipe, or a .yaml file of yours.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as train.steps=1000.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder. \\[runs/RECIPE]")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the folder's run was.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    skip_damaged: Annotated[
        bool,
        typer.Option(
            "--skip-damaged",
            help="With --resume: the last checkpoint and the lines of the log that are whole.",
        ),
    ] = False,
    data_changed: Annotated[
        bool,
        typer.Option("--data-changed", help="With --resume: go on though the data are others."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Take the folder from a process of another machine that is gone for "
            "sure; needed only where the file system has no locks.",
        ),
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print every key of the recipe, and stop.")
    ] = False,
) -> None:
    """Train a model by a recipe; without one, list the recipes.

    Many processes: torchrun --nproc-per-node 8 -m psidiff train RECIPE
    """
    from ..experiment.recipe_files import as_yaml, read_recipe, shipped
    from ..registry import import_named

    import_named(*(overrides or ()))
    if recipe is None:
        if resume or show or out is not None:
            word = "--resume" if resume else "--show" if show else "--out"
            raise ValueError(
                f"{word} is of a recipe: name it, as in psidiff train digits {word}"
            )
        width = max(map(len, shipped()))
        for name, about in shipped().items():
            print(f"{name:{width}}  {about}")
    elif show:
        print(as_yaml(read_recipe(recipe, overrides or ())), end="")
    else:
        from .train import run

        code = run(
            Console(),
            recipe,
            overrides or (),
            out,
            resume,
            device,
            force=force,
            skip_damaged=skip_damaged,
            data_changed=data_changed,
        )
        if code:
            raise typer.Exit(code)


@app.command(cls=_Verb)
def verify(
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="A kappa rule to check, such as cap:.05 or FILE.py:NAME; may be repeated."
        ),
    ] = None,
    prior: Annotated[
        list[str] | None,
        typer.Option(help="A prior, such as mixed:uniform=.2 or FILE.py:NAME. \\[all four]"),
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="Check your own step function: FILE.py:FUNCTION.")
    ] = None,
) -> None:
    """Check on toys, exactly, that every sampler keeps the marginals it promises."""
    from ..registry import import_named
    from .verify import show

    import_named(*(rule or ()), *(prior or ()))
    if not show(Console(), rule, load_step(step) if step else None, prior):
        raise typer.Exit(1)


@app.command(cls=_Verb)
def convert(
    source: Annotated[Path, typer.Argument(help="A released .ckpt, or a hub-style folder.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="The last weights, not their average.")
    ] = False,
) -> None:
    """Write a released checkpoint in psidiff's own format. Nothing in its pickle is run."""
    from ..integrations import official

    model = official.load(source, ema=not raw)
    model.save(target)
    count = sum(p.numel() for p in model.network.parameters())
    print_text(f"{target}: {model.config.network}, {count:,} parameters, {model.prior}")


@app.command(cls=_Verb)
def models(
    name: Annotated[str | None, typer.Argument(help="One of them: its whole card.")] = None,
) -> None:
    """List the models that ship, or print the card of one: data, recipe, scores, limits."""
    from .models import run

    run(Console(), name)


@app.command(cls=_Verb)
def doctor(
    checkpoint: Annotated[
        str | None, typer.Argument(help="A model to check: a name, a folder, a .ckpt.")
    ] = None,
) -> None:
    """Say what is installed, which device would be used, what is missing for which verb."""
    from .doctor import examine

    if not examine(Console(), checkpoint):
        raise typer.Exit(1)


for verb in (sample, replay, evaluate, compare, serve):
    app.command(cls=_Verb)(verb)


def load_step(text: str) -> Callable[..., Any]:
    """FILE.py:FUNCTION -> a step function, whose own errors come as one sentence."""
    from ..registry import describe_error, load_object

    function, path = load_object(text), text.rpartition(":")[0]
    if not callable(function):
        raise ValueError(f"{text} is no function")

    def guarded(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            words = describe_error(error, str(Path(path).resolve()))
            raise ValueError(f"{text} failed: {words}") from error

    return guarded


def main() -> None:
    """The entry point. Whatever goes wrong is said in one sentence; bugs are called bugs."""
    # before torch comes: threads that wait by spinning are ten times slower on a busy machine
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words, code = "", 0
    try:
        app(standalone_mode=False)
        sys.stdout.flush()
    except SystemExit:
        raise
    except BaseException as error:
        words, code = told(error)
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
