"""The options of `psidiff evaluate` and `psidiff compare`, as a person types them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .terminal import plain

_RULES = ("ancestral", "cap:0.02", "constant:0@.05-.6", "auto")  # that are compared


def evaluate(
    model: Annotated[
        str, typer.Argument(help="A name that ships, a folder, a .ckpt, a Hub id.")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Text files or ptb,wikitext2,lambada,... \\[the model's held-out data]"
        ),
    ] = None,
    protocol: Annotated[str | None, typer.Option(help="exact, or released. \\[exact]")] = None,
    sequences: Annotated[
        int | None, typer.Option(help="Rows of the data; 0 for all. \\[1000]", min=0)
    ] = None,
    draws: Annotated[int | None, typer.Option(help="Noise levels a row. \\[1]", min=1)] = None,
    psi: Annotated[
        str | None, typer.Option(help="The bound of a sampler by this rule, at finite steps.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of --psi. \\[256]", min=1)] = None,
    harness: Annotated[
        str | None, typer.Option(help="Multiple choice: arc_easy,piqa,...")
    ] = None,
    questions: Annotated[
        int | None, typer.Option(help="Questions of each task, at most. \\[all]", min=1)
    ] = None,
    harness_draws: Annotated[
        int | None, typer.Option(help="Draws a likelihood. \\[1024]", min=2)
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="Judge these: a folder of shards, or a .jsonl.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Of samples: lexicon,mauve,FILE.py:NAME,... \\[by kind]")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="A causal LM, an autoregressive model, FILE.py:NAME.")
    ] = None,
    truth: Annotated[
        str | None,
        typer.Option(help="Our model that the training text was sampled from."),
    ] = None,
    reference: Annotated[str | None, typer.Option(help="Real text to compare with.")] = None,
    features: Annotated[
        str | None, typer.Option(help="The Inception network's file. \\[pixels]")
    ] = None,
    drop_unknown: Annotated[
        bool,
        typer.Option(
            "--drop-unknown",
            help="Leave characters of --data out that the model does not know.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2)] = 0,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows at a time. \\[32]", min=1)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append lines of JSON here.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
) -> None:
    """Measure a model: likelihood of data, multiple choice, or samples made before."""
    from ..experiment.evaluate import Asked
    from ..registry import import_named
    from .evaluate import run
    from .option_checks import check_together

    import_named(psi)
    typed = _typed(
        data=_list(data),
        protocol=protocol,
        sequences=sequences,
        draws=draws,
        psi=psi,
        steps=steps,
        harness=_list(harness),
        questions=questions,
        harness_draws=harness_draws,
        samples=samples,
        metrics=metrics,
        judge=judge,
        truth=truth,
        reference=reference,
        features=features,
        drop_unknown=drop_unknown,
        batch_size=batch_size,
    )
    check_together(typed)
    with _stoppable("stopped before anything was finished: the same command begins again"):
        run(Console(), model, device, Asked(**typed, seed=seed, out=out))


def compare(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models; toy-uniform and toy-masked are oracles.")
    ] = None,
    steps: Annotated[str, typer.Option(help="Numbers of steps.")] = "16,64,256",
    kappa: Annotated[
        str,
        typer.Option(
            help=f"Rules, apart by commas; auto is the model's own. \\[{', '.join(_RULES)}]",
            show_default=False,
        ),
    ] = ",".join(_RULES),
    sampler: Annotated[
        list[str] | None,
        typer.Option(help="One more, as in 'cap:.1 corrector=2x12'; repeat it."),
    ] = None,
    last: Annotated[
        str | None, typer.Option(help="The last step: sample or greedy. \\[as the rule says]")
    ] = None,
    top_p: Annotated[str, typer.Option(help="Nuclei; none for all tokens.")] = "none",
    temperature: Annotated[str, typer.Option(help="Temperatures.")] = "none",
    samples: Annotated[int, typer.Option(help="Samples a cell.", min=1)] = 64,
    judge: Annotated[
        str | None, typer.Option(help="A causal LM, an autoregressive model, FILE.py:NAME.")
    ] = None,
    truth: Annotated[
        str | None,
        typer.Option(help="Our model that the training text was sampled from."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Real text. \\[the model's own held-out data]")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="The Inception network's file. \\[pixels]")
    ] = None,
    clues: Annotated[
        str | None,
        typer.Option(help="Of a Sudoku: none, minimal, or random:N or N of them. \\[24]"),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Also these metrics: mauve,FILE.py:NAME,...")
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Compare on toys, with the truth as the judge.")
    ] = False,
    error: Annotated[
        float | None,
        typer.Option(help="How wrong the toys' denoiser is, in nats. \\[4]", min=0),
    ] = None,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Say which rule to take, for each budget.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="How far the entropy may be from ancestral's.", min=0)
    ] = 0.03,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2)] = 0,
    out: Annotated[Path, typer.Option(help="The folder of the report.")] = Path("out/compare"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")
    ] = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Slow to start, then fast: for many cells.")
    ] = False,
) -> None:
    """Which sampler, how many steps, at what cost: a table, figures and a page.

    A run that was stopped or killed goes on by the same command.
    """
    from ..experiment.compare import ORACLES, cells_of
    from ..experiment.results_log import Protocol
    from ..registry import import_named
    from .compare import run

    import_named(kappa, *(sampler or ()))
    names = list(models or ())
    names += [name for name in ORACLES if oracle and name not in names]
    if not names:
        raise ValueError("name a model to compare samplers on, or --oracle")
    cells = cells_of(
        names,
        [_number(int, "--steps", word) for word in _list(steps)],
        [*_list(kappa), *(sampler or ())],
        [None if w == "none" else _number(float, "--top-p", w) for w in _list(top_p)],
        [
            None if w == "none" else _number(float, "--temperature", w)
            for w in _list(temperature)
        ],
    )
    if not cells:
        raise ValueError(
            "there is nothing to compare: --steps, --kappa, --top-p and --temperature each "
            "need a value"
        )
    typed = _typed(
        judge=judge,
        truth=truth,
        reference=reference,
        features=features,
        clues=int(clues) if clues and clues.isdecimal() else clues,
        error=error,
        metrics=metrics,
    )
    protocol = Protocol(samples, seed, **typed, last=last, dtype=dtype)
    with _stoppable(f"stopped: finished cells are kept in {out}, and the same command goes on"):
        run(Console(), cells, protocol, out, device, tolerance, recommend, set(typed), compiled)


@contextmanager
def _stoppable(otherwise: str) -> Iterator[None]:
    """Whoever presses Ctrl-C reads one sentence, the interrupt's own or this one."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        print(f"psidiff: {plain(str(stopped) or otherwise)}", file=sys.stderr)
        raise typer.Exit(130) from None


def _typed(**options: Any) -> dict[str, Any]:
    """The options that somebody typed; the others have their defaults where they are used."""
    return {n: v for n, v in options.items() if v is not None and v is not False and v != []}


def _list(text: str | None) -> list[str]:
    """Words apart by commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _number(kind: Any, option: str, word: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"{option} wants numbers apart by commas, got {word!r}") from None
