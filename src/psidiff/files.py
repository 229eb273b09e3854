"""The small files we write: whole, with their version; read back or refused in a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1


def write_whole(path: Path, text: str) -> None:
    """The whole text or none of it, whenever the process is killed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_object(path: Path, values: dict[str, Any], indent: int | None = None) -> None:
    """JSON that says its version."""
    write_whole(path, json.dumps({"format_version": FORMAT_VERSION, **values}, indent=indent))


def read_json(path: Path) -> dict[str, Any]:
    """The mapping that a file holds."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(held, dict):
        raise ValueError(f"{path} must hold a mapping, got a {type(held).__name__}")
    return held


def read_object(path: Path) -> dict[str, Any]:
    """What `write_object` wrote, without its version; older files say none."""
    return known_version(path, read_json(path))


def known_version(path: Path | str, values: dict[str, Any]) -> dict[str, Any]:
    """The values but their version, if this is one that we read."""
    version = values.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version}; this psidiff reads {FORMAT_VERSION}"
        )
    return {key: value for key, value in values.items() if key != "format_version"}


def folder_of(name: str) -> Path:
    """A folder that the environment names: PSIDIFF_DATA, what is given to us; PSIDIFF_CACHE,
    what takes minutes to make."""
    return Path(os.environ.get(name) or "~/.cache/psidiff").expanduser()
