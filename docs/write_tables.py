"""Write the tables of docs/samplers.md from the code.

    python docs/write_tables.py

A table stands between <!-- NAME --> and <!-- end -->; a test compares it with the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

from psidiff.sampler_options import OPTIONS
from psidiff.sampler_presets import PRESET_WORDS
from psidiff.sampling import KAPPAS, PRESETS, Sampler, parse_kappa
from psidiff.sampling.sampler import format_options
from psidiff.serve.request_parsing import field_of
from psidiff.serve.schemas import SamplingBody

PAGE = Path(__file__).with_name("samplers.md")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def settings() -> str:
    """Every setting: in words, on the command line, in a request, its default."""
    usual, rows = Sampler(), []
    for name, option in OPTIONS.items():
        field = field_of(name)
        body = f"`{field}`" if field in SamplingBody.model_fields else "–"
        default = getattr(usual, name)
        if default is None:
            said = "none"
        else:
            said = f"`{format_options({name: default}).removeprefix(name + '=')}`"
        flag = "--" + name.replace("_", "-")
        rows.append([f"`{name}`", f"`{flag}`", body, said, option.help])
    return table(["setting", "command line", "request body", "default", "what it is"], rows)


def rules() -> str:
    """Every rule, its parameters, and what it is."""
    rows = []
    for name in KAPPAS.names:
        parameters = KAPPAS.parameters(name)
        value = None if parameters else parse_kappa(name)
        cls = KAPPAS.find_class(name) if parameters else type(value)
        about = (inspect.getdoc(cls) or "").splitlines()[0]
        words = ", ".join(f"`{each}`" for each in parameters) or f"it is `{value!r}`"
        rows.append([f"`{name}`", words, about])
    return table(["rule", "parameters", "what it is"], rows)


def presets() -> str:
    """Every preset, in words, and where it comes from."""
    rows = (
        [f"`{name}`", f"`{sampler}`", PRESET_WORDS[name].about]
        for name, sampler in PRESETS.items()
    )
    return table(["preset", "in words", "where it comes from"], rows)


TABLES = {"settings": settings, "rules": rules, "presets": presets}


def filled(text: str) -> str:
    """The page with its tables as the code says them."""
    for name, made in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        text, count = re.subn(
            pattern, lambda m, made=made: m[1] + made() + m[2], text, flags=re.S
        )
        assert count == 1, name
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
