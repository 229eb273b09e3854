"""Write the tables of docs/samplers.md and docs/reproduce.md from the code.

    python docs/write_tables.py

A table stands between <!-- NAME --> and <!-- end -->; a test compares it with the code.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from psidiff.sampler_options import OPTIONS
from psidiff.sampler_presets import PRESET_WORDS
from psidiff.sampling import KAPPAS, PRESETS, Sampler, parse_kappa
from psidiff.sampling.sampler import format_options
from psidiff.serve.request_parsing import field_of
from psidiff.serve.schemas import SamplingBody

PAGES = Path(__file__).resolve().parent


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


def experiments() -> str:
    """Every table and figure of the paper: its commands and what to know about them."""
    rows = []
    for each in _paper().EXPERIMENTS:
        commands = "<br>".join(f"`{_brief(command)}`" for command in each.commands)
        if each.same_as:
            commands = f"the runs of `{each.same_as}`"
        needs = ", ".join(f"`{name}`" for name in each.needs) or "–"
        words = (each.samples, each.numbers, each.deviates, each.cost)
        rows.append([f"`{each.label}`", each.shows, commands or "–", needs, *words])
    names = ("label", "what", "what it runs", "files", "samples", "the paper's numbers")
    return table([*names, "known to deviate", "cost"], rows)


def files() -> str:
    """The files that the commands name."""
    rows = ([f"`{name}`", about] for name, about in _paper().FILES.items())
    return table(["name", "what it is"], rows)


def _brief(command: str) -> str:
    """A command, its many samplers counted."""
    count = len(re.findall("--sampler '", command))
    return re.sub(r"(--sampler '[^']*' ?)+", f"--sampler ... ({count} of them) ", command)


def _paper() -> Any:
    """benchmarks/paper/experiments.py"""
    path = PAGES.parents[0] / "benchmarks/paper/experiments.py"
    spec = importlib.util.spec_from_file_location("paper_experiments", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


TABLES = {
    "samplers.md": {"settings": settings, "rules": rules, "presets": presets},
    "reproduce.md": {"files": files, "experiments": experiments},
}


def filled(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A page with its tables as the code says them."""
    for name, made in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        text, count = re.subn(
            pattern, lambda m, made=made: m[1] + made() + m[2], text, flags=re.S
        )
        assert count == 1, name
    return text


if __name__ == "__main__":
    for page, tables in TABLES.items():
        path = PAGES / page
        path.write_text(filled(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
