"""`psidiff VERB`: what a person types. Every mistake is one sentence and exit code 2."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import __version__

app = typer.Typer(
    name="psidiff",
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
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say it, stop."),
    ] = False,
) -> None:
    """Discrete diffusion with any noise prior, sampled exactly."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("out/demo"),
    steps: Annotated[int, typer.Option(help="Steps of the run that is shown.", min=8)] = 128,
    kappa: Annotated[
        str,
        typer.Option(help="The rule beside ancestral: cap:.05, constant:.5@.1-.6, fb, ..."),
    ] = "cap:0.05",
    seed: Annotated[
        int, typer.Option(help="Equal seeds, equal samples.", min=0, max=2**63 - 2)
    ] = 0,
) -> None:
    """A toy text denoised before your eyes: ancestral sampling beside a Psi-sampler."""
    from .demo import run

    run(Console(), out, steps, kappa, seed)


@app.command()
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    show: Annotated[
        bool, typer.Option("--show", help="Print every key of the recipe, and stop.")
    ] = False,
) -> None:
    """Train a model by a recipe; without one, list the recipes.

    Many processes: torchrun --nproc-per-node 8 -m psidiff train RECIPE
    """
    from .recipe import as_yaml, read_recipe, shipped

    if recipe is None:
        width = max(map(len, shipped()))
        for name, about in shipped().items():
            print(f"{name:{width}}  {about}")
    elif show:
        print(as_yaml(read_recipe(recipe, overrides or ())), end="")
    else:
        from .train import run

        if not run(Console(), recipe, overrides or (), out, resume, device):
            raise typer.Exit(143)


@app.command()
def sample(
    model: Annotated[
        str, typer.Argument(help="A name that ships, a folder, a .ckpt, a Hub id.")
    ],
    num: Annotated[int, typer.Option("--num", "-n", help="How many samples.", min=1)] = 4,
    steps: Annotated[int, typer.Option(help="Steps of the sampler.", min=1)] = 256,
    kappa: Annotated[
        str,
        typer.Option(help="ancestral, cap:.01, constant:0@.05-.6, rescale:.05, loop:.02, ..."),
    ] = "auto",
    preset: Annotated[
        str | None,
        typer.Option(help="A named sampler: paper-text, paper-images, remdm-cap, ..."),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus of x_theta.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least share of the best token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="So many tokens only.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of x_theta.")] = None,
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
    guidance: Annotated[
        str | None, typer.Option(help="Towards the label: 2, ramp:3, 2@.1-.6.")
    ] = None,
    guidance_on: Annotated[str, typer.Option(help="x or posterior.")] = "x",
    predictor: Annotated[
        str | None, typer.Option(help="markov, maximal, confident, confident:margin, ...")
    ] = None,
    corrector: Annotated[
        str | None, typer.Option(help="Sweeps x size at every level: 2x12, 1x8:uncertain.")
    ] = None,
    last: Annotated[str | None, typer.Option(help="The last step: sample or greedy.")] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a sample. \\[the model's]")
    ] = None,
    overlap: Annotated[
        int | None, typer.Option(help="What a window sees of the one before. \\[half]")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Equal seeds, equal samples.", min=0, max=2**63 - 2)
    ] = 0,
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
    batch_size: Annotated[
        int | None, typer.Option(help="At a time. \\[what fits]", min=1)
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="The batch the network always sees.", min=1)
    ] = None,
    shard_size: Annotated[int, typer.Option(help="Samples in a shard.", min=1)] = 256,
    head: Annotated[
        str | None, typer.Option(help="lazy or dense, for the same tokens.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Sample from a model: text, images or puzzles, with prompts, blanks and labels.

    Many processes: torchrun --nproc-per-node 8 -m psidiff sample MODEL -n 50000 --out DIR
    """
    from ..sampling import parse_guidance
    from .sample import Output, run

    asked = {
        "num_samples": num,
        "num_steps": steps,
        "kappa": kappa,
        "preset": preset,
        "top_p": top_p,
        "min_p": min_p,
        "top_k": top_k,
        "temperature": temperature,
        "prompt": prompt,
        "suffix": suffix,
        "infill": infill,
        "given": given,
        "labels": label,
        "guidance": None if guidance is None else parse_guidance(guidance, guidance_on),
        "predictor": predictor,
        "corrector": corrector,
        "last": last,
        "length": length,
        "overlap": overlap,
        "seed": seed,
        "micro_batch": micro_batch,
        "head": head,
    }
    output = Output(out, as_json, whole, resume, batch_size, shard_size, watch, trace, replay)
    if not run(Console(stderr=True), model, device, dtype, asked, output):
        raise typer.Exit(130)


@app.command()
def replay(
    traces: Annotated[list[Path], typer.Argument(help="One or two files of `sample --trace`.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("replay.html"),
) -> None:
    """A page that plays a recorded run, or two side by side."""
    from .replay import show

    show(Console(), traces, out)


@app.command()
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
    protocol: Annotated[str, typer.Option(help="exact, or released.")] = "exact",
    sequences: Annotated[
        int | None, typer.Option(help="Rows of the data; 0 for all.", min=0)
    ] = 1000,
    draws: Annotated[int, typer.Option(help="Noise levels a row.", min=1)] = 1,
    psi: Annotated[
        str | None, typer.Option(help="The bound of a sampler by this rule, at finite steps.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of --psi.", min=1)] = 256,
    harness: Annotated[
        str | None, typer.Option(help="Multiple choice: arc_easy,piqa,...")
    ] = None,
    questions: Annotated[int | None, typer.Option(help="At most so many.", min=1)] = None,
    harness_draws: Annotated[int, typer.Option(help="Draws a likelihood.", min=2)] = 1024,
    samples: Annotated[
        Path | None, typer.Option(help="Judge these: a folder of shards, or a .jsonl.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="A causal LM, or an autoregressive model of ours.")
    ] = None,
    reference: Annotated[str | None, typer.Option(help="Real text to compare with.")] = None,
    features: Annotated[
        str | None, typer.Option(help="The Inception network's file. \\[pixels]")
    ] = None,
    drop_unknown: Annotated[
        bool, typer.Option("--drop-unknown", help="Leave out characters it does not know.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2)] = 0,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    out: Annotated[Path | None, typer.Option(help="Append lines of JSON here.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Measure a model: likelihood of data, multiple choice, or samples made before."""
    from .evaluate import Asked, run

    asked = Asked(
        data=_list(data),
        protocol=protocol,
        sequences=sequences or None,
        draws=draws,
        psi=psi,
        steps=steps,
        harness=_list(harness),
        questions=questions,
        likelihood_draws=harness_draws,
        samples=samples,
        judge=judge,
        reference=reference,
        features=features,
        drop_unknown=drop_unknown,
        seed=seed,
        batch_size=batch_size,
        out=out,
    )
    run(Console(), model, device, asked)


@app.command()
def compare(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models; toy-uniform and toy-masked are oracles.")
    ] = None,
    steps: Annotated[str, typer.Option(help="Numbers of steps.")] = "16,64,256",
    kappa: Annotated[
        str, typer.Option(help="Rules, apart by commas.")
    ] = "ancestral,cap:0.02,constant:0@.05-.6",
    top_p: Annotated[str, typer.Option(help="Nuclei; none for all tokens.")] = "none",
    temperature: Annotated[str, typer.Option(help="Temperatures.")] = "none",
    samples: Annotated[int, typer.Option(help="Samples a cell.", min=1)] = 64,
    judge: Annotated[
        str | None, typer.Option(help="A causal LM, or an autoregressive model of ours.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Real text. \\[the model's own held-out data]")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="The Inception network's file. \\[pixels]")
    ] = None,
    clues: Annotated[int, typer.Option(help="Given cells of a Sudoku.", min=0, max=80)] = 24,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Compare on toys, with the truth as the judge.")
    ] = False,
    error: Annotated[
        float, typer.Option(help="How wrong the toys' denoiser is, in nats.", min=0)
    ] = 4.0,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Say which rule to take, for each budget.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="How far the entropy may be from ancestral's.", min=0)
    ] = 0.03,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2)] = 0,
    out: Annotated[Path, typer.Option(help="The folder of the report.")] = Path("out/compare"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Which sampler, how many steps, at what cost: a table, figures and a page.

    A run that was killed goes on by the same command.
    """
    from .compare import ORACLES, Protocol, cells_of, run

    names = list(models or ())
    names += [name for name in ORACLES if oracle and name not in names]
    if not names:
        raise ValueError("name a model to compare samplers on, or --oracle")
    cells = cells_of(
        names,
        [_number(int, "--steps", word) for word in _list(steps)],
        _list(kappa),
        [None if w == "none" else _number(float, "--top-p", w) for w in _list(top_p)],
        [
            None if w == "none" else _number(float, "--temperature", w)
            for w in _list(temperature)
        ],
    )
    protocol = Protocol(samples, seed, judge, reference, features, clues, error)
    run(Console(), cells, protocol, out, device, tolerance if recommend else None)


@app.command()
def verify(
    rule: Annotated[
        list[str] | None, typer.Option(help="A kappa rule to check; may be repeated.")
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="Check your own step function: FILE.py:FUNCTION.")
    ] = None,
) -> None:
    """Check on toys, exactly, that every sampler keeps the marginals it promises."""
    from .verify import show

    if not show(Console(), rule, load_function(step) if step else None):
        raise typer.Exit(1)


@app.command()
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
    print(f"{target}: {model.config['network']}, {count:,} parameters, {model.prior}")


@app.command()
def doctor(
    checkpoint: Annotated[
        str | None, typer.Argument(help="A model to check: a name, a folder, a .ckpt.")
    ] = None,
) -> None:
    """Say what is installed, which device would be used, what is missing for which verb."""
    from .doctor import examine

    if not examine(Console(), checkpoint):
        raise typer.Exit(1)


def _list(text: str | None) -> list[str]:
    """Words apart by commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _number(kind: Any, option: str, word: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"{option} wants numbers apart by commas, got {word!r}") from None


def load_function(text: str) -> Any:
    """FILE.py:FUNCTION -> the function."""
    path, _, name = text.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"--step wants FILE.py:FUNCTION with a file that exists, got {text!r}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be imported: {_in_words(error, path)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")

    def guarded(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise ValueError(f"{text} failed: {_in_words(error, path)}") from error

    return guarded


def _in_words(error: Exception, path: str) -> str:
    """The error and the last line of the file it passed through."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f"line {lines[-1]}: " if lines else ""
    first = str(error).strip().splitlines()
    return f"{where}{type(error).__name__}: {first[0] if first else 'no message'}"


def main() -> None:
    """The entry point: a wrong value is said in one sentence, without a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"psidiff: {error}", file=sys.stderr)
        sys.exit(2)
