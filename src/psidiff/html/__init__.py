"""What all pages share: a look, and data that no text in it can break out of."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..files import write_atomic

DATA = "__DATA__"  # where a page has its data, in a script element


@cache
def template(package: str, name: str) -> str:
    """A page of a package with the common look put in; its data is still to come."""
    look = files(__name__).joinpath("look.css").read_text(encoding="utf-8")
    return files(package).joinpath(name).read_text(encoding="utf-8").replace("{{look}}", look)


def json_for_script(data: Any) -> str:
    """JSON for a script element: nothing in it can end that, or open another."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")


def fill_page(path: Path, package: str, name: str, data: Any) -> None:
    """A page of a package with its data, as one file that needs nothing beside it."""
    page = template(package, name).replace(DATA, json_for_script(data))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page.encode("utf-8", "backslashreplace"))
