"""Options of the verbs in tables: a line for each, and one place for what many verbs have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from ..sampler_options import OPTIONS

Verb = TypeVar("Verb", bound=Callable[..., Any])


def as_flag(name: str) -> str:
    """What is typed for an option: --batch-size for batch_size."""
    return "--" + name.replace("_", "-")


def option(
    name: str, kind: Any, about: str | None, default: Any = None, *flags: str, **more: Any
) -> inspect.Parameter:
    """An option of a verb, --NAME unless flags are given; without a default it may be None."""
    flags = flags or (as_flag(name),)
    kind = kind | None if default is None else kind
    annotation: Any = Annotated[kind, typer.Option(*flags, help=about, **more)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def flag(name: str, about: str, *flags: str, **more: Any) -> inspect.Parameter:
    """An option without a value."""
    return option(name, bool, about, False, *flags, **more)


def with_options(*options: inspect.Parameter) -> Callable[[Verb], Verb]:
    """Give a verb these options after the arguments that it declares itself."""

    def decorate(verb: Verb) -> Verb:
        signature = inspect.signature(verb, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        parameters = [*own, *options]
        changed: Any = verb
        changed.__signature__ = signature.replace(parameters=parameters)
        changed.__annotations__ = {p.name: p.annotation for p in parameters}
        return verb

    return decorate


ModelName = Annotated[
    str, typer.Argument(help="A name that ships, a folder, a .ckpt, a Hub id.")
]
DEVICE = option("device", str, "auto, cpu, cuda, cuda:N or mps.", "auto")
DTYPE = option("dtype", str, "auto, float32, bfloat16, float16 or float64.", "auto")
SEED = option("seed", int, "Equal seeds, equal samples.", 0, min=0)
JUDGES = (
    option("judge", str, "A causal LM, an autoregressive model, FILE.py:NAME."),
    option("truth", str, "Our model that the training text was sampled from."),
)
FEATURES = option("features", str, "Inception's file, or FILE.py:NAME. \\[pixels]")
_USUAL = {"kappa": " \\[the model's own]", "steps": " \\[256]"}
SAMPLER = (
    *(
        option(
            name,
            each.kind,
            each.help + _USUAL.get(name, ""),
            **({"min": 1} if each.kind is int else {}),
        )
        for name, each in OPTIONS.items()
    ),
    option(
        "preset", str, "A named sampler: paper-text, paper-images, paper-images-masked, ..."
    ),
    option("sampler", str, "All of this in words: 'cap:.1 steps=64 top_p=.9'."),
)
