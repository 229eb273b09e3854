"""Conversations as prompts, by the model's template: Jinja, as the Hub has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ApiError

if TYPE_CHECKING:
    from ..model import Model


def has_template(model: Model) -> bool:
    return bool(model.config.chat_template)


def conversation(model: Model, messages: list[dict[str, str]]) -> str:
    """The text whose continuation is the answer."""
    if not has_template(model):
        raise ApiError(
            400,
            "this model has no chat template: use /v1/completions",
            "messages",
            "no_chat_template",
        )
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.globals["raise_exception"] = _refuse
    try:
        template = sandbox.from_string(str(model.config.chat_template))
        return template.render(messages=messages, add_generation_prompt=True)
    except (TemplateError, TypeError, ArithmeticError) as error:
        raise ApiError(400, f"the chat template refuses this: {error}", "messages") from error


def _refuse(message: str) -> None:
    raise TemplateError(message)
