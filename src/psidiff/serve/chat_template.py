"""Conversations as prompts, by the model's template: Jinja, as the Hub has it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..checksums import in_short
from .errors import ApiError

if TYPE_CHECKING:
    from ..model import Model

_LINES = 2_000_000  # of Python that a template may take: a second or so
_LARGEST = 2**24


def apply_chat_template(model: Model, messages: list[dict[str, str]]) -> str:
    """The text whose continuation is the answer."""
    if not model.config.chat_template:
        raise ApiError(
            400,
            "this model has no chat template: use /v1/completions",
            "messages",
            "no_chat_template",
        )
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.globals["raise_exception"] = _refuse
    sandbox.intercepted_binops = frozenset({"*", "**"})
    sandbox.binop_table |= {"*": _times, "**": _power}
    before = sys.gettrace()
    try:
        template = sandbox.from_string(str(model.config.chat_template))
        sys.settrace(_bounded())
        return template.render(messages=messages, add_generation_prompt=True)
    except Exception as error:  # a program of a stranger may end in every way there is
        why = in_short(error) or type(error).__name__
        raise ApiError(400, f"the chat template refuses this: {why}", "messages") from error
    finally:
        sys.settrace(before)


def _times(a: Any, b: Any) -> Any:
    """Nothing that takes long, or much memory, in a single line."""
    sizes = [len(x) if isinstance(x, (str, list, tuple)) else abs(x) for x in (a, b)]
    return a * b if sizes[0] * sizes[1] <= _LARGEST else _refuse("it multiplies what is large")


def _power(a: Any, b: Any) -> NoReturn:
    _refuse("it raises to a power")


def _bounded() -> Any:
    """Sees every line that this thread runs, and stops it after so many."""
    left = _LINES

    def trace(*_: Any) -> Any:
        nonlocal left
        left -= 1
        return trace if left > 0 else _refuse("it takes too long")

    return trace


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
