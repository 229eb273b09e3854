"""The options of `psidiff evaluate` and `psidiff compare`, as a person types them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .options import DEVICE, DTYPE, FEATURES, JUDGES, flag, option, with_options

_RULES = ("ancestral", "cap:0.02", "constant:0@.05-.6", "auto")  # that are compared
_PROTOCOL = option(
    "protocol", str, "exact, or released: as the papers' numbers were made. \\[exact]"
)
_SEED = option("seed", int, None, 0, min=0, max=2**63 - 2)


@with_options(
    option(
        "data", str, "Text files or ptb,wikitext2,lambada,... \\[the model's held-out data]"
    ),
    option("protocol", str, "exact, released, or paper (of images). \\[exact]"),
    option("sequences", int, "Rows of the data; 0 for all. \\[1000]", min=0),
    option("draws", int, "Noise levels a row. \\[1]", min=1),
    option("psi", str, "The bound of a sampler in words, at finite steps: 'cap:.1 steps=9'."),
    option("steps", int, "Steps of --psi. \\[256]", min=1),
    option("harness", str, "Multiple choice: arc_easy,piqa,..."),
    option("questions", int, "Questions of each task, at most. \\[all]", min=1),
    option("harness_draws", int, "Draws a likelihood. \\[1024]", min=2),
    option("samples", Path, "Judge these: a folder of shards, a .jsonl, images."),
    option("metrics", str, "Of samples: lexicon,mauve,FILE.py:NAME,... \\[by kind]"),
    *JUDGES,
    option("reference", str, "Real text or images to compare with: PATH, PATH:test,2000."),
    FEATURES,
    flag("drop_unknown", "Leave characters of --data out that the model does not know."),
    _SEED,
    option("batch_size", int, "Rows at a time. \\[32]", min=1),
    option("out", Path, "Append lines of JSON here."),
    DEVICE,
)
def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(help="A model; images by --samples and --reference need none."),
    ] = None,
    *,
    seed: int,
    out: Path | None,
    device: str,
    **options: Any,
) -> None:
    """Measure a model: likelihood of data, multiple choice, or samples made before."""
    from ..experiment.evaluate import Asked
    from ..registry import import_named
    from .evaluate import run
    from .option_checks import check_option_conflicts

    import_named(options["psi"])
    options |= {name: _list(options[name]) for name in ("data", "harness")}
    typed = _typed(options)
    check_option_conflicts(typed)
    with _stoppable("stopped before anything was finished: the same command begins again"):
        run(Console(), model, device, Asked(**typed, seed=seed, out=out))


@with_options(
    option("steps", str, "Numbers of steps.", "16,64,256"),
    option(
        "kappa",
        str,
        f"Rules, apart by commas; auto is the model's own. \\[{', '.join(_RULES)}]",
        ",".join(_RULES),
        show_default=False,
    ),
    option("sampler", list[str], "One more, as in 'cap:.1 corrector=2x12'; repeat it."),
    option("last", str, "The last step: sample or greedy. \\[as the rule says]"),
    option("top_p", str, "Nuclei; none for all tokens.", "none"),
    option("temperature", str, "Temperatures.", "none"),
    option("samples", int, "Samples a cell.", 64, min=1),
    *JUDGES,
    _PROTOCOL,
    option("reference", str, "Real text or images. \\[the model's own data]"),
    FEATURES,
    option("clues", str, "Of a Sudoku: none, minimal, or random:N or N of them. \\[24]"),
    option("metrics", str, "Also these metrics: mauve,FILE.py:NAME,..."),
    flag("oracle", "Compare on toys, with the truth as the judge."),
    option("error", float, "How wrong the toys' denoiser is, in nats. \\[4]", min=0),
    option("choose", str, "paper: show the rows that the paper would, also in the figure."),
    flag("recommend", "Say which rule to take, for each budget."),
    option("tolerance", float, "How far the entropy may be from ancestral's.", 0.03, min=0),
    _SEED,
    option("out", Path, "The folder of the report.", Path("out/compare")),
    DEVICE,
    DTYPE,
    flag("compiled", "Slow to start, then fast: for many cells.", "--compile"),
)
def compare(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models; toy-uniform and toy-masked are oracles.")
    ] = None,
    **options: Any,
) -> None:
    """Which sampler, how many steps, at what cost: a table, figures and a page.

    A run that was stopped or killed goes on by the same command.
    """
    from ..experiment.compare import ORACLES
    from ..experiment.results_log import Cell, Protocol
    from ..registry import import_named
    from .compare import run

    axes = ("steps", "kappa", "top_p", "temperature")
    steps, kappa, top_p, temperature = (_list(options.pop(name)) for name in axes)
    samplers, oracle = options.pop("sampler") or [], options.pop("oracle")
    import_named(*kappa, *samplers)
    names = list(models or ())
    names += [name for name in ORACLES if oracle and name not in names]
    if not names:
        raise ValueError("name a model to compare samplers on, or --oracle")
    grid = itertools.product(
        names,
        [_number(int, "--steps", word) for word in steps],
        [*kappa, *samplers],
        [_number(float, "--top-p", word) for word in top_p],
        [_number(float, "--temperature", word) for word in temperature],
    )
    cells = [Cell(*each) for each in grid]
    if not cells:
        raise ValueError(
            "there is nothing to compare: --steps, --kappa, --top-p and --temperature each "
            "need a value"
        )
    clues = options["clues"]
    options["clues"] = int(clues) if clues and clues.isdecimal() else clues
    of_run = ("out", "device", "tolerance", "recommend", "choose", "compiled")
    how = {name: options.pop(name) for name in of_run}
    how["chosen_as"] = how.pop("choose")
    typed, kept = _typed(options), f"finished cells are kept in {how['out']}"
    with _stoppable(f"stopped: {kept}, and the same command goes on"):
        run(Console(), cells, Protocol(**typed), set(typed), **how)


@contextmanager
def _stoppable(words: str) -> Iterator[None]:
    """Whoever presses Ctrl-C reads one sentence, the interrupt's own or this one."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(str(stopped) or words) from None


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    """The options that somebody typed; the others have their defaults where they are used."""
    return {n: v for n, v in options.items() if v is not None and v is not False and v != []}


def _list(text: str | None) -> list[str]:
    """Words apart by commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _number(kind: Any, name: str, word: str) -> Any:
    """A number of such a list; none is None, where the kind is float."""
    try:
        return None if kind is float and word == "none" else kind(word)
    except ValueError:
        raise ValueError(f"{name} wants numbers apart by commas, got {word!r}") from None
