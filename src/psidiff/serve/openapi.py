"""What the server reads and answers, as OpenAPI 3.1 and as a page that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from .. import __version__
from ..html import DATA, template
from .schemas import ALIASES, IGNORED, NOT_OFFERED, ChatBody, CompletionBody

_REF = "#/components/schemas/"
_TEXT, _COUNT, _BOOL = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "boolean"},
)
_ANY: dict[str, Any] = {}
_EITHER = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    """An object that has all of these, and may have more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _schema(name: str) -> dict[str, Any]:
    return {"$ref": _REF + name}


def _answer_schemas() -> dict[str, Any]:
    usage = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
    message = _object(role={"const": "assistant"}, content=_TEXT, refusal=_EITHER)
    tokens = _object(tokens=_list({"type": "integer"}))
    said = {"index": _COUNT, "logprobs": {"type": "null"}, "diffusion": tokens}
    said["finish_reason"] = {"enum": ["stop", "length"]}
    about = _object(seed=_COUNT, sampler=_TEXT, passes=_COUNT)
    whole = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "usage": usage, "diffusion": about}
    kinds = {
        "Completion": ("text_completion", {"text": _TEXT}),
        "ChatCompletion": ("chat.completion", {"message": message}),
    }
    answers = {
        name: _object(object={"const": kind}, choices=_list(_object(**said, **text)), **whole)
        for name, (kind, text) in kinds.items()
    }
    card = _object(
        id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, diffusion=_ANY
    )
    error = _object(message=_TEXT, type=_TEXT, param=_EITHER, code=_EITHER)
    return answers | {
        "Model": card,
        "Models": _object(object={"const": "list"}, data=_list(_schema("Model"))),
        "Health": _object(status=_TEXT, version=_TEXT, running=_COUNT, waiting=_COUNT),
        "Error": _object(error=error),
    }


def _body_schemas() -> dict[str, Any]:
    """The bodies as they are read, with the fields that are taken out before that."""
    made = models_json_schema(
        [(CompletionBody, "validation"), (ChatBody, "validation")],
        ref_template=_REF + "{model}",
    )[1]["$defs"]
    for name in ("CompletionBody", "ChatBody"):
        properties = made[name]["properties"]
        for alias, field in ALIASES.items():
            other = {key: value for key, value in properties[field].items() if key != "title"}
            properties[alias] = other | {"description": f"another word for {field}"}
        for field, allowed in NOT_OFFERED.items():
            words = "not offered: only what asks for nothing is taken"
            properties[field] = {"enum": list(allowed), "description": words}
        for field in IGNORED:
            properties[field] = {
                "description": "ignored; x-psidiff-ignored of the answer says so"
            }
    return made


def _responses(schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    headers = {"x-request-id": {"schema": _TEXT}}
    wrong = {"description": "what is wrong, in a sentence", "headers": headers}
    wrong["content"] = {"application/json": {"schema": _schema("Error")}}
    right = {
        "description": "the answer",
        "headers": headers,
        "content": {kind: {"schema": schema}},
    }
    return {"200": right, "4XX": wrong, "5XX": wrong}


def _get(about: str, schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {"get": {"summary": about, "responses": _responses(schema, kind)}}


def _post(about: str, body: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _schema(body)}}
    responses = _responses(_schema(schema))
    responses["200"]["content"]["text/event-stream"] = {"schema": _ANY}  # of each event
    return {
        "post": {
            "summary": about,
            "requestBody": {"required": True, "content": content},
            "responses": responses,
        }
    }


@cache
def openapi() -> dict[str, Any]:
    """The description of all paths but those of pages."""
    one = _get("a model by its name", _schema("Model"))
    named = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    one["get"]["parameters"] = [named]
    health = _get("whether the engine runs", _schema("Health"))
    health["get"]["responses"]["503"] = {**health["get"]["responses"]["200"]}
    about = (
        "Fields that begin with diffusion_ go beyond OpenAI's. A field may be null where it may"
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "psidiff",
            "version": __version__,
            "description": f"{about} be left out.",
        },
        "paths": {
            "/v1/completions": _post(
                "continue texts, or fill them in", "CompletionBody", "Completion"
            ),
            "/v1/chat/completions": _post(
                "answer a conversation", "ChatBody", "ChatCompletion"
            ),
            "/v1/models": _get("the model of this server", _schema("Models")),
            "/v1/models/{name}": one,
            "/health": health,
            "/metrics": _get("counters in Prometheus' format", _TEXT, "text/plain"),
        },
        "components": {
            "schemas": _body_schemas() | _answer_schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


@cache
def docs_page() -> str:
    """The description for a person: paths, and the fields of their bodies."""
    described = openapi()
    return template("psidiff.serve", "docs.html").replace(DATA, "\n".join(_sections(described)))


def _sections(described: dict[str, Any]) -> Iterator[str]:
    schemas = described["components"]["schemas"]
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            yield f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>"
            yield f"<p>{html.escape(about['summary'])}</p>"
            if "requestBody" in about:
                body = about["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                yield _table(schemas[body.removeprefix(_REF)])
    for name in ("Message", "TextPart", "StreamOptions"):
        yield f"<h2><code>{name}</code></h2>\n{_table(schemas[name])}"


def _table(schema: dict[str, Any]) -> str:
    rows = ""
    for name, field in schema["properties"].items():
        must = "yes" if name in schema.get("required", ()) else ""
        cells = (html.escape(_kind(field)), must, html.escape(field.get("description", "")))
        rows += f"<tr><td><code>{name}</code></td>" + "".join(f"<td>{c}</td>" for c in cells)
    return f"<table><tr><th>field</th><th>kind</th><th>must</th><th>is</th></tr>{rows}</table>"


def _kind(field: dict[str, Any]) -> str:
    """A schema in a few words, such as "integer" or "list of string"."""
    if "anyOf" in field:
        kinds = dict.fromkeys(_kind(each) for each in field["anyOf"])
        return " or ".join(kind for kind in kinds if kind != "null")
    if "$ref" in field:
        return str(field["$ref"]).removeprefix(_REF)
    if "enum" in field:
        return " or ".join(str(each) for each in field["enum"] if each is not None)
    kind = str(field.get("type", "anything"))
    return f"list of {_kind(field['items'])}" if kind == "array" else kind
