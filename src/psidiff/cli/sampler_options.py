"""The options of a verb that samples, made from the table that samplers are read by."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from ..sampler_options import OPTIONS, Option

F = TypeVar("F", bound=Callable[..., Any])
_OTHERS = {
    "preset": "A named sampler: paper-text, paper-images, remdm-cap, ...",
    "sampler": "All of this in words: 'cap:.1 steps=64 top_p=.9'.",
}


def with_sampler_options(verb: F) -> F:
    """Give a verb that ends in **options the options of a sampler, each None if not typed.

    They come after the first options of the verb, which are its positional parameters.
    """
    signature = inspect.signature(verb, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    about = {**OPTIONS, **{name: Option(text, "") for name, text in _OTHERS.items()}}
    first = [p for p in own if p.kind is not p.KEYWORD_ONLY]
    added = [_parameter(name, option) for name, option in about.items()]
    made: Any = verb
    parameters = [*first, *added, *own[len(first) :]]
    made.__signature__ = signature.replace(parameters=parameters)
    made.__annotations__ = {p.name: p.annotation for p in parameters}
    return verb


def typed_options(options: dict[str, Any]) -> dict[str, Any]:
    """What was typed of them, as `Model.sample` calls it; files that it names are imported."""
    from ..registry import import_named

    import_named(*(value for value in options.values() if isinstance(value, str)))
    return {"num_steps" if name == "steps" else name: v for name, v in options.items()}


def _parameter(name: str, option: Option) -> inspect.Parameter:
    usual = {"kappa": " \\[the model's own]", "steps": " \\[256]"}.get(name, "")
    least = {"min": 1} if option.kind is int else {}
    kind: Any = option.kind
    annotation = Annotated[kind | None, typer.Option(help=option.help + usual, **least)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=annotation)
